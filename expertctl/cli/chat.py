"""``expertctl chat``: a conversation on a terminal, or with the lines of a script.

Answers go to stdout, everything else to stderr. An error in a turn is printed and the chat goes
on; a script gets the exit code of the first error. ``--json`` prints all turns as one document at
the end.
"""

import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expertctl.cli.chat_settings import SETTINGS, change_sampling, format_sampling
from expertctl.cli.engine import (
    LoadingCancelledError,
    LoadingProgress,
    guard_engine_import,
    open_engine,
    open_planner,
    resolve_base,
    save_plan,
)
from expertctl.cli.help import expand_flags
from expertctl.cli.history import (
    complete_path,
    encode_conversation,
    find_last_base,
    keep_conversation,
    open_line_editor,
    read_conversation,
    read_last_conversation,
)
from expertctl.cli.output import (
    JsonFlag,
    debug,
    fail,
    format_count,
    note,
    open_answer_stream,
    print_json,
    print_message,
    quote,
    terminal_width,
    warn,
    write_file,
)
from expertctl.cli.process import OK, CancellationFlag, TerminatedError, get_exit_code
from expertctl.cli.progress import show_loading
from expertctl.cli.prompt_input import (
    ChatInput,
    PromptInput,
    ReadLine,
    is_terminal,
    make_line_reader,
    read_body,
    read_chat_input,
    read_input,
)
from expertctl.cli.run_options import (
    Base,
    Continue,
    EngineFlags,
    ExpertFlags,
    MoeLearn,
    OnBudget,
    SamplingFlags,
    Stats,
    System,
    Template,
    VerifyBase,
    WarmupFlags,
    build_route_request,
)
from expertctl.cli.suggestions import add_chat_hint
from expertctl.errors import ExpertError, NotFoundError, UsageError
from expertctl.settings import Settings, load_settings

if TYPE_CHECKING:
    from expertctl.engine.conversation import Conversation, Turn
    from expertctl.engine.request import RunRequest
    from expertctl.routing.planner import Planner

    _Send = Callable[..., Generator[str, None, Turn]]

EXIT_COMMANDS = ("/bye", "/exit", "/quit")
EXIT_HINT = "press Ctrl-C again to leave, or /?"
_OPENING = "/? lists the commands, /bye leaves"


@expand_flags
def chat(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="The first message, then piped text. Without it, each line of stdin is one.",
            show_default=False,
        ),
    ] = None,
    *,
    experts: ExpertFlags,
    base: Base = None,
    body: Annotated[
        str | None, typer.Option(metavar="FILE", help="File to append to the first message.")
    ] = None,
    template: Template = None,
    system: System = None,
    sampling: SamplingFlags,
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate", help="Leave out the oldest turns when a conversation does not fit."
        ),
    ] = False,
    resume: Continue = False,
    flags: EngineFlags,
    on_budget: OnBudget = "refuse",
    warmup: WarmupFlags,
    moe_learn: MoeLearn = None,
    verify_base: VerifyBase = False,
    as_json: JsonFlag = False,
    stats: Stats = False,
) -> None:
    r"""Chat with experts; /? lists the commands.

    Example: printf 'Put 41, 17, 23 in ascending order\nAnd 9, 8, 7\n' | expertctl chat
    """
    from expertctl.engine.request import RunRequest, SavedConversation, parse_expert
    from expertctl.engine.text.prompt import UserMessage
    from expertctl.routing.request import check_request

    settings = load_settings()
    config = flags.resolve(settings, warmup=warmup, learn=moe_learn)
    first = _read_first_message(prompt, body)
    message = UserMessage(prompt="?", body=first.body, template=template)
    message.text()
    earlier = read_last_conversation(settings) if resume else SavedConversation()
    named = [parse_expert(text) for text in experts.expert or ()]
    pattern = RunRequest(
        message=message,
        route=build_route_request(message.prompt, config, experts=experts, sampling=sampling),
        base=resolve_base(base, settings, as_json=as_json)
        or (None if named else find_last_base(earlier, settings)),
        truncate=truncate,
        verify_base=verify_base,
        on_budget=on_budget,
    )
    check_request(pattern.route)
    if named and experts.no_experts:
        raise UsageError(
            "--expert and --no-experts contradict each other",
            hint="leave out --expert or --no-experts",
        )
    session = _open_session(pattern, settings, as_json=as_json, stats=stats)
    session.conversation.restore(earlier if system is None else earlier.with_system(system))
    if named:
        session.conversation.use_experts(named)
    raise typer.Exit(session.run(make_line_reader(as_json=as_json), first=first.prompt))


