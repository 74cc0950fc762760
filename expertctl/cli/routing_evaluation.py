"""Formats a routing evaluation: the document of ``eval --routing --json``, and the text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from expertctl.cli.output import format_count, format_percent, format_table, quote
from expertctl.routing.score import (
    OperatingPoint,
    bin_by_confidence,
    compute_calibration_error,
    compute_mean_risk,
    compute_risk_coverage,
    find_best_point,
    find_point_at,
    thin_points,
)

if TYPE_CHECKING:
    from expertctl.reference import PackageName
    from expertctl.routing.evaluation import (
        EvaluatedPrompt,
        ExpertScore,
        Proportion,
        RoutingEvaluation,
    )

NO_EXPERT = "none"
"""Stands for the base alone in a list of experts."""

_SHOWN_PAIRS = 10
_SHOWN_COVERAGES = (1.0, 0.9, 0.8, 0.7, 0.5)


def build_routing_document(
    result: "RoutingEvaluation", *, show: int, min_accuracy: float | None
) -> dict[str, object]:
    """Return all results, with the first ``show`` wrong decisions."""
    return {
        "data": str(result.data.path),
        "dataset_sha256": result.data.digest.hex,
        "encoder": result.encoder,
        "bases": list(result.bases),
        "experts": result.experts,
        "threshold": result.threshold,
        "n": len(result.decisions),
        "accuracy": _build_share_document(result.accuracy),
        "in_scope": _build_share_document(result.in_scope),
        "abstention": _build_share_document(result.abstention),
        "out_of_scope": _build_share_document(result.out_of_scope),
        "precision": _build_share_document(result.precision),
        "coverage": _build_share_document(result.coverage),
        "composed": result.composed_count,
        "min_accuracy": min_accuracy,
        "passed": not describe_accuracy_shortfall(result, min_accuracy),
        "per_expert": [_build_expert_document(score) for score in result.score_experts()],
        "confusion": _build_confusion_document(result),
        "risk_coverage": _build_risk_coverage_document(result),
        "confidence": _build_confidence_document(result),
        "latency_ms": {
            name: {"median": round(latency.median, 4), "p95": round(latency.p95, 4)}
            for name, latency in result.measure_latencies().items()
        },
        "wrong": [_build_wrong_document(decision) for decision in result.mistakes[:show]],
        "warnings": list(result.warnings),
    }


def format_routing_evaluation(result: "RoutingEvaluation", *, show: int) -> str:
    """Return shares, confusions, the risk curve, latencies, and the first wrong decisions."""
    n, data = len(result.decisions), result.data
    head = (
        f"{data.path}: n = {n}, {format_count(result.experts, 'expert')} installed, "
        f"encoder {result.encoder}, threshold {result.threshold:.2f}, "
        f"base {', '.join(result.bases)}"
    )
    blocks = [head, _format_shares(result), *_format_confusions(result), _format_risk_curve(result)]
    return "\n\n".join([*blocks, _format_latencies(result), *_format_wrong_decisions(result, show)])


def describe_accuracy_shortfall(result: "RoutingEvaluation", min_accuracy: float | None) -> str:
    """Say that the accuracy is below ``min_accuracy``; empty if not, or if there is no minimum."""
    share = result.accuracy
    if min_accuracy is None or share.value >= min_accuracy:
        return ""
    return (
        f"{result.data.path}: an accuracy of {share.value:.3f}, at least {min_accuracy:g} was "
        f"required ({share.correct} of {share.n} decisions are right)"
    )


def list_confusions(result: "RoutingEvaluation") -> list[tuple[str, str, int]]:
    """Return wanted expert, answering expert and count of each confusion, most frequent first."""
    cells = [
        (format_expert(w), format_expert(g), n) for (w, g), n in result.confusion.items() if w != g
    ]
    return sorted(cells, key=lambda cell: (-cell[2], cell))


def _build_share_document(share: "Proportion | None") -> dict[str, object] | None:
    if share is None:
        return None
    interval = share.interval
    return {
        "right": share.correct,
        "n": share.n,
        "share": round(share.value, 6),
        "low": round(interval.low, 6),
        "high": round(interval.high, 6),
    }


def _build_expert_document(score: "ExpertScore") -> dict[str, object]:
    return {
        "expert": str(score.expert),
        "wanted": score.expected,
        "right": score.correct,
        "abstained": score.abstained,
        "answered": score.answered,
        "recall": round(score.correct / score.expected, 6) if score.expected else None,
        "precision": round(score.correct / score.answered, 6) if score.answered else None,
    }


def _build_confusion_document(result: "RoutingEvaluation") -> list[dict[str, object]]:
    cells = [
        (format_expert(w), format_expert(g), w, g, n) for (w, g), n in result.confusion.items()
    ]
    return [
        {"wanted": w and str(w), "got": g and str(g), "n": n} for _, _, w, g, n in sorted(cells)
    ]


def _build_risk_coverage_document(result: "RoutingEvaluation") -> dict[str, object]:
    points = compute_risk_coverage([decision.prediction for decision in result.decisions])
    area = compute_mean_risk(points)
    return {
        "area": None if area is None else round(area, 6),
        "best": _build_point_document(find_best_point(points)),
        "points": [_build_point_document(point) for point in thin_points(points)],
    }


def _build_point_document(point: OperatingPoint) -> dict[str, object]:
    shares = {
        "coverage": point.coverage,
        "risk": point.risk,
        "accuracy": point.accuracy,
        "in_scope": point.in_scope,
        "out_of_scope": point.out_of_scope,
    }
    rounded = {name: None if v is None else round(v, 6) for name, v in shares.items()}
    return {"threshold": point.threshold, **rounded}


def _build_confidence_document(result: "RoutingEvaluation") -> dict[str, object]:
    made = bin_by_confidence([decision.prediction for decision in result.decisions])
    error = compute_calibration_error(made)
    return {
        "error": None if error is None else round(error, 6),
        "bins": [
            {
                "low": each.low,
                "high": each.high,
                "n": each.n,
                "right": each.correct,
                "confidence": round(each.confidence, 6),
            }
            for each in made
        ],
    }


def _build_wrong_document(decision: "EvaluatedPrompt") -> dict[str, object]:
    prompt = decision.prompt
    return {
        "line": prompt.line,
        "id": prompt.id,
        "prompt": prompt.prompt,
        "wanted": prompt.expert and str(prompt.expert),
        "got": decision.expert and str(decision.expert),
        "first": decision.first and str(decision.first),
        "confidence": decision.confidence,
        "reason": decision.reason,
    }


def format_expert(expert: "PackageName | None") -> str:
    """Return the name of an expert, or `NO_EXPERT`."""
    return NO_EXPERT if expert is None else str(expert)


def _format_shares(result: "RoutingEvaluation") -> str:
    named = {
        "decided as wanted": result.accuracy,
        "in scope: by the right expert": result.in_scope,
        "in scope: left to the base": result.abstention,
        "out of scope: left to the base": result.out_of_scope,
        "answered by an expert": result.coverage,
        "answered: by the right expert": result.precision,
    }
    rows = [
        [
            name,
            f"{s.correct} of {s.n}",
            f"{s.value:.3f}",
            f"{s.interval.low:.3f} to {s.interval.high:.3f}",
        ]
        for name, s in named.items()
        if s is not None
    ]
    return format_table(["", "prompts", "share", "95 % interval"], rows)


def _format_confusions(result: "RoutingEvaluation") -> Iterator[str]:
    pairs = list_confusions(result)
    rows = [[str(n), wanted, got] for wanted, got, n in pairs[:_SHOWN_PAIRS]]
    if rows:
        yield format_table(["TIMES", "WANTED", "GOT"], rows)
    if len(pairs) > len(rows):
        yield f"… and {format_count(len(pairs) - len(rows), 'more pair')}; --json has all"


def _format_risk_curve(result: "RoutingEvaluation") -> str:
    points = compute_risk_coverage([decision.prediction for decision in result.decisions])
    wanted = [find_point_at(points, coverage) for coverage in _SHOWN_COVERAGES]
    shown = dict.fromkeys(point for point in wanted if point is not None)
    rows = [
        [
            f"{100 * point.coverage:.0f} %",
            format_percent(point.risk),
            "-" if point.threshold is None else f"{point.threshold:.2f}",
        ]
        for point in shown
    ]
    most = find_best_point(points)
    at = "no expert" if most.threshold is None else f"threshold {most.threshold:.2f}"
    here = f"these prompts would be decided best with {at}: {most.accuracy:.3f} as wanted"
    return "\n".join([format_table(["ANSWERED", "WRONG", "THRESHOLD"], rows), here])


def _format_latencies(result: "RoutingEvaluation") -> str:
    rows = [
        [name, f"{latency.median:.2f}", f"{latency.p95:.2f}"]
        for name, latency in result.measure_latencies().items()
    ]
    return format_table(["MS A PROMPT", "MEDIAN", "95 %"], rows)


def _format_wrong_decisions(result: "RoutingEvaluation", show: int) -> list[str]:
    """Format wrong decisions, prompts quoted so that spaces and line ends are visible."""
    wrong = result.mistakes
    shown = wrong[:show]
    lines = [f"wrong decisions, {len(shown)} of {len(wrong)}:"]
    for decision in shown:
        prompt = decision.prompt
        lines.append(f"  line {prompt.line}" + (f" ({prompt.id})" if prompt.id else ""))
        lines.append(f"    prompt  {quote(prompt.prompt)}")
        lines.append(f"    wanted  {format_expert(prompt.expert)}")
        lines.append(f"    got     {_format_outcome(decision)}")
    return ["\n".join(lines)] if shown else []


def _format_outcome(decision: "EvaluatedPrompt") -> str:
    """Return the expert that answered and why, or the first candidate and why it did not."""
    if decision.first is None:
        return f"{NO_EXPERT}; no expert may answer"
    if decision.expert is None:
        return f"{NO_EXPERT}; first was {decision.first}: {decision.reason}"
    return f"{decision.expert}: {decision.reason}"
