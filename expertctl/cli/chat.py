"""``expertctl chat``: a conversation at a terminal, or with the lines of a script.

The answers go to stdout, all else to stderr. An error in a turn is shown, and the chat goes on; a
script learns of it by the exit code. With ``--json`` all turns are one document at the end.
"""

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expertctl.cli.answer_stream import closing_stream
from expertctl.cli.chat_error import refused
from expertctl.cli.chat_input import ReadLine, Said, line_reader, next_said
from expertctl.cli.chat_loading import Loading, StoppedError, save_plan
from expertctl.cli.exit_codes import OK, exit_code
from expertctl.cli.interruption import Ending, TerminatedError
from expertctl.cli.named_base import known_base
from expertctl.cli.opening import importing_engine, open_engine, open_planner
from expertctl.cli.output import (
    JsonFlag,
    fail,
    note,
    print_json,
    progress,
    terminal_width,
    warn,
)
from expertctl.cli.piped import is_terminal
from expertctl.cli.prompt_input import PromptInput, read_body, read_input
from expertctl.cli.run_options import (
    AdapterDtype,
    Base,
    Deterministic,
    Device,
    Dtype,
    Exclude,
    Expert,
    Greedy,
    MaxExperts,
    MaxTokens,
    MemoryBudget,
    MinP,
    Mismatch,
    MoeCold,
    MoeExchange,
    MoeLearn,
    MoeMiss,
    MoePin,
    MoeProfile,
    MoeSkipCap,
    MoeWarmup,
    NoExperts,
    OnBudget,
    Repetition,
    Seed,
    Stats,
    Stop,
    Temperature,
    Template,
    TopK,
    TopP,
    VerifyBase,
    budget_of,
    cap_of,
    chosen_device,
    cold_of,
    numerics_of,
    start_of,
)
from expertctl.errors import ExpertError, NotFoundError, UsageError
from expertctl.settings import Settings, load_settings

if TYPE_CHECKING:
    from expertctl.engine.conversation import Conversation, Turn
    from expertctl.engine.moe.start import StartWishes
    from expertctl.engine.request import RunRequest
    from expertctl.routing.planner import Planner

LEAVING = ("/exit", "/quit")
LEAVE_HINT = "press Ctrl-C again to leave, or /help"


def chat(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="The first message; piped text follows it. Without it, each line of stdin is one.",
            show_default=False,
        ),
    ] = None,
    expert: Expert = None,
    exclude: Exclude = None,
    max_experts: MaxExperts = 10,
    no_experts: NoExperts = False,
    base: Base = None,
    body: Annotated[
        str | None, typer.Option(metavar="FILE", help="File to append to the first message.")
    ] = None,
    template: Template = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: Repetition = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    seed: Seed = None,
    greedy: Greedy = False,
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate", help="Leave out the oldest turns when a conversation does not fit."
        ),
    ] = False,
    device: Device = None,
    memory_budget: MemoryBudget = None,
    on_budget: OnBudget = "refuse",
    dtype: Dtype = None,
    adapter_dtype: AdapterDtype = None,
    deterministic: Deterministic = None,
    moe_miss: MoeMiss = "exact",
    moe_skip_cap: MoeSkipCap = None,
    moe_cold: MoeCold = None,
    moe_profile: MoeProfile = None,
    moe_pin: MoePin = None,
    moe_warmup: MoeWarmup = None,
    moe_exchange: MoeExchange = 0.0,
    moe_learn: MoeLearn = None,
    verify_base: VerifyBase = False,
    allow_base_mismatch: Mismatch = False,
    as_json: JsonFlag = False,
    stats: Stats = False,
) -> None:
    r"""Chat with experts; /help lists the commands.

    Example: printf 'Put 41, 17, 23 in ascending order\nAnd 9, 8, 7\n' | expertctl chat
    """
    from expertctl.engine.message import UserMessage
    from expertctl.engine.request import RunRequest, parse_expert
    from expertctl.routing.presets import SamplingWishes
    from expertctl.routing.request import RouteRequest, check_request, parse_target

    settings = load_settings()
    held = numerics_of(
        settings, dtype=dtype, adapter_dtype=adapter_dtype, deterministic=deterministic
    )
    chosen = chosen_device(device, settings)
    first = _first_input(prompt, body)
    message = UserMessage(prompt="?", body=first.body, template=template)
    message.text()
    pattern = RunRequest(
        message=message,
        route=RouteRequest(
            prompt=message.prompt,
            exclude=tuple(parse_target(text) for text in exclude or ()),
            max_experts=max_experts,
            base_alone=no_experts,
            seed=seed,
            wishes=SamplingWishes(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                max_tokens=max_tokens,
                stop=tuple(stop) if stop else None,
                greedy=greedy,
            ),
            dtype=held.dtype,
            adapter_dtype=held.adapter_dtype,
            deterministic=held.deterministic,
            moe_miss=moe_miss,
            moe_skip_cap=cap_of(moe_skip_cap, (moe_miss,)),
            moe_cold=cold_of(moe_cold, settings),
            device=chosen,
            memory_budget=budget_of(memory_budget, settings),
            allow_base_mismatch=allow_base_mismatch,
        ),
        base=known_base(base, settings, as_json=as_json),
        truncate=truncate,
        verify_base=verify_base,
        on_budget=on_budget,
    )
    check_request(pattern.route)
    named = [parse_expert(text) for text in expert or ()]
    if named and no_experts:
        raise UsageError(
            "experts are forced and forbidden at once", hint="leave out --expert or --no-experts"
        )
    moe = start_of(
        settings,
        profile=moe_profile,
        pin=moe_pin,
        warmup=moe_warmup,
        exchange=moe_exchange,
        learn=moe_learn,
    )
    session = _open(pattern, settings, moe, as_json=as_json, stats=stats)
    if named:
        session.conversation.use(named)
    raise typer.Exit(session.run(line_reader(as_json=as_json), first=first.prompt))


