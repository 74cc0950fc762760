"""``expertctl eval``, and what ``build --eval`` puts into a package.

Torch is imported inside the functions, when everything that can be wrong without it was looked at.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.exit_codes import FAILURE
from expertctl.cli.opening import open_planner, without_engine
from expertctl.cli.output import JsonFlag, counting, emit, note, warn
from expertctl.cli.run_options import Base, MemoryBudget, budget_of, check_device
from expertctl.cli.target import Target
from expertctl.package.build import Plan
from expertctl.package.evaluation_data import EvaluationData, Metric, read_data
from expertctl.schema.manifest import Evaluation
from expertctl.settings import load_settings

Data = Annotated[
    Path,
    typer.Option(metavar="FILE", help='JSON Lines: {"prompt": "3 + 4", "answer": "7"} and more.'),
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
Show = Annotated[int, typer.Option(min=0, help="How many wrong answers to show.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the scores: .svg or .png.")]


def evaluate(
    target: Target,
    data: Data,
    compose: Compose = None,
    metric: MetricOption = "exact_match",
    max_tokens: MaxTokens = None,
    min_gain: MinGain = None,
    show: Show = 3,
    plot: Plot = None,
    base: Base = None,
    memory_budget: MemoryBudget = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure an expert against its base. It takes prompts with right answers.

    Example: expertctl eval starter/sorting --data held-out.jsonl --min-gain 0.5
    """
    from expertctl.cli.evaluation_view import cut_off, document, shortfall, text
    from expertctl.engine.request import parse_expert

    settings = load_settings()
    check_device(settings.device)
    if plot is not None:
        from expertctl.cli.plot import check_picture

        check_picture(plot)
    experts = [parse_expert(word) for word in (target, *(compose or ()))]
    samples = read_data(data, metric=metric)
    try:
        from expertctl.engine.evaluation import EvaluationRequest
        from expertctl.engine.evaluation import evaluate as measure
    except ModuleNotFoundError as error:
        raise without_engine(error) from error
    request = EvaluationRequest(
        data=samples,
        expert=experts[0],
        compose=tuple(experts[1:]),
        base=base,
        max_tokens=max_tokens,
    )
    planner, budget = open_planner(settings, as_json=as_json), budget_of(memory_budget, settings)
    with counting("evaluating", request.answers, as_json=as_json) as report:
        found = measure(planner, request, budget=budget, progress=report)
    warn((*found.warnings, *cut_off(found)))
    if plot is not None:
        from expertctl.cli.plot import draw

        draw(found, plot)
    short = shortfall(found, min_gain)
    emit(document(found, show=show, min_gain=min_gain), text(found, show=show), as_json=as_json)
    if short:
        sys.stdout.flush()  # the figures stand above what is said of them
        note(f"error: {short}\n\nhint: --show N shows more of the wrong answers")
        raise typer.Exit(FAILURE)


def measured(
    plan: Plan, data: EvaluationData, *, task: str | None, output: Path, as_json: bool
) -> Plan:
    """Return a planned build with what its expert scores beside its base."""
    from expertctl.cli.evaluation_view import cut_off
    from expertctl.package.evaluation_entry import build_date, with_evaluation

    try:
        from expertctl.engine.evaluation import evaluate_build
    except ModuleNotFoundError as error:
        raise without_engine(error) from error

    settings = load_settings()
    check_device(settings.device)
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
        )
    warn((*data.warnings, *cut_off(found)))
    entry = _entry(named, data, base=found.base.share, expert=found.expert.share, date=date)
    note(f"measured {named}: {entry.expert:g} right, base alone {entry.base:g}, n = {entry.n}")
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
