"""``expertctl route`` and ``run``: plan a prompt, and answer it.

Only `run` imports the engine, in its function, unless a running server answers; `route` reads what
is installed and loads nothing.
"""

import signal
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar

import typer

from expertctl.cli.engine import open_engine, open_planner, resolve_base
from expertctl.cli.help import expand_flags
from expertctl.cli.history import (
    find_last_base,
    keep_conversation,
    read_last_conversation,
    read_last_document,
)
from expertctl.cli.output import (
    JsonFlag,
    debug,
    emit,
    note,
    open_answer_stream,
    print_json,
    print_message,
    terminal_width,
    warn,
)
from expertctl.cli.process import INTERRUPTED, CancellationFlag
from expertctl.cli.progress import show_loading
from expertctl.cli.prompt_input import load_saved_plan, read_input, read_prompt
from expertctl.cli.run_options import (
    Base,
    Body,
    Continue,
    EngineFlags,
    EngineOption,
    ExpertFlags,
    Local,
    MoeLearn,
    OnBudget,
    Prompt,
    SamplingFlags,
    Stats,
    System,
    Template,
    Trace,
    Truncate,
    VerifyBase,
    WarmupFlags,
    build_route_request,
)
from expertctl.settings import Settings, load_settings
from expertctl.user_request import UserMessage

if TYPE_CHECKING:
    from expertctl.cli.remote import RemoteEngine
    from expertctl.cli.remote_question import RemoteQuestion
    from expertctl.client.result import RunAnswer
    from expertctl.engine.request import RunRequest, SavedConversation
    from expertctl.engine.result import GenerationTrace, RunResult

_Result = TypeVar("_Result")


