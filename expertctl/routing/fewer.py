"""Fewer experts: leaving out of a plan what does not fit into memory, the lowest score first.

The expert with the lowest score is dropped (among equals the later one), together with what
requires it and what is then required no more. The rest keeps its order; its plan is made anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from expertctl.digest import Digest
from expertctl.reference import Reference
from expertctl.routing.candidate import Installed
from expertctl.routing.choice import Choice
from expertctl.routing.composition import requirements_in
from expertctl.routing.planner import Planned
from expertctl.routing.remarks import warnings_of
from expertctl.routing.request import RouteRequest
from expertctl.routing.router import plan_of
from expertctl.schema.strict_json import JsonObject


@dataclass(frozen=True, slots=True)
class Dropped:
    """An expert that was left out of a plan, and why."""

    ref: str
    content_digest: Digest
    reason: str

    @property
    def warning(self) -> str:
        """What the user is told."""
        return f"{self.ref} was left out: {self.reason}"

    def to_json(self) -> JsonObject:
        """Return the entry of ``dropped`` in ``run --json``."""
        return {
            "ref": self.ref,
            "content_digest": str(self.content_digest),
            "reason": self.reason,
        }


def without_least(
    planned: Planned, request: RouteRequest, *, why: str
) -> tuple[Planned, tuple[Dropped, ...]]:
    """Return a plan without its lowest-scoring expert and its dependents, and what was dropped.

    ``why`` says what did not fit, with the bytes; the given plan has at least one expert.
    """
    choices = planned.result.choices
    least = _least(planned)
    kept = _without(choices, least)
    gone = [choice.expert for choice in choices if choice not in kept]
    dropped = tuple(Dropped(e.ref, e.digest, _reason(e, least, gone, why)) for e in gone)
    return _replanned(planned, request, kept), dropped


def _least(planned: Planned) -> Installed:
    scores = [expert.score for expert in planned.result.plan.experts]
    place = min(range(len(scores)), key=lambda n: (scores[n], -n))
    return planned.experts[place]


def _without(choices: Sequence[Choice], least: Installed) -> tuple[Choice, ...]:
    """Leave out an expert, then what misses a requirement, then what is no longer needed."""
    kept = tuple(choice for choice in choices if choice.expert.digest != least.digest)
    while (fewer := tuple(c for c in kept if _has_all(c.expert, kept))) != kept:
        kept = fewer
    needed: dict[str, Installed] = {}
    for choice in kept:
        if not choice.pulled:
            _need(choice.expert, [other.expert for other in kept], needed)
    return tuple(choice for choice in kept if choice.expert.ref in needed)


def _has_all(expert: Installed, kept: Sequence[Choice]) -> bool:
    wanted = [Reference.parse(text) for text in expert.manifest.composition.requires]
    return all(any(choice.expert.is_meant(one) for choice in kept) for one in wanted)


def _need(expert: Installed, kept: Sequence[Installed], needed: dict[str, Installed]) -> None:
    if expert.ref not in needed:
        needed[expert.ref] = expert
        for other in requirements_in(expert, kept):
            _need(other, kept, needed)


def _reason(expert: Installed, least: Installed, gone: Sequence[Installed], why: str) -> str:
    if expert == least:
        return why
    missed = requirements_in(expert, gone)
    if missed:
        return f"it requires {missed[0].ref}, which was left out: {why}"
    return f"only what was left out with {least.ref} required it: {why}"


def _replanned(planned: Planned, request: RouteRequest, kept: Sequence[Choice]) -> Planned:
    result = planned.result
    scores = {expert.content_digest: expert.score for expert in result.plan.experts}
    plan = plan_of(request, kept, scores, result.features, planned.base)
    told = set(warnings_of(result.choices, planned.base)) - set(warnings_of(kept, planned.base))
    warnings = tuple(warning for warning in result.warnings if warning not in told)
    alone = () if kept else ("the base answers alone: no expert fits into memory beside it",)
    return Planned(
        result=replace(
            result,
            plan=replace(plan, seed=result.plan.seed),
            choices=tuple(kept),
            notes=(*result.notes, *alone),
            warnings=warnings,
        ),
        base=planned.base,
        experts=tuple(choice.expert for choice in kept),
    )
