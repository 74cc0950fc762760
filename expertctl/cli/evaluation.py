"""``expertctl eval``, ``eval --routing`` and ``build --eval``: measure experts, or the router.

The engine is imported inside the functions, after all checks that can be made without it.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expertctl.cli.completion import complete_experts
from expertctl.cli.engine import guard_engine_import, open_planner, resolve_base
from expertctl.cli.help import expand_flags
from expertctl.cli.output import JsonFlag, emit, format_table, note, quote, warn
from expertctl.cli.process import FAILURE
from expertctl.cli.progress import show_counter
from expertctl.cli.run_options import (
    Base,
    EngineFlags,
    MemoryBudget,
    MissFlags,
    NumericsFlags,
    check_cpu_only,
)
from expertctl.cli.run_view import format_routed_report, read_routed_use
from expertctl.engine_config import EngineConfig
from expertctl.errors import UsageError
from expertctl.package.build import BuildPlan
from expertctl.package.evaluation import (
    EvaluationData,
    Metric,
    format_correct_count,
    format_interval,
    read_evaluation_data,
)
from expertctl.schema.manifest import Evaluation
from expertctl.settings import load_settings

if TYPE_CHECKING:
    from expertctl.engine.evaluation_result import (
        AccuracyGain,
        AccuracyScore,
        EvaluationResult,
        ScoredAnswer,
    )
    from expertctl.package.evaluation import Interval


def build_evaluation_document(
    result: "EvaluationResult", *, show: int, min_gain: float | None
) -> dict[str, object]:
    """Return the document of ``eval --json``, with ``show`` wrong answers of the last score."""
    gain = result.gains[-1].value
    return {
        "ref": result.expert.experts[-1].ref,
        "data": str(result.data.path),
        "dataset_sha256": result.data.digest.hex,
        "metric": result.data.metric,
        "max_tokens": result.max_tokens,
        "base_model": result.base_name,
        "dtype": result.dtype,
        "n": len(result.data.samples),
        "base": result.base.share,
        "expert": result.expert.share,
        "scores": [_build_score_document(score) for score in result.scores],
        "gains": [_build_gain_document(each) for each in result.gains],
        "min_gain": min_gain,
        "passed": min_gain is None or gain >= min_gain,
        "wrong": [
            _build_wrong_document(answer) for answer in result.scores[-1].wrong_answers[:show]
        ],
        "warnings": list(result.warnings),
        **({} if result.moe is None else {"moe": result.moe.to_json()}),
    }


def format_scores(result: "EvaluationResult", *, show: int) -> str:
    """Return the scores, the gains, and the first ``show`` wrong answers of the last score."""
    n, data = len(result.data.samples), result.data
    head = (
        f"{data.path}: n = {n}, {data.metric}, base {result.base_name} in {result.dtype}, "
        f"at most {result.max_tokens} tokens"
    )
    rows = [
        [s.name, format_correct_count(s.right_count, n), format_interval(s.interval, n)]
        for s in result.scores
    ]
    lines = [
        head,
        *format_routed_report(read_routed_use(result.moe)),
        "",
        format_table(["", "right", "95 % interval"], rows),
        "",
    ]
    lines += map(_format_gain, result.gains)
    return "\n".join([*lines, *_format_wrong_answers(result.scores[-1], show)])


def find_answer_warnings(result: "EvaluationResult") -> Iterator[str]:
    """Yield a warning for experts whose answers are empty or were cut off."""
    for score in result.scores:
        n = len(score.answers)
        if score.experts and score.empty_count:
            yield f"{score.name}: {score.empty_count} of {n} answers are empty"
        if score.experts and score.truncated_count:
            yield (
                f"{score.name}: {score.truncated_count} of {n} answers were cut at "
                f"{result.max_tokens} tokens; see --max-tokens and decoding.max_tokens"
            )


def describe_gain_shortfall(result: "EvaluationResult", min_gain: float | None) -> str:
    """Say that the gain is below ``min_gain``; empty if it is not, or if there is no minimum."""
    gain = result.gains[-1]
    if min_gain is None or gain.value >= min_gain:
        return ""
    score, over, n = gain.score, gain.over, len(gain.score.answers)
    return (
        f"{score.name}: a gain of {gain.value:+.3f} over {over.name}, at least {min_gain:+g} was "
        f"required ({score.right_count} of {n} right against {over.right_count} of {n})"
    )


def _build_score_document(score: "AccuracyScore") -> dict[str, object]:
    return {
        "name": score.name,
        "experts": [
            {"ref": e.ref, "content_digest": str(e.content_digest), "weight": e.weight}
            for e in score.experts
        ],
        "right": score.right_count,
        "share": score.share,
        **_build_interval_document(score.interval),
        "cut_off": score.truncated_count,
    }


def _build_gain_document(gain: "AccuracyGain") -> dict[str, object]:
    return {
        "name": gain.score.name,
        "over": gain.over.name,
        "gain": gain.value,
        **_build_interval_document(gain.interval),
        "gained": gain.gained,
        "lost": gain.lost,
        "p": gain.p_value,
    }


def _build_interval_document(interval: "Interval") -> dict[str, object]:
    return {"low": round(interval.low, 6), "high": round(interval.high, 6)}


def _build_wrong_document(answer: "ScoredAnswer") -> dict[str, object]:
    sample = answer.sample
    return {
        "line": sample.line,
        "id": sample.id,
        "prompt": sample.prompt,
        "wanted": sample.answer,
        "got": answer.text,
    }


def _format_gain(gain: "AccuracyGain") -> str:
    low, high = gain.interval.low, gain.interval.high
    return (
        f"{gain.score.name} over {gain.over.name}: gain {gain.value:+.3f}, "
        f"95 % interval {low:+.3f} to {high:+.3f}, p = {gain.p_value:.2g}"
    )


def _format_wrong_answers(score: "AccuracyScore", show: int) -> list[str]:
    """Format wrong answers, quoted so that spaces and line ends are visible."""
    shown = score.wrong_answers[:show]
    lines = ["", f"wrong answers of {score.name}, {len(shown)} of {len(score.wrong_answers)}:"]
    for answer in shown:
        sample = answer.sample
        texts = {"prompt": sample.prompt, "wanted": sample.answer, "got": answer.text}
        lines.append(f"  line {sample.line}" + (f" ({sample.id})" if sample.id else ""))
        lines += [f"    {label.ljust(6)}  {quote(value)}" for label, value in texts.items()]
    return lines if shown else []


def _evaluate_routing(path: Path, options: "EvaluationFlags", *, as_json: bool) -> str:
    """Measure the router and print the result; return how it misses ``min_accuracy``, if so."""
    from expertctl.cli.routing_evaluation import (
        build_routing_document,
        describe_accuracy_shortfall,
        format_routing_evaluation,
    )
    from expertctl.routing.evaluation import evaluate_routing as measure
    from expertctl.routing.evaluation import read_labelled_prompts

    if options.plot is not None:
        from expertctl.cli.plot import check_plot_path

        check_plot_path(options.plot)
    data = read_labelled_prompts(path)
    settings = load_settings()
    base = resolve_base(options.base, settings, as_json=as_json)
    planner = open_planner(settings, as_json=as_json)
    with show_counter("routing", len(data.prompts), as_json=as_json) as report:
        found = measure(planner, data, base=base, progress=report)
    warn(found.warnings)
    if options.plot is not None:
        from expertctl.cli.plot import write_figure
        from expertctl.cli.routing_plot import build_routing_figure

        write_figure(lambda: build_routing_figure(found), options.plot)
    document = build_routing_document(found, show=options.show, min_accuracy=options.min_accuracy)
    emit(document, format_routing_evaluation(found, show=options.show), as_json=as_json)
    return describe_accuracy_shortfall(found, options.min_accuracy)


MetricOption = Annotated[
    Metric,
    typer.Option(help="When an answer is right: equal, contained in it, or the same JSON value."),
]


@dataclass(frozen=True, slots=True)
class EvaluationFlags:
    """What to measure, which minimum to require, and what to show."""

    target: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|REF",
            autocompletion=complete_experts,
            help="A .expert file, or an installed expert.",
        ),
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help='JSON Lines: {"prompt": "3 + 4", "answer": "7"} and more.'
        ),
    ] = None
    routing: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='Measure routing: {"prompt": "Sort 2, 1", "expert": "acme/sorting"} or null.',
        ),
    ] = None
    compose: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REF[:WEIGHT]",
            autocompletion=complete_experts,
            help="Also apply this expert after it, as a chain; repeatable.",
        ),
    ] = None
    metric: MetricOption = "exact_match"
    max_tokens: Annotated[
        int | None, typer.Option(min=1, max=200_000, help="Default: the expert's setting, or 256.")
    ] = None
    min_gain: Annotated[
        float | None, typer.Option(min=-1, max=1, help="Exit 1 when the gain is less than this.")
    ] = None
    min_accuracy: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="With --routing: exit 1 when the accuracy is less than this."
        ),
    ] = None
    show: Annotated[int, typer.Option(min=0, help="How many wrong answers to show.")] = 3
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the scores to a .svg or .png file.")
    ] = None
    base: Base = None
    memory_budget: MemoryBudget = None


@expand_flags
def evaluate(
    options: EvaluationFlags, numerics: NumericsFlags, miss: MissFlags, as_json: JsonFlag = False
) -> None:
    """Measure an expert against its base, or routing.

    Example: expertctl eval starter/sorting --data resolved-out.jsonl --min-gain 0.5
    """
    answering = {
        "FILE|REF": options.target,
        "--data": options.data,
        "--compose": options.compose,
        "--max-tokens": options.max_tokens,
        "--min-gain": options.min_gain,
        "--memory-budget": options.memory_budget,
        "--dtype": numerics.dtype,
        "--adapter-dtype": numerics.adapter_dtype,
        "--deterministic": numerics.deterministic,
        "--moe-miss": None if miss.moe_miss == "exact" else miss.moe_miss,
        "--moe-skip-cap": miss.moe_skip_cap,
    }
    if options.routing is not None:
        _reject_options(
            answering,
            "--routing measures which expert is chosen, for the prompts of its own FILE, and "
            "generates nothing",
        )
        shortfall = _evaluate_routing(options.routing, options, as_json=as_json)
        _exit_on_shortfall(shortfall, wrong="decisions")
        return
    _reject_options({"--min-accuracy": options.min_accuracy}, "applies only to --routing")
    if options.target is None or options.data is None:
        raise UsageError(
            f"{'FILE|REF' if options.target is None else '--data'} is missing",
            hint="`expertctl eval REF --data FILE` measures an expert, "
            "`expertctl eval --routing FILE` the router",
        )
    flags = EngineFlags("cpu", options.memory_budget, numerics, miss)
    _evaluate_answers(options.target, options.data, options, flags, as_json=as_json)


def _reject_options(options: Mapping[str, object], why: str) -> None:
    """Raise `UsageError` for options that would be ignored."""
    given = [name for name, value in options.items() if value not in (None, [])]
    if given:
        raise UsageError(f"{', '.join(given)}: {why}", hint="see `expertctl eval --help`")


def _evaluate_answers(
    target: str, data: Path, options: EvaluationFlags, flags: EngineFlags, *, as_json: bool
) -> None:
    from expertctl.engine.request import parse_expert

    settings = load_settings()
    config = flags.resolve(settings)
    check_cpu_only(settings, "eval")
    if options.plot is not None:
        from expertctl.cli.plot import check_plot_path

        check_plot_path(options.plot)
    experts = [parse_expert(word) for word in (target, *(options.compose or ()))]
    samples = read_evaluation_data(data, metric=options.metric)
    with guard_engine_import(as_json=as_json):
        from expertctl.engine.evaluation import EvaluationRequest
        from expertctl.engine.evaluation import evaluate as measure
    request = EvaluationRequest(
        data=samples,
        expert=experts[0],
        compose=tuple(experts[1:]),
        config=replace(config, base=resolve_base(options.base, settings, as_json=as_json)),
        max_tokens=options.max_tokens,
    )
    planner = open_planner(settings, as_json=as_json)
    with show_counter("evaluating", request.answers, as_json=as_json) as report:
        found = measure(planner, request, progress=report, notify=note)
    warn((*found.warnings, *find_answer_warnings(found)))
    if options.plot is not None:
        from expertctl.cli.plot import draw_evaluation

        draw_evaluation(found, options.plot)
    document = build_evaluation_document(found, show=options.show, min_gain=options.min_gain)
    emit(document, format_scores(found, show=options.show), as_json=as_json)
    _exit_on_shortfall(describe_gain_shortfall(found, options.min_gain), wrong="answers")


def _exit_on_shortfall(why: str, *, wrong: str) -> None:
    """Exit with 1 if ``why`` says that a minimum was missed."""
    if why:
        sys.stdout.flush()  # the figures come before the error about them
        note(f"error: {why}\n\nhint: --show N shows more of the wrong {wrong}")
        raise typer.Exit(FAILURE)


def measure_build(
    plan: BuildPlan, data: EvaluationData, *, task: str | None, output: Path, as_json: bool
) -> BuildPlan:
    """Return a planned build with an evaluation entry: the scores of its expert and of its base."""
    check_cpu_only(load_settings(), "the evaluation of a build")
    found = evaluate_plan(plan, data, task=task, output=output, as_json=as_json)
    return record_evaluation(plan, found, task=task)


def evaluate_plan(
    plan: BuildPlan, data: EvaluationData, *, task: str | None, output: Path, as_json: bool
) -> "EvaluationResult":
    """Measure a planned build on the processor; print warnings about its answers."""
    from expertctl.package.build import add_evaluation, choose_build_date

    with guard_engine_import(as_json=as_json):
        from expertctl.engine.evaluation import evaluate_build

    settings, named = load_settings(), task or data.path.stem
    add_evaluation(
        plan, _build_evaluation_entry(named, data, base=0.0, expert=0.0, date=choose_build_date())
    )  # else refused late
    planner = open_planner(settings, as_json=as_json)
    with show_counter("evaluating", 2 * len(data.samples), as_json=as_json) as report:
        found = evaluate_build(
            planner,
            plan,
            data,
            sibling=output,
            config=EngineConfig(memory_budget=settings.memory_budget),
            progress=report,
            notify=note,
        )
    warn((*data.warnings, *find_answer_warnings(found)))
    return found


def record_evaluation(plan: BuildPlan, found: "EvaluationResult", *, task: str | None) -> BuildPlan:
    """Return a planned build with the entry of an evaluation, which is printed."""
    from expertctl.package.build import add_evaluation, choose_build_date
    from expertctl.package.evaluation import describe_evaluation

    data, named = found.data, task or found.data.path.stem
    scores = {"base": found.base.share, "expert": found.expert.share}
    entry = _build_evaluation_entry(named, data, date=choose_build_date(), **scores)
    note(f"measured {named}: {describe_evaluation(entry)}")
    return add_evaluation(plan, entry)


def _build_evaluation_entry(
    task: str, data: EvaluationData, *, base: float, expert: float, date: str
) -> Evaluation:
    return Evaluation(
        task=task,
        dataset_sha256=data.digest.hex,
        n=len(data.samples),
        metric=data.metric,
        base=round(base, 4),
        expert=round(expert, 4),
        date=date,
    )