def _read_first_message(words: list[str] | None, body: str | None) -> PromptInput:
    """Return the first message and the body; the message is empty if it comes from stdin."""
    if words:
        first = read_input(words, body)
        if not first.prompt.strip():
            raise UsageError("the first message is empty", hint="leave it out to read lines")
        return first
    if body == "-":
        raise UsageError(
            "a body cannot come from stdin: the messages come from there",
            hint="write it to a file: --body FILE",
        )
    return PromptInput("", read_body(body))


def _open_session(
    pattern: "RunRequest", settings: Settings, *, as_json: bool, stats: bool
) -> "_ChatSession":
    planner, loading = open_planner(settings, as_json=as_json), LoadingProgress()
    with guard_engine_import(as_json=as_json):
        engine = open_engine(planner, pattern.route.config, progress=loading)
        from expertctl.engine.conversation import Conversation

    session = _ChatSession(
        Conversation(engine, pattern), planner, settings, loading, as_json=as_json, stats=stats
    )
    session.on_close = engine.close
    return session


class _ChatSession:
    """One chat: its conversation, the turns for ``--json``, the exit code of its first error."""

    def __init__(
        self,
        conversation: "Conversation",
        planner: "Planner",
        settings: Settings,
        loading: LoadingProgress,
        *,
        as_json: bool,
        stats: bool,
    ) -> None:
        self.conversation, self._planner, self._loading = conversation, planner, loading
        self._settings = settings
        self._as_json, self._stats = as_json, stats
        self._interactive = is_terminal()
        self._exit_code = OK
        self._documents: list[dict[str, object]] = []
        self._warned: set[str] = set()
        self.on_close: Callable[[], None] = lambda: None
        """Called at the end of the chat, to save the usage profile."""
        self._commands: dict[str, Callable[[list[str]], None]] = {
            **dict.fromkeys(("/?", "/help"), self._show_help),
            "/experts": self._select_experts,
            "/system": self._set_system,
            "/set": self._change_setting,
            "/retry": self._retry,
            "/plan": self._show_plan,
            "/feedback": self._record_feedback,
            "/save": self._save,
            "/load": self._load,
            **dict.fromkeys(("/reset", "/clear"), self._reset_conversation),
            **dict.fromkeys(
                EXIT_COMMANDS, _check_no_arguments
            ),  # without arguments they end the chat earlier
        }

    def run(self, read_line: ReadLine, *, first: str = "") -> int:
        """Answer until the end of the input, and return the exit code.

        If ``first`` is given and stdin is not a terminal, nothing else is read.
        """
        if self._interactive:
            note(self._describe_start(), dim=True)
        lines = self._settings.home.chat_history if self._settings.history else None
        try:
            if first:
                self._handle_input(ChatInput(first))
            if self._interactive:
                with open_line_editor(lines, self._complete, read_line) as read_line:
                    self._answer_lines(read_line)
            elif not first:
                self._answer_lines(read_line)
        except KeyboardInterrupt:  # other errors print a document of their own
            self._print_turns()
            raise
        self._print_turns()
        with suppress(UsageError):  # an interrupted answer may still be resolved
            self.on_close()
        return OK if self._interactive else self._exit_code

    def _describe_start(self) -> str:
        """Return the base, the number of its experts, and how to get help."""
        from expertctl.cli.run_view import find_fitting_experts

        with suppress(ExpertError):  # the first message reports it
            base, fitting, _ = find_fitting_experts(self.conversation, self._planner)
            if base is not None:
                return f"{base.name}, {format_count(len(fitting), 'expert')}; {_OPENING}"
        return _OPENING

    def _answer_lines(self, read_line: ReadLine) -> None:
        while (line := self._read_next(read_line)) is not None and not _is_exit(line):
            if line.text.strip():
                self._handle_input(line)

    def _print_turns(self) -> None:
        if self._as_json:
            print_json({"turns": self._documents})

    def _read_next(self, read_line: ReadLine) -> ChatInput | None:
        """Return the next input, None at the end; at a prompt, Ctrl-C twice ends the chat."""
        for hint in (EXIT_HINT, ""):
            try:
                return read_chat_input(read_line)
            except KeyboardInterrupt as key:
                if not self._interactive or isinstance(key, TerminatedError):
                    raise
                print_message(f"\n{hint}".rstrip())
            except ExpertError as error:
                self._report_error("", error)
                return None if not self._interactive else ChatInput("")
        return None

    def _handle_input(self, message: ChatInput) -> None:
        try:
            if message.is_command:
                self._run_command(message.text.split())
            else:
                self._answer(message.text)
        except ExpertError as error:
            self._report_error(message.text, error)

    def _report_error(self, text: str, error: ExpertError) -> None:
        error = add_chat_hint(error, self.conversation)
        fail(error, as_json=False)
        self._exit_code = self._exit_code or get_exit_code(error)
        fields = {"code": error.code, "message": error.message, "hint": error.hint}
        self._documents.append({"prompt": text, "error": fields})

    def _answer(self, prompt: str) -> None:
        self._answer_with(partial(self.conversation.send, prompt))

    def _retry(self, rest: list[str]) -> None:
        _check_no_arguments(rest)
        self._answer_with(self.conversation.retry)

    def _answer_with(self, send: "_Send") -> None:
        ending = CancellationFlag()
        with ending.catch_signals(*((signal.SIGINT,) if self._interactive else ())):
            self._loading.is_cancelled = ending
            try:
                turn = self._stream_answer(send(cancelled=ending))
            except LoadingCancelledError:
                print_message("  [interrupted before the first word]")
                return
        self._documents.append({"prompt": turn.message.prompt, **turn.result.to_json()})
        self._show_turn(turn)
        if turn.has_messages:
            keep_conversation(self._settings, self.conversation.saved)

    def _stream_answer(self, pieces: "Generator[str, None, Turn]") -> "Turn":
        """Print the answer as it is generated; a progress bar shows loading before its start."""
        try:
            with show_loading("reading", as_json=self._as_json) as self._loading.report:
                piece = next(pieces)
            with open_answer_stream() as shown:
                while True:
                    if not self._as_json:
                        shown.write(piece)
                    piece = next(pieces)
        except StopIteration as end:
            turn: Turn = end.value
            return turn
        finally:
            self._loading.report = None

    def _show_turn(self, turn: "Turn") -> None:
        from expertctl.cli.run_view import format_stage_times, format_statistics, format_turn

        known = {*self._warned, *turn.result.planned.result.notes}  # /plan shows the notes
        new = [w for w in dict.fromkeys(turn.result.warnings) if w not in known]
        self._warned.update(new)
        warn(new)
        debug(format_stage_times(turn.result))
        note(format_turn(turn), dim=True)
        if self._stats:
            print_message(format_statistics(turn.result))

    def _run_command(self, words: list[str]) -> None:
        name, *rest = words
        if name not in self._commands:
            raise UsageError(
                f"{name[:40]} is not a command",
                hint='/? lists them; put a message that begins with / between """ and """',
            )
        self._commands[name](rest)

    def _complete(self, line: str) -> list[str]:
        """Return what the last word of a line may become."""
        name, *rest = line.split(" ")
        if not rest:
            return [f"{each} " for each in self._commands if name]
        if name in {"/plan", "/save", "/load"}:
            *words, _ = rest
            start = len(" ".join(words)) + bool(words)
            return [each[start:] for each in complete_path(" ".join(rest))]
        if name == "/experts":
            with suppress(ExpertError):
                return ["auto ", "none ", *(f"{ref} " for ref in self._list_references())]
        known = {"/set": SETTINGS if len(rest) == 1 else ("default",), "/feedback": ("good", "bad")}
        return [f"{each} " for each in known.get(name, ())]

    def _list_references(self) -> list[str]:
        from expertctl.cli.run_view import find_fitting_experts

        _, fitting, _ = find_fitting_experts(self.conversation, self._planner)
        return [str(expert.stored.ref) for expert in fitting]

    def _show_help(self, rest: list[str]) -> None:
        from expertctl.cli.run_view import CHAT_HELP

        _check_no_arguments(rest)
        print_message(CHAT_HELP)

    def _select_experts(self, rest: list[str]) -> None:
        from expertctl.cli.run_view import format_fitting_experts, format_plan_experts
        from expertctl.engine.request import parse_expert

        if rest == ["auto"]:
            self.conversation.use_automatic_routing()
            print_message("experts are chosen for each message from now on")
        elif rest == ["none"]:
            self.conversation.use_base_only()
            print_message("from now on: the base alone; `/experts auto` chooses experts again")
        elif rest:
            plan = self.conversation.use_experts([parse_expert(text) for text in rest])
            print_message(f"from now on: {format_plan_experts(plan)}")
        else:
            print_message(format_fitting_experts(self.conversation, self._planner))

    def _show_plan(self, rest: list[str]) -> None:
        from expertctl.cli.run_view import format_routing

        if not self.conversation.turns:
            raise NotFoundError("there is no plan yet", hint="send a message first")
        turn = self.conversation.turns[-1]
        if rest:
            path = _parse_path(rest, "/plan FILE")
            save_plan(path, {"plan": turn.plan.to_json(), "threads": turn.result.threads})
            print_message(f"saved {path}")
        else:
            print_message(
                format_routing(turn.result.planned.result, width=terminal_width(sys.stderr))
            )

    def _record_feedback(self, rest: list[str]) -> None:
        from expertctl.cli.stats import parse_verdict, record_verdict

        verdict = parse_verdict(rest)
        if not self.conversation.turns:
            raise NotFoundError("there is no answer yet", hint="send a message first")
        job_id, catalogue = self.conversation.turns[-1].result.job_id, self._planner.catalogue
        print_message(record_verdict(catalogue, job_id, verdict))

    def _set_system(self, rest: list[str]) -> None:
        if rest:
            text = " ".join(rest)
            self.conversation.system = "" if text == "none" else text
        system = self.conversation.system
        print_message(f"system message: {system}" if system else "there is no system message")

    def _change_setting(self, rest: list[str]) -> None:
        """Set a sampling setting for the next answers, or show those that were set."""
        sampling, seed = self.conversation.sampling, self.conversation.seed
        if rest:
            sampling, seed = change_sampling(sampling, seed, rest[0], " ".join(rest[1:]))
            self.conversation.set_sampling(sampling, seed=seed)
        print_message(format_sampling(sampling, seed))

    def _save(self, rest: list[str]) -> None:
        path = _parse_path(rest, "/save FILE")
        write_file(path, encode_conversation(self.conversation.saved), mode=0o600)
        print_message(f"saved {path}")

    def _load(self, rest: list[str]) -> None:
        path = _parse_path(rest, "/load FILE")
        saved = read_conversation(path)
        self.conversation.restore(saved)
        print_message(f"{format_count(len(saved.messages), 'message')} read from {path}")

    def _reset_conversation(self, rest: list[str]) -> None:
        _check_no_arguments(rest)
        self.conversation.reset()
        print_message("the conversation is cleared")


def _is_exit(message: ChatInput) -> bool:
    return message.is_command and message.text.strip() in EXIT_COMMANDS


def _parse_path(rest: list[str], usage: str) -> Path:
    if not rest:
        raise UsageError("there is no file name", hint=usage)
    text = " ".join(rest)
    try:
        os.fsencode(text)
        path = Path(text).expanduser()
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"{quote(text)} is not a file name", hint=usage) from error
    if "\0" in text:
        raise UsageError(f"{quote(text)} is not a file name", hint=usage)
    return path


def _check_no_arguments(rest: list[str]) -> None:
    if rest:
        raise UsageError(f"unexpected argument {' '.join(rest)[:80]!r}", hint="see /?")
