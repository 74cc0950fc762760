"""How an evaluation of routing is shown: the document of ``--json``, and the same for people."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from expertctl.cli.output import counted, table
from expertctl.routing.risk_coverage import (
    Point,
    at_coverage,
    best,
    bins,
    calibration_error,
    curve,
    mean_risk,
    thinned,
)

if TYPE_CHECKING:
    from expertctl.reference import PackageName
    from expertctl.routing.evaluation import Decision, ExpertScore, RoutingEvaluation, Share

NONE = "none"
"""The name of the base alone, in a list of experts."""

_SHOWN_CHARACTERS = 300
_SHOWN_PAIRS = 10
_SHOWN_COVERAGES = (1.0, 0.9, 0.8, 0.7, 0.5)


def document(
    found: "RoutingEvaluation", *, show: int, min_accuracy: float | None
) -> dict[str, object]:
    """Return all results, with the first few wrong decisions."""
    return {
        "data": str(found.data.path),
        "dataset_sha256": found.data.digest.hex,
        "encoder": found.encoder,
        "bases": list(found.bases),
        "experts": found.experts,
        "threshold": found.threshold,
        "n": len(found.decisions),
        "accuracy": _share(found.accuracy),
        "in_scope": _share(found.in_scope),
        "abstention": _share(found.abstention),
        "out_of_scope": _share(found.out_of_scope),
        "precision": _share(found.precision),
        "coverage": _share(found.coverage),
        "composed": found.composed,
        "min_accuracy": min_accuracy,
        "passed": not shortfall(found, min_accuracy),
        "per_expert": [_expert(score) for score in found.per_expert()],
        "confusion": _cells(found),
        "risk_coverage": _risk_coverage(found),
        "confidence": _confidence(found),
        "latency_ms": {
            name: {"median": round(latency.median, 4), "p95": round(latency.p95, 4)}
            for name, latency in found.latencies().items()
        },
        "wrong": [_wrong(decision) for decision in found.wrong[:show]],
        "warnings": list(found.warnings),
    }


def text(found: "RoutingEvaluation", *, show: int) -> str:
    """Return the shares, the confusions, the curve, the times, and the first wrong decisions."""
    n, data = len(found.decisions), found.data
    head = (
        f"{data.path}: n = {n}, {counted(found.experts, 'expert')} installed, "
        f"encoder {found.encoder}, threshold {found.threshold:.2f}, base {', '.join(found.bases)}"
    )
    blocks = [head, _shares_text(found), *_confusion_text(found), _curve_text(found)]
    return "\n\n".join([*blocks, _latency_text(found), *_wrong_texts(found, show)])


def shortfall(found: "RoutingEvaluation", min_accuracy: float | None) -> str:
    """Say how the accuracy is too low; empty if it is not, or none was demanded."""
    share = found.accuracy
    if min_accuracy is None or share.value >= min_accuracy:
        return ""
    return (
        f"{found.data.path}: an accuracy of {share.value:.3f}, at least {min_accuracy:g} was "
        f"demanded ({share.right} of {share.n} decisions are right)"
    )


def confused(found: "RoutingEvaluation") -> list[tuple[str, str, int]]:
    """Return wanted expert, answering expert and count of each confusion, commonest first."""
    cells = [(_name(w), _name(g), n) for (w, g), n in found.confusion.items() if w != g]
    return sorted(cells, key=lambda cell: (-cell[2], cell))


def _share(share: "Share | None") -> dict[str, object] | None:
    if share is None:
        return None
    interval = share.interval
    return {
        "right": share.right,
        "n": share.n,
        "share": round(share.value, 6),
        "low": round(interval.low, 6),
        "high": round(interval.high, 6),
    }


def _expert(score: "ExpertScore") -> dict[str, object]:
    return {
        "expert": str(score.expert),
        "wanted": score.wanted,
        "right": score.right,
        "abstained": score.abstained,
        "answered": score.answered,
        "recall": round(score.right / score.wanted, 6) if score.wanted else None,
        "precision": round(score.right / score.answered, 6) if score.answered else None,
    }


def _cells(found: "RoutingEvaluation") -> list[dict[str, object]]:
    cells = [(_name(w), _name(g), w, g, n) for (w, g), n in found.confusion.items()]
    return [
        {"wanted": w and str(w), "got": g and str(g), "n": n} for _, _, w, g, n in sorted(cells)
    ]


def _risk_coverage(found: "RoutingEvaluation") -> dict[str, object]:
    points = curve([decision.guess for decision in found.decisions])
    area = mean_risk(points)
    return {
        "area": None if area is None else round(area, 6),
        "best": _point(best(points)),
        "points": [_point(point) for point in thinned(points)],
    }


def _point(point: Point) -> dict[str, object]:
    shares = {
        "coverage": point.coverage,
        "risk": point.risk,
        "accuracy": point.accuracy,
        "in_scope": point.in_scope,
        "out_of_scope": point.out_of_scope,
    }
    rounded = {name: None if v is None else round(v, 6) for name, v in shares.items()}
    return {"threshold": point.threshold, **rounded}


def _confidence(found: "RoutingEvaluation") -> dict[str, object]:
    made = bins([decision.guess for decision in found.decisions])
    error = calibration_error(made)
    return {
        "error": None if error is None else round(error, 6),
        "bins": [
            {
                "low": each.low,
                "high": each.high,
                "n": each.n,
                "right": each.right,
                "confidence": round(each.confidence, 6),
            }
            for each in made
        ],
    }


def _wrong(decision: "Decision") -> dict[str, object]:
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


def _name(expert: "PackageName | None") -> str:
    return NONE if expert is None else str(expert)


def _shares_text(found: "RoutingEvaluation") -> str:
    named = {
        "decided as wanted": found.accuracy,
        "in scope: by the right expert": found.in_scope,
        "in scope: left to the base": found.abstention,
        "out of scope: left to the base": found.out_of_scope,
        "answered by an expert": found.coverage,
        "answered: by the right expert": found.precision,
    }
    rows = [
        [
            name,
            f"{s.right} of {s.n}",
            f"{s.value:.3f}",
            f"{s.interval.low:.3f} to {s.interval.high:.3f}",
        ]
        for name, s in named.items()
        if s is not None
    ]
    return table(["", "prompts", "share", "95 % interval"], rows)


def _confusion_text(found: "RoutingEvaluation") -> Iterator[str]:
    pairs = confused(found)
    rows = [[str(n), wanted, got] for wanted, got, n in pairs[:_SHOWN_PAIRS]]
    if rows:
        yield table(["TIMES", "WANTED", "GOT"], rows)
    if len(pairs) > len(rows):
        yield f"… and {counted(len(pairs) - len(rows), 'more pair')}; --json has all"


def _curve_text(found: "RoutingEvaluation") -> str:
    points = curve([decision.guess for decision in found.decisions])
    wanted = [at_coverage(points, coverage) for coverage in _SHOWN_COVERAGES]
    shown = dict.fromkeys(point for point in wanted if point is not None)
    rows = [
        [
            f"{100 * point.coverage:.0f} %",
            "-" if point.risk is None else f"{100 * point.risk:.1f} %",
            "-" if point.threshold is None else f"{point.threshold:.2f}",
        ]
        for point in shown
    ]
    most = best(points)
    at = "no expert" if most.threshold is None else f"threshold {most.threshold:.2f}"
    here = f"these prompts would be decided best with {at}: {most.accuracy:.3f} as wanted"
    return "\n".join([table(["ANSWERED", "WRONG", "THRESHOLD"], rows), here])


def _latency_text(found: "RoutingEvaluation") -> str:
    rows = [
        [name, f"{latency.median:.2f}", f"{latency.p95:.2f}"]
        for name, latency in found.latencies().items()
    ]
    return table(["MS A PROMPT", "MEDIAN", "95 %"], rows)


def _wrong_texts(found: "RoutingEvaluation", show: int) -> list[str]:
    """Show wrong decisions, prompts quoted so that spaces and line ends are visible."""
    wrong = found.wrong
    shown = wrong[:show]
    lines = [f"wrong decisions, {len(shown)} of {len(wrong)}:"]
    for decision in shown:
        prompt = decision.prompt
        lines.append(f"  line {prompt.line}" + (f" ({prompt.id})" if prompt.id else ""))
        lines.append(f"    prompt  {_quoted(prompt.prompt)}")
        lines.append(f"    wanted  {_name(prompt.expert)}")
        lines.append(f"    got     {_outcome(decision)}")
    return ["\n".join(lines)] if shown else []


def _outcome(decision: "Decision") -> str:
    """Say which expert answered and why, or which came first and why it did not answer."""
    if decision.first is None:
        return f"{NONE}; no expert may answer"
    if decision.expert is None:
        return f"{NONE}; first was {decision.first}: {decision.reason}"
    return f"{decision.expert}: {decision.reason}"


def _quoted(value: str) -> str:
    cut = value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}…"
    return json.dumps(cut, ensure_ascii=False)
