"""``expertctl eval``, and what ``build --eval`` puts into a package.

Torch is imported inside the functions, after all checks that can be made without it.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.exit_codes import FAILURE
from expertctl.cli.named_base import known_base
from expertctl.cli.opening import importing_engine, open_planner
from expertctl.cli.output import JsonFlag, counting, emit, note, warn
from expertctl.cli.run_options import (
    AdapterDtype,
    Base,
    Deterministic,
    Dtype,
    MemoryBudget,
    MoeMiss,
    MoeSkipCap,
    Numerics,
    budget_of,
    cap_of,
    check_processor,
    numerics_of,
)
from expertctl.errors import UsageError
from expertctl.package.build import Plan
from expertctl.package.evaluation_data import EvaluationData, Metric, read_data
from expertctl.schema.manifest import Evaluation
from expertctl.settings import Settings, load_settings

Wanted = Annotated[
    str | None,
    typer.Argument(metavar="FILE|REF", help="A .expert file, or an installed expert."),
]
Data = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help='JSON Lines: {"prompt": "3 + 4", "answer": "7"} and more.'),
]
RoutingData = Annotated[
    Path | None,
    typer.Option(
        "--routing",
        metavar="FILE",
        help='Measure routing: {"prompt": "Sort 2, 1", "expert": "acme/sorting"} or null.',
    ),
]
Compose = Annotated[
    list[str] | None,
    typer.Option(metavar="REF[:WEIGHT]", help="Put this expert after it, too; repeatable."),
]
MetricOption = Annotated[
    Metric, typer.Option(help="When an answer is right: equal, in it, or the same JSON value.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, max=200_000, help="Else what the expert says, or 256."),
]
MinGain = Annotated[
    float | None,
    typer.Option("--min-gain", min=-1, max=1, help="Exit 1 when the gain is less than this."),
]
MinAccuracy = Annotated[
    float | None,
    typer.Option("--min-accuracy", min=0, max=1, help="Of --routing: exit 1 when it is less."),
]
Show = Annotated[int, typer.Option(min=0, help="How many wrong answers to show.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the figures: .svg or .png.")]


def evaluate(
    target: Wanted = None,
    data: Data = None,
    routing: RoutingData = None,
    compose: Compose = None,
    metric: MetricOption = "exact_match",
    max_tokens: MaxTokens = None,
    min_gain: MinGain = None,
    min_accuracy: MinAccuracy = None,
    show: Show = 3,
    plot: Plot = None,
    base: Base = None,
    memory_budget: MemoryBudget = None,
    dtype: Dtype = None,
    adapter_dtype: AdapterDtype = None,
    deterministic: Deterministic = None,
    moe_miss: MoeMiss = "exact",
    moe_skip_cap: MoeSkipCap = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure an expert against its base, or routing.

    Example: expertctl eval starter/sorting --data held-out.jsonl --min-gain 0.5
    """
    answering = {
        "FILE|REF": target,
        "--data": data,
        "--compose": compose,
        "--max-tokens": max_tokens,
        "--min-gain": min_gain,
        "--memory-budget": memory_budget,
        "--dtype": dtype,
        "--adapter-dtype": adapter_dtype,
        "--deterministic": deterministic,
        "--moe-miss": None if moe_miss == "exact" else moe_miss,
        "--moe-skip-cap": moe_skip_cap,
    }
    if routing is not None:
        from expertctl.cli.evaluating_routing import RoutingAsked, evaluate_routing

        _refuse(answering, "--routing measures which expert is chosen, and generates nothing")
        wished = RoutingAsked(
            data=routing, base=base, min_accuracy=min_accuracy, show=show, plot=plot
        )
        _fall_short(evaluate_routing(wished, as_json=as_json), wrong="decisions")
        return
    _refuse({"--min-accuracy": min_accuracy}, "without --routing answers are measured")
    if target is None or data is None:
        raise UsageError(
            f"{'FILE|REF' if target is None else '--data'} is missing",
            hint="eval REF --data FILE measures an expert, eval --routing FILE which is chosen",
        )
    settings = load_settings()
    held = numerics_of(
        settings, dtype=dtype, adapter_dtype=adapter_dtype, deterministic=deterministic
    )
    budget = budget_of(memory_budget, settings)
    asked = _Asked(
        target,
        data,
        compose or (),
        metric,
        max_tokens,
        min_gain,
        show,
        base,
        held,
        budget,
        moe_miss,
        cap_of(moe_skip_cap, (moe_miss,)),
    )
    _evaluate_answers(asked, settings, plot=plot, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Which expert is measured on which data, and what is demanded and shown."""

    target: str
    data: Path
    compose: Sequence[str]
    metric: Metric
    max_tokens: int | None
    min_gain: float | None
    show: int
    base: str | None
    held: Numerics
    memory_budget: int | None
    moe_miss: MoeMiss
    moe_skip_cap: float


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Refuse options that would be ignored."""
    given = [name for name, value in options.items() if value not in (None, [])]
    if given:
        raise UsageError(f"{', '.join(given)}: {why}", hint="see `expertctl eval --help`")


def _evaluate_answers(
    asked: _Asked, settings: Settings, *, plot: Path | None, as_json: bool
) -> None:
    from expertctl.cli.evaluation_view import document, oddities, shortfall, text
    from expertctl.engine.request import parse_expert

    check_processor(settings, "eval")
    if plot is not None:
        from expertctl.cli.plot import check_picture

        check_picture(plot)
    experts = [parse_expert(word) for word in (asked.target, *asked.compose)]
    samples = read_data(asked.data, metric=asked.metric)
    with importing_engine(as_json=as_json):
        from expertctl.engine.evaluation import EvaluationRequest
        from expertctl.engine.evaluation import evaluate as measure
    request = EvaluationRequest(
        data=samples,
        expert=experts[0],
        compose=tuple(experts[1:]),
        base=known_base(asked.base, settings, as_json=as_json),
        max_tokens=asked.max_tokens,
        dtype=asked.held.dtype,
        adapter_dtype=asked.held.adapter_dtype,
        deterministic=asked.held.deterministic,
        moe_miss=asked.moe_miss,
        moe_skip_cap=asked.moe_skip_cap,
    )
    planner, budget = open_planner(settings, as_json=as_json), asked.memory_budget
    with counting("evaluating", request.answers, as_json=as_json) as report:
        found = measure(planner, request, budget=budget, progress=report, tell=note)
    warn((*found.warnings, *oddities(found)))
    if plot is not None:
        from expertctl.cli.plot import draw

        draw(found, plot)
    told, show = document(found, show=asked.show, min_gain=asked.min_gain), asked.show
    emit(told, text(found, show=show), as_json=as_json)
    _fall_short(shortfall(found, asked.min_gain), wrong="answers")


def _fall_short(why: str, *, wrong: str) -> None:
    """Exit with 1 if the figures are below what was demanded."""
    if why:
        sys.stdout.flush()  # the figures come before the error about them
        note(f"error: {why}\n\nhint: --show N shows more of the wrong {wrong}")
        raise typer.Exit(FAILURE)


def measured(
    plan: Plan, data: EvaluationData, *, task: str | None, output: Path, as_json: bool
) -> Plan:
    """Return a planned build with the scores of its expert and of its base alone."""
    from expertctl.cli.evaluation_view import oddities
    from expertctl.package.evaluation_entry import build_date, with_evaluation
    from expertctl.package.evaluation_summary import evaluation_text

    with importing_engine(as_json=as_json):
        from expertctl.engine.evaluation import evaluate_build

    settings = load_settings()
    check_processor(settings, "the evaluation of a build")
    named, date = task or data.path.stem, build_date()
    with_evaluation(plan, _entry(named, data, base=0.0, expert=0.0, date=date))  # else refused late
    planner = open_planner(settings, as_json=as_json)
    with counting("evaluating", 2 * len(data.samples), as_json=as_json) as report:
        found = evaluate_build(
            planner,
            plan,
            data,
            beside=output,
            budget=settings.memory_budget,
            progress=report,
            tell=note,
        )
    warn((*data.warnings, *oddities(found)))
    entry = _entry(named, data, base=found.base.share, expert=found.expert.share, date=date)
    note(f"measured {named}: {evaluation_text(entry)}")
    return with_evaluation(plan, entry)


def _entry(task: str, data: EvaluationData, *, base: float, expert: float, date: str) -> Evaluation:
    return Evaluation(
        task=task,
        dataset_sha256=data.digest.hex,
        n=len(data.samples),
        metric=data.metric,
        base=round(base, 4),
        expert=round(expert, 4),
        date=date,
    )
