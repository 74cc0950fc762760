"""``expertctl route`` and ``run``: plan a prompt, and answer it.

Only `run` imports the engine, in its function; `route` reads what is installed and loads nothing.
"""

import signal
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expertctl.cli.engine import open_engine, open_planner, resolve_base
from expertctl.cli.help import expand_flags
from expertctl.cli.history import find_last_base, keep_conversation, read_last_conversation
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

if TYPE_CHECKING:
    from expertctl.engine.request import RunRequest, SavedConversation
    from expertctl.engine.result import RunResult


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
    from expertctl.engine.request import RunRequest, parse_expert
    from expertctl.engine.text.prompt import UserMessage
    from expertctl.routing.request import check_request

    settings = load_settings()
    config = flags.resolve(settings, warmup=warmup, learn=moe_learn, engine=engine)
    texts = read_input(prompt, body, plan=plan)
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
    _print_result(result, stream=stream, as_json=as_json, stats=stats or trace)
    _keep(settings, request, result)
    if result.generated.finish_reason == "cancelled":
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
    plan = None if from_files else result.planned.result.plan
    keep_conversation(settings, SavedConversation((*request.messages, answer), plan))


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
    with ending.catch_signals(signal.SIGINT, signal.SIGTERM), open_answer_stream() as shown:
        while answer.result is None:
            if stream:
                shown.write(answer.piece)
            answer.advance()
    return answer.result


class _AnswerIterator:
    """Iterates over the pieces of an answer, then holds its result."""

    def __init__(self, pieces: "Generator[str, None, RunResult]") -> None:
        self.piece = ""
        self.result: RunResult | None = None
        self._pieces = pieces

    def advance(self) -> None:
        """Set ``piece`` to the next piece, or ``result`` at the end."""
        try:
            self.piece = next(self._pieces)
        except StopIteration as end:
            self.result = end.value


def _print_result(result: "RunResult", *, stream: bool, as_json: bool, stats: bool) -> None:
    from expertctl.cli.run_view import format_footer, format_stage_times, format_statistics

    debug(format_stage_times(result))
    if as_json:
        warn(result.warnings)
        print_json(result.to_json())
        return
    if not stream:
        with open_answer_stream() as shown:
            shown.write(result.generated.text)
    shown_below = set(result.planned.result.notes)
    warn(warning for warning in result.warnings if warning not in shown_below)
    if stats:
        print_message(format_statistics(result))
    else:
        note(format_footer(result), dim=True)
