"""``expertctl route`` and ``run``: plan a prompt, and answer it.

Only `run` imports torch, inside the function; `route` reads what is installed and loads nothing.
"""

import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expertctl.cli.engine import open_engine, open_planner, resolve_base
from expertctl.cli.output import (
    JsonFlag,
    emit,
    note,
    open_answer_stream,
    print_json,
    show_progress,
    terminal_width,
    warn,
)
from expertctl.cli.process import INTERRUPTED, CancellationFlag
from expertctl.cli.prompt_input import load_saved_plan, read_input, read_prompt
from expertctl.cli.run_options import (
    AdapterDtype,
    Base,
    BaseMismatchOption,
    Body,
    Deterministic,
    Device,
    Dtype,
    EngineOption,
    Exclude,
    Expert,
    Greedy,
    MaxExperts,
    MaxTokens,
    MemoryBudget,
    MinP,
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
    Prompt,
    RepetitionPenalty,
    Seed,
    Stats,
    Stop,
    Temperature,
    Template,
    TopK,
    TopP,
    Trace,
    Truncate,
    VerifyBase,
    resolve_device,
    resolve_memory_budget,
    resolve_moe_cold,
    resolve_moe_start,
    resolve_numerics,
    resolve_skip_cap,
)
from expertctl.settings import Settings, load_settings

if TYPE_CHECKING:
    from expertctl.engine.moe.warmup import WarmupConfig
    from expertctl.engine.request import RunRequest
    from expertctl.engine.result import RunResult


def route(
    prompt: Prompt = None,
    expert: Expert = None,
    exclude: Exclude = None,
    max_experts: MaxExperts = 10,
    no_experts: NoExperts = False,
    base: Base = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    seed: Seed = None,
    greedy: Greedy = False,
    device: Device = None,
    dtype: Dtype = None,
    adapter_dtype: AdapterDtype = None,
    deterministic: Deterministic = None,
    moe_miss: MoeMiss = "exact",
    moe_skip_cap: MoeSkipCap = None,
    engine: EngineOption = "native",
    memory_budget: MemoryBudget = None,
    allow_base_mismatch: BaseMismatchOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List experts of other bases, too.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show which experts would answer a prompt, and why. Nothing is loaded.

    Example: expertctl route "Sort these numbers: 41, 17, 23"
    """
    from expertctl.cli.run_view import format_routing
    from expertctl.routing.request import RouteRequest, check_request, parse_forced, parse_target
    from expertctl.routing.sampling_presets import SamplingOverrides

    settings = load_settings()
    held = resolve_numerics(
        settings, dtype=dtype, adapter_dtype=adapter_dtype, deterministic=deterministic
    )
    request = RouteRequest(
        prompt=read_prompt(prompt),
        force=tuple(parse_forced(text) for text in expert or ()),
        exclude=tuple(parse_target(text) for text in exclude or ()),
        max_experts=max_experts,
        base_alone=no_experts,
        seed=seed,
        sampling=SamplingOverrides(
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
        moe_skip_cap=resolve_skip_cap(moe_skip_cap, (moe_miss,)),
        device=resolve_device(device, settings),
        engine=engine,
        memory_budget=resolve_memory_budget(memory_budget, settings),
        allow_base_mismatch=allow_base_mismatch,
    )
    check_request(request)
    named = resolve_base(base, settings, as_json=as_json)
    planned = open_planner(settings, as_json=as_json).plan(request, base=named)
    warn(planned.warnings)
    shown = format_routing(planned.result, width=terminal_width(sys.stdout), verbose=verbose)
    emit(planned.result.to_json(), shown, as_json=as_json)


def run(
    prompt: Prompt = None,
    expert: Expert = None,
    exclude: Exclude = None,
    max_experts: MaxExperts = 10,
    no_experts: NoExperts = False,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Use a saved plan; - is stdin."),
    ] = None,
    base: Base = None,
    body: Body = None,
    template: Template = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    max_tokens: MaxTokens = None,
    stop: Stop = None,
    seed: Seed = None,
    greedy: Greedy = False,
    truncate: Truncate = False,
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
    engine: EngineOption = "native",
    verify_base: VerifyBase = False,
    allow_base_mismatch: BaseMismatchOption = False,
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
    from expertctl.routing.request import RouteRequest, check_request, parse_target
    from expertctl.routing.sampling_presets import SamplingOverrides

    settings = load_settings()
    held = resolve_numerics(
        settings, dtype=dtype, adapter_dtype=adapter_dtype, deterministic=deterministic
    )
    chosen = resolve_device(device, settings)
    texts = read_input(prompt, body, plan=plan)
    message = UserMessage(prompt=texts.prompt, body=texts.body, template=template)
    message.text()
    request = RunRequest(
        message=message,
        experts=tuple(parse_expert(text) for text in expert or ()),
        route=RouteRequest(
            prompt=message.prompt,
            exclude=tuple(parse_target(text) for text in exclude or ()),
            max_experts=max_experts,
            base_alone=no_experts,
            seed=seed,
            sampling=SamplingOverrides(
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
            moe_skip_cap=resolve_skip_cap(moe_skip_cap, (moe_miss,)),
            moe_cold=resolve_moe_cold(moe_cold, settings),
            device=chosen,
            engine=engine,
            memory_budget=resolve_memory_budget(memory_budget, settings),
            allow_base_mismatch=allow_base_mismatch,
        ),
        base=resolve_base(base, settings, as_json=as_json),
        saved=load_saved_plan(plan),
        truncate=truncate,
        verify_base=verify_base,
        on_budget=on_budget,
        trace=trace,
    )
    check_request(request.route)
    moe = resolve_moe_start(
        settings,
        profile=moe_profile,
        pin=moe_pin,
        warmup=moe_warmup,
        exchange=moe_exchange,
        learn=moe_learn,
    )
    result = _generate(request, settings, moe, stream=stream and not as_json, as_json=as_json)
    _print_result(result, stream=stream, as_json=as_json, stats=stats or trace)
    if result.generated.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


def _generate(
    request: "RunRequest",
    settings: Settings,
    moe: "WarmupConfig",
    *,
    stream: bool,
    as_json: bool,
) -> "RunResult":
    """Generate the answer; show a progress bar until the first piece, then print it if ``stream``.

    From then on a signal ends generation early, and the text so far is kept.
    """
    from expertctl.engine.torch_preload import preload_torch

    preload_torch()
    planner, ending = open_planner(settings, as_json=as_json), CancellationFlag()
    with show_progress("loading", None, as_json=as_json) as report:
        route = request.route
        engine = open_engine(
            planner, budget=route.memory_budget, progress=report, device=route.device, moe=moe
        )
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
    from expertctl.cli.run_view import format_footer, format_statistics

    if as_json:
        warn(result.warnings)
        print_json(result.to_json())
        return
    if not stream:
        with open_answer_stream() as shown:
            shown.write(result.generated.text)
    shown_below = set(result.planned.result.notes)
    warn(warning for warning in result.warnings if warning not in shown_below)
    note(format_statistics(result) if stats else format_footer(result))