def _first_input(words: list[str] | None, body: str | None) -> PromptInput:
    """Return the first message, empty where it comes as the others do, and what follows it."""
    if words:
        first = read_input(words, body)
        if not first.prompt.strip():
            raise UsageError("the first message is empty", hint="leave it out to read lines")
        return first
    if body == "-":
        raise UsageError(
            "a body cannot come from stdin: that is where the messages come from",
            hint="write it to a file: --body FILE",
        )
    return PromptInput("", read_body(body))


def _open(
    pattern: "RunRequest", settings: Settings, moe: "StartWishes", *, as_json: bool, stats: bool
) -> "_Session":
    planner, loading = open_planner(settings, as_json=as_json), Loading()
    route = pattern.route
    with importing_engine(as_json=as_json):
        engine = open_engine(
            planner, budget=route.memory_budget, progress=loading, device=route.device, moe=moe
        )
        from expertctl.engine.conversation import Conversation

    begun = _Session(Conversation(engine, pattern), planner, loading, as_json=as_json, stats=stats)
    begun.end = engine.close
    return begun


class _Session:
    """One chat: its conversation, and the exit code of its first error."""

    def __init__(
        self,
        conversation: "Conversation",
        planner: "Planner",
        loading: Loading,
        *,
        as_json: bool,
        stats: bool,
    ) -> None:
        self.conversation, self._planner, self._loading = conversation, planner, loading
        self._as_json, self._stats = as_json, stats
        self._interactive = is_terminal()
        self._code = OK
        self._documents: list[dict[str, object]] = []
        self._warned: set[str] = set()
        self.end: Callable[[], None] = lambda: None
        """Called when the chat is over, to save what was learnt."""

    def run(self, read_line: ReadLine, *, first: str = "") -> int:
        """Answer until the end of the input; return the exit code.

        A script that gives the ``first`` message as an argument has no other.
        """
        if self._interactive:
            note("/help shows what else can be said, /exit leaves")
        try:
            if first:
                self._handle(Said(first))
            if self._interactive or not first:
                self._answer_lines(read_line)
        except KeyboardInterrupt:  # other errors print a document of their own
            self._print_turns()
            raise
        self._print_turns()
        with suppress(UsageError):  # an interrupted answer may still be held
            self.end()
        return OK if self._interactive else self._code

    def _answer_lines(self, read_line: ReadLine) -> None:
        while (said := self._next(read_line)) is not None and not _leaves(said):
            if said.text.strip():
                self._handle(said)

    def _print_turns(self) -> None:
        if self._as_json:
            print_json({"turns": self._documents})

    def _next(self, read_line: ReadLine) -> Said | None:
        """Return what the user says next; at a prompt, Ctrl-C twice in a row ends the chat."""
        for hint in (LEAVE_HINT, ""):
            try:
                return next_said(read_line)
            except KeyboardInterrupt as key:
                if not self._interactive or isinstance(key, TerminatedError):
                    raise
                note(f"\n{hint}".rstrip())
            except ExpertError as error:
                self._refuse("", error)
                return None if not self._interactive else Said("")
        return None

    def _handle(self, said: Said) -> None:
        try:
            if said.is_command:
                self._command(said.text.split())
            else:
                self._answer(said.text)
        except ExpertError as error:
            self._refuse(said.text, error)

    def _refuse(self, text: str, error: ExpertError) -> None:
        error = refused(error, self.conversation)
        fail(error, as_json=False)
        self._code = self._code or exit_code(error)
        fields = {"code": error.code, "message": error.message, "hint": error.hint}
        self._documents.append({"prompt": text, "error": fields})

    def _answer(self, prompt: str) -> None:
        ending = Ending()
        with ending.heeding(*((signal.SIGINT,) if self._interactive else ())):
            self._loading.unwanted = ending
            try:
                turn = self._stream(prompt, ending)
            except StoppedError:
                note("  [interrupted before the first word]")
                return
        self._documents.append({"prompt": prompt, **turn.result.to_json()})
        self._show(turn)

    def _stream(self, prompt: str, unwanted: Callable[[], bool]) -> "Turn":
        """Print the answer as it comes; a bar shows what is read before its first piece."""
        pieces = self.conversation.say(prompt, cancelled=unwanted)
        try:
            with progress("reading", None, as_json=self._as_json) as self._loading.report:
                piece = next(pieces)
            with closing_stream() as shown:
                while True:
                    if not self._as_json:
                        shown.write(piece)
                    piece = next(pieces)
        except StopIteration as end:
            turn: Turn = end.value
            return turn
        finally:
            self._loading.report = None

    def _show(self, turn: "Turn") -> None:
        from expertctl.cli.chat_view import turn_line
        from expertctl.cli.run_view import statistics

        known = {*self._warned, *turn.result.planned.result.notes}  # /plan shows the notes
        new = [w for w in dict.fromkeys(turn.result.warnings) if w not in known]
        self._warned.update(new)
        warn(new)
        note(turn_line(turn))
        if self._stats:
            note(statistics(turn.result))

    def _command(self, words: list[str]) -> None:
        commands: dict[str, Callable[[list[str]], None]] = {
            "/help": self._help,
            "/experts": self._experts,
            "/plan": self._plan,
            "/feedback": self._feedback,
            "/reset": self._reset,
            **dict.fromkeys(LEAVING, _want_none),  # without arguments they end the chat earlier
        }
        name, *rest = words
        if name not in commands:
            raise UsageError(
                f"{name[:40]} is no command",
                hint='/help names them; a message that begins with / goes between """ and """',
            )
        commands[name](rest)

    def _help(self, rest: list[str]) -> None:
        from expertctl.cli.chat_view import HELP

        _want_none(rest)
        note(HELP)

    def _experts(self, rest: list[str]) -> None:
        from expertctl.cli.chat_view import experts_text, who
        from expertctl.engine.request import parse_expert

        if rest == ["auto"]:
            self.conversation.route_freely()
            note("each message chooses its experts from now on")
        elif rest == ["none"]:
            self.conversation.use_base_alone()
            note("from now on: the base alone; `/experts auto` chooses experts again")
        elif rest:
            plan = self.conversation.use([parse_expert(text) for text in rest])
            note(f"from now on: {who(plan)}")
        else:
            note(experts_text(self.conversation, self._planner))

    def _plan(self, rest: list[str]) -> None:
        from expertctl.cli.run_view import routing_text

        _want_none(rest[1:])
        if not self.conversation.turns:
            raise NotFoundError("there is no plan yet", hint="say something first")
        turn = self.conversation.turns[-1]
        if rest:
            save_plan(Path(rest[0]), {"plan": turn.plan.to_json(), "threads": turn.result.threads})
            note(f"saved {rest[0]}")
        else:
            note(routing_text(turn.result.planned.result, width=terminal_width(sys.stderr)))

    def _feedback(self, rest: list[str]) -> None:
        from expertctl.cli.feedback import parse_verdict, verdict_text

        verdict = parse_verdict(rest)
        if not self.conversation.turns:
            raise NotFoundError("there is no answer yet", hint="say something first")
        job_id, catalogue = self.conversation.turns[-1].result.job_id, self._planner.catalogue
        note(verdict_text(catalogue, job_id, verdict))

    def _reset(self, rest: list[str]) -> None:
        _want_none(rest)
        self.conversation.reset()
        note("forgotten; the next message begins anew")


def _leaves(said: Said) -> bool:
    return said.is_command and said.text.strip() in LEAVING


def _want_none(rest: list[str]) -> None:
    if rest:
        raise UsageError(f"{' '.join(rest)[:80]!r} is too much here", hint="see /help")