@expand_flags
def route(
    prompt: Prompt = None,
    *,
    experts: ExpertFlags,
    base: Base = None,
    sampling: SamplingFlags,
    flags: EngineFlags,
    engine: EngineOption = "native",
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List experts of other bases, too.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show which experts would answer a prompt, and why. Nothing is loaded.

    Example: expertctl route "Sort these numbers: 41, 17, 23"
    """
    from expertctl.cli.run_view import format_routing
    from expertctl.routing.request import check_request, parse_forced

    settings = load_settings()
    config = flags.resolve(settings, engine=engine)
    request = build_route_request(read_prompt(prompt), config, experts=experts, sampling=sampling)
    request = replace(request, force=tuple(map(parse_forced, experts.expert or ())))
    check_request(request)
    named = resolve_base(base, settings, as_json=as_json)
    planned = open_planner(settings, as_json=as_json).plan(request, base=named)
    warn(planned.warnings)
    shown = format_routing(planned.result, width=terminal_width(sys.stdout), verbose=verbose)
    emit(planned.result.to_json(), shown, as_json=as_json)


@expand_flags
def run(
    prompt: Prompt = None,
    *,
    experts: ExpertFlags,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use a saved plan; - is stdin.")
    ] = None,
    base: Base = None,
    body: Body = None,
    template: Template = None,
    system: System = None,
    resume: Continue = False,
    sampling: SamplingFlags,
    truncate: Truncate = False,
    flags: EngineFlags,
    on_budget: OnBudget = "refuse",
    warmup: WarmupFlags,
    moe_learn: MoeLearn = None,
    engine: EngineOption = "native",
    verify_base: VerifyBase = False,
    local: Local = False,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Print the text as it is generated.")
    ] = True,
    as_json: JsonFlag = False,
    stats: Stats = False,
    trace: Trace = False,
) -> None:
    """Answer a prompt with the experts that suit it, or with named ones.

    Example: expertctl run "Sort these numbers: 41, 17, 23" --seed 1
    """
    settings = load_settings()
    only_here = {
        "plan": plan is not None,
        "on_budget": on_budget != "refuse",
        "moe_learn": moe_learn is not None,
        "engine": engine != "native",
        "verify_base": verify_base,
        "trace": trace,
    }
    server = None
    if not local and settings.may_have_server:
        from expertctl.cli.remote import choose_server
        from expertctl.cli.remote_question import list_local_options

        only_local = list_local_options(experts, sampling, flags, warmup, only_here)
        server = choose_server(settings, only_local)
    config = (
        None if server else flags.resolve(settings, warmup=warmup, learn=moe_learn, engine=engine)
    )
    texts = read_input(prompt, body, plan=plan)
    shown = partial(_print_result, stream=stream, as_json=as_json, stats=stats or trace)
    if server is not None:
        from expertctl.cli.remote_question import build_options, build_question

        question = build_question(
            texts,
            build_options(experts, sampling, base=base, truncate=truncate),
            template=template,
            earlier=read_last_document(settings) if resume else b"{}",
            system=system,
            is_own=not server.is_named,
        )
        reason = _run_on_server(server, question, settings, shown, stream=stream and not as_json)
        if reason is not None:
            return _end(reason)
    from expertctl.cli.run_view import read_answer
    from expertctl.engine.request import RunRequest, parse_expert
    from expertctl.routing.request import check_request

    config = config or flags.resolve(settings, warmup=warmup, learn=moe_learn, engine=engine)
    message = UserMessage(prompt=texts.prompt, body=texts.body, template=template)
    message.text()
    earlier = _read_earlier(settings, system, resume=resume)
    named = tuple(map(parse_expert, experts.expert or ()))
    request = RunRequest(
        message=message,
        experts=named,
        route=build_route_request(message.prompt, config, experts=experts, sampling=sampling),
        base=resolve_base(base, settings, as_json=as_json)
        or (None if named or plan else find_last_base(earlier, settings)),
        saved=load_saved_plan(plan),
        truncate=truncate,
        verify_base=verify_base,
        history=earlier.messages,
        before=earlier.plan,
        on_budget=on_budget,
        trace=trace,
    )
    check_request(request.route)
    result = _generate(request, settings, stream=stream and not as_json, as_json=as_json)
    shown(read_answer(result), result.to_json(), result.trace)
    _keep(settings, request, result)
    return _end(result.generated.finish_reason)


def _run_on_server(
    server: "RemoteEngine",
    question: "RemoteQuestion",
    settings: Settings,
    show: "Callable[[RunAnswer, Mapping[str, object]], None]",
    *,
    stream: bool,
) -> str | None:
    """Print the answer of a server; return why it ended, None if this process is to answer."""
    begun = server.start(question)
    if begun is None:
        return None
    said, ending = f"answered by {begun.place.described}", CancellationFlag()
    note(said, dim=True) if stream and sys.stderr.isatty() else debug(said)
    answer = _print_pieces(_AnswerIterator(begun.read(ending)), ending, stream=stream)
    show(answer.answer, answer.document)
    if answer.answer.text or answer.answer.finish_reason != "cancelled":
        keep_conversation(settings, question.add_turn(answer))
    return answer.answer.finish_reason


def _end(reason: str) -> None:
    """End the command with the exit code of an answer that ended for this reason."""
    if reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


def _read_earlier(settings: Settings, system: str | None, *, resume: bool) -> "SavedConversation":
    """Return what precedes the prompt: a system message, and with ``resume`` the last one."""
    from expertctl.engine.request import SavedConversation

    earlier = read_last_conversation(settings) if resume else SavedConversation()
    return earlier if system is None else earlier.with_system(system)


def _keep(settings: Settings, request: "RunRequest", result: "RunResult") -> None:
    """Keep the messages and the plan of an answer, for ``--continue``."""
    from expertctl.engine.request import FileExpert, SavedConversation
    from expertctl.engine.text.prompt import ConversationMessage

    answer = ConversationMessage("assistant", result.generated.text)
    if not answer.content and result.generated.finish_reason == "cancelled":
        return
    from_files = any(isinstance(expert, FileExpert) for expert in request.experts)
    plan = result.planned.result.plan
    saved = SavedConversation((*request.messages, answer), None if from_files else plan)
    keep_conversation(settings, saved, plan=plan)


def _generate(
    request: "RunRequest", settings: Settings, *, stream: bool, as_json: bool
) -> "RunResult":
    """Generate the answer; show a progress bar until the first piece, then print it if ``stream``.

    From then on a signal ends generation early, and the text so far is kept.
    """
    planner, ending = open_planner(settings, as_json=as_json), CancellationFlag()
    with show_loading("loading", as_json=as_json) as report:
        engine = open_engine(planner, request.route.config, progress=report)
        answer = _AnswerIterator(engine.run(request, cancelled=ending))
        answer.advance()
    return _print_pieces(answer, ending, stream=stream)


class _AnswerIterator(Generic[_Result]):
    """Iterates over the pieces of an answer, then holds its result."""

    def __init__(self, pieces: Generator[str, None, _Result]) -> None:
        self.piece = ""
        self.result: _Result | None = None
        self._pieces = pieces

    def advance(self) -> None:
        """Set ``piece`` to the next piece, or ``result`` at the end."""
        try:
            self.piece = next(self._pieces)
        except StopIteration as end:
            self.result = end.value


def _print_pieces(
    answer: _AnswerIterator[_Result], ending: CancellationFlag, *, stream: bool
) -> _Result:
    """Print the pieces if ``stream``, and return the result; a signal ends the answer early."""
    with ending.catch_signals(signal.SIGINT, signal.SIGTERM), open_answer_stream() as shown:
        while answer.result is None:
            if stream:
                shown.write(answer.piece)
            answer.advance()
    return answer.result


def _print_result(
    result: "RunAnswer",
    document: "Mapping[str, object]",
    trace: "GenerationTrace | None" = None,
    *,
    stream: bool,
    as_json: bool,
    stats: bool,
) -> None:
    from expertctl.cli.run_view import format_footer, format_stage_times, format_statistics

    debug(format_stage_times(result))
    if as_json:
        warn(result.warnings)
        print_json(document)
        return
    if not stream:
        with open_answer_stream() as shown:
            shown.write(result.text)
    shown_below = set(result.notes)
    warn(warning for warning in result.warnings if warning not in shown_below)
    if stats:
        print_message(format_statistics(result, trace))
    else:
        note(format_footer(result), dim=True)
