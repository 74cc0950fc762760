"""Evaluations of routing made in memory: what was wanted, who came first, how sure."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from expertctl.reference import Digest, PackageName
from expertctl.routing.evaluation import (
    EvaluatedPrompt,
    LabelledPrompt,
    LabelledPrompts,
    RoutingEvaluation,
)

THRESHOLD = 0.5

Row = tuple[str | None, str | None, float | None]
"""Who is wanted, who comes first and how sure; who is sure enough answers."""


def expand_name(name: str | None) -> PackageName | None:
    """``acme/NAME``, a whole name as it is, none for none."""
    if name is None:
        return None
    return PackageName.parse(name if "/" in name else f"acme/{name}")


def make_decision(line: int, row: Row, *, experts: int = 1, ms: float = 1.0) -> EvaluatedPrompt:
    wanted, first, confidence = row
    sure = confidence is not None and confidence >= THRESHOLD
    return EvaluatedPrompt(
        prompt=LabelledPrompt(line, f"prompt {line}", expand_name(wanted)),
        expert=expand_name(first) if sure else None,
        first=expand_name(first),
        confidence=confidence,
        reason=f"reason {line}",
        experts=experts,
        timings_ms={"encode": ms, "plan": 2 * ms},
    )


def make_evaluation(
    rows: Iterable[Row], *, name: str = "held-out.jsonl", warnings: Sequence[str] = ()
) -> RoutingEvaluation:
    decisions = tuple(make_decision(line, row) for line, row in enumerate(rows, start=1))
    prompts = tuple(each.prompt for each in decisions)
    return make_evaluation_of(
        decisions,
        data=LabelledPrompts(Path(name), Digest.compute(b"data"), prompts),
        warnings=warnings,
    )


def make_evaluation_of(
    decisions: Iterable[EvaluatedPrompt],
    *,
    data: LabelledPrompts | None = None,
    warnings: Sequence[str] = (),
) -> RoutingEvaluation:
    made = tuple(decisions)
    prompts = tuple(each.prompt for each in made)
    return RoutingEvaluation(
        data=data or LabelledPrompts(Path("held-out.jsonl"), Digest.compute(b"data"), prompts),
        decisions=made,
        experts=3,
        encoder="lexical",
        bases=("tiny-base",),
        threshold=THRESHOLD,
        warnings=tuple(warnings),
    )
