"""Routing one prompt: which experts answer it, in which order, and why the others do not.

Routing is automatic unless experts are forced. The best candidate answers; another one joins only
if both declare it. The router never chooses an expert with an untrusted signer automatically.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from expertctl.digest import Digest
from expertctl.errors import UsageError
from expertctl.package.compatibility import check_expert_base
from expertctl.routing.candidate import (
    InstalledExpert,
    RoutingCandidate,
    build_candidate,
    explain_low_score,
)
from expertctl.routing.decision import (
    RoutingDecision,
    collect_notes,
    collect_warnings,
    score_prompt,
)
from expertctl.routing.eligibility import EligibleExperts, explain_ineligible
from expertctl.routing.features import PromptFeatures, extract_features
from expertctl.routing.index import MAX_HITS, RoutingIndex, Similarity
from expertctl.routing.numerics import build_request_settings, find_context_length
from expertctl.routing.plan import Plan, PlannedExpert, compute_plan_identity
from expertctl.routing.prompt_normalisation import normalise_prompt
from expertctl.routing.request import RouteRequest, check_request
from expertctl.routing.sampling_presets import read_base_sampling, resolve_sampling
from expertctl.routing.score import THRESHOLD
from expertctl.routing.selection import (
    SelectedExpert,
    is_excluded,
    list_unused_exclusions,
    select_experts,
    select_forced,
)
from expertctl.routing.vector_table import EncodedTexts, SearchHits
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.store.base_record import StoredBase

SuccessRate = Callable[[Digest, str], float | None]
"""Content digest, task → success rate; ``None`` without ratings."""


@dataclass(frozen=True, slots=True)
class RoutingResult:
    """The plan, the decision about every candidate, and notes and warnings for the user."""

    plan: Plan
    selected: tuple[SelectedExpert, ...]
    candidates: tuple[RoutingCandidate, ...]
    features: PromptFeatures
    encoder: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    timings_ms: Mapping[str, float]
    other_bases: Mapping[str, int] = field(default_factory=dict)
    """Base name → how many experts are ineligible because they were made for it."""

    @property
    def threshold(self) -> float:
        """The least score of an expert that is used."""
        return THRESHOLD

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
            "threshold": THRESHOLD,
            "prompt": self.features.to_json(),
            "notes": notes,
            "warnings": warnings,
            "timings_ms": timings,
        }


def no_success_rate(_: Digest, __: str) -> None:
    """Return None, which means the default success rate."""


def route_prompt(
    request: RouteRequest,
    eligible: EligibleExperts,
    *,
    base: StoredBase,
    index: RoutingIndex,
    success_rate: SuccessRate = no_success_rate,
) -> RoutingResult:
    """Plan one prompt.

    Raises:
        UsageError: when the request itself is wrong.
        NotFoundError: when a forced expert or a requirement of it is not installed.
        IncompatibleError: when forced experts do not fit the base or each other.
        RevokedError: when the key of a forced expert was revoked.
    """
    start = time.perf_counter()
    check_request(request)
    seen = normalise_prompt(request.prompt, eligible.names)
    asked = _RoutingQuery(request, extract_features(request.prompt, normalised=seen), seen)
    timings: dict[str, float] = {}
    if request.force:
        choices = _select_forced_experts(request, eligible, base)
        candidates = _measure_forced(asked, eligible, index, choices, success_rate, timings)
    else:
        measured = _measure_closest(asked, eligible, index, success_rate, timings)
        choices, candidates = select_experts(
            measured,
            eligible.usable,
            max_experts=request.max_experts,
            context=find_context_length(base, engine=request.engine),
            gains=eligible.gains,
        )
        candidates += _measure_dependencies(
            asked, eligible, index, choices, candidates, success_rate
        )
    scores = {candidate.expert.digest: candidate.score for candidate in candidates}
    return RoutingResult(
        plan=build_plan(request, choices, scores, asked.features, base),
        selected=tuple(choices),
        candidates=tuple(candidates),
        features=asked.features,
        encoder=index.encoder.name,
        notes=tuple(collect_notes(request, choices, candidates, eligible, index, base)),
        warnings=(
            *list_unused_exclusions(request.exclude, eligible.experts),
            *collect_warnings(choices, base),
        ),
        timings_ms={**timings, "total": _elapsed_ms(start)},
        other_bases=Counter(eligible.other_bases.values()),
    )


@dataclass(frozen=True, slots=True)
class _RoutingQuery:
    """A request, the features of its prompt, and the part of the prompt that the router reads."""

    request: RouteRequest
    features: PromptFeatures
    normalised_prompt: str


def _measure_closest(
    query: _RoutingQuery,
    eligible: EligibleExperts,
    index: RoutingIndex,
    success_rate: SuccessRate,
    timings: dict[str, float],
) -> list[RoutingCandidate]:
    """Return the experts closest to the prompt as candidates; none for ``base_alone``."""
    if query.request.base_alone or not eligible.experts:
        return []
    encoded, decision = _score_query(query, eligible, index, success_rate, timings)
    closest = [decision.hits]
    if len(eligible.ineligible) > MAX_HITS:
        closest.append(index.search(encoded.rows[0]))
    elif len(eligible.ineligible):
        closest.append(index.measure_similarity(encoded.rows[0], eligible.ineligible))
    return _build_candidates(query, eligible, index, decision, closest, success_rate)


def _measure_forced(
    query: _RoutingQuery,
    eligible: EligibleExperts,
    index: RoutingIndex,
    choices: Sequence[SelectedExpert],
    success_rate: SuccessRate,
    timings: dict[str, float],
) -> list[RoutingCandidate]:
    """Return the forced experts and their requirements as accepted candidates."""
    encoded, decision = _score_query(query, eligible, index, success_rate, timings)
    positions = index.find_positions([choice.expert.digest for choice in choices])
    found = [index.measure_similarity(encoded.rows[0], positions)]
    measured = _build_candidates(query, eligible, index, decision, found, success_rate)
    by_digest = {candidate.expert.digest: candidate for candidate in measured}
    return [by_digest[choice.expert.digest].mark_accepted(choice.reason) for choice in choices]


def _measure_dependencies(
    query: _RoutingQuery,
    eligible: EligibleExperts,
    index: RoutingIndex,
    choices: Sequence[SelectedExpert],
    candidates: Sequence[RoutingCandidate],
    success_rate: SuccessRate,
) -> list[RoutingCandidate]:
    """Return the requirements of the chosen experts that are not yet candidates."""
    known = {candidate.expert.digest for candidate in candidates}
    reasons = {c.expert.digest: c.reason for c in choices if c.expert.digest not in known}
    if not reasons:
        return []
    found = index.measure_similarity(
        index.encode_prompt(query.normalised_prompt).rows[0], index.find_positions(reasons)
    )
    undecided = RoutingDecision(SearchHits.empty())
    measured = _build_candidates(query, eligible, index, undecided, [found], success_rate)
    return [candidate.mark_accepted(reasons[candidate.expert.digest]) for candidate in measured]


def _score_query(
    query: _RoutingQuery,
    eligible: EligibleExperts,
    index: RoutingIndex,
    success_rate: SuccessRate,
    timings: dict[str, float],
) -> tuple[EncodedTexts, RoutingDecision]:
    start = time.perf_counter()
    encoded = index.encode_prompt(query.normalised_prompt)
    timings["encode"] = _elapsed_ms(start)
    start = time.perf_counter()
    success = partial(_lookup_success, success_rate, query.features.task)
    decision = score_prompt(eligible, index, query.features, encoded, success)
    timings["decide"] = _elapsed_ms(start)
    return encoded, decision


def _lookup_success(rate: SuccessRate, task: str, expert: InstalledExpert) -> float | None:
    return rate(expert.digest, task)


def _build_candidates(
    query: _RoutingQuery,
    eligible: EligibleExperts,
    index: RoutingIndex,
    decision: RoutingDecision,
    closest: Sequence[SearchHits],
    success_rate: SuccessRate,
) -> list[RoutingCandidate]:
    """Build candidates from search hits, best first."""
    similar: dict[int, Similarity] = {}
    for found in closest:
        similar |= _read_similarities(index, found)
    candidates = []
    for at, similarity in similar.items():
        expert = eligible.by_position.get(at)
        if expert is None:  # in the index, but not in ``eligible``
            continue
        measured = build_candidate(
            expert,
            query.features,
            similarity,
            success=success_rate(expert.digest, query.features.task),
            flags=eligible.flags.get(expert.digest, ()),
        )
        candidates.append(_apply_decision(measured, at, eligible, decision))
    return sorted(candidates, key=lambda candidate: candidate.sort_key)


def _read_similarities(index: RoutingIndex, found: SearchHits) -> dict[int, Similarity]:
    meant = index.encoder.calibrate(found.cosines).tolist()
    told = zip(found.experts.tolist(), meant, found.texts.tolist(), strict=True)
    return {at: Similarity(cosine, text) for at, cosine, text in told}


def _apply_decision(
    candidate: RoutingCandidate, position: int, eligible: EligibleExperts, decision: RoutingDecision
) -> RoutingCandidate:
    """Add the scores of a candidate and, if it is refused, the reason."""
    bar = eligible.ineligible_reasons.get(candidate.expert.digest)
    if bar:
        other_base = eligible.other_bases.get(candidate.expert.digest, "")
        return replace(candidate.mark_ineligible(bar), other_base=other_base)
    if why := decision.vetoes.get(position):
        return candidate.mark_vetoed(why)
    if standing := decision.scores.get(position):
        candidate = replace(
            candidate,
            probability=standing.probability,
            similarity=standing.similarity,
            score=standing.score,
            is_leader=position == decision.leader,
        )
    low = explain_low_score(candidate)
    return candidate.mark_rejected(low) if low else candidate


def _select_forced_experts(
    request: RouteRequest, eligible: EligibleExperts, base: StoredBase
) -> list[SelectedExpert]:
    barred = {
        e.digest for e in eligible.experts if explain_ineligible(e, request)
    } | eligible.other_bases.keys()
    usable = [expert for expert in eligible.experts if expert.digest not in barred]
    context = find_context_length(base, engine=request.engine)
    choices = select_forced(request.force, eligible.experts, usable, context=context)
    for choice in choices:
        if is_excluded(choice.expert, request.exclude):
            raise UsageError(
                f"{choice.expert.ref} is forced and excluded at once",
                hint="leave out the one or the other",
            )
        check_expert_base(
            choice.expert.manifest, base.identity, allow_mismatch=request.allow_base_mismatch
        )
    if len(choices) > request.max_experts:
        raise UsageError(
            f"with what they require, {len(choices)} experts are forced; at most "
            f"{request.max_experts} are allowed",
            hint="raise --max-experts, which goes up to 10, or name fewer",
        )
    return choices


def build_plan(
    request: RouteRequest,
    choices: Sequence[SelectedExpert],
    scores: Mapping[Digest, float],
    features: PromptFeatures,
    base: StoredBase,
) -> Plan:
    """Build the plan of the chosen experts: its identity, seed and sampling settings."""
    numerics = build_request_settings(request, base)
    manifests = [choice.expert.manifest for choice in choices]
    return Plan(
        identity=compute_plan_identity(numerics, [(c.expert.digest, c.weight) for c in choices]),
        seed=secrets.randbelow(2**32) if request.seed is None else request.seed,
        base=base.name,
        experts=tuple(
            _build_planned_expert(choice, scores[choice.expert.digest]) for choice in choices
        ),
        params=resolve_sampling(
            request.sampling,
            manifests,
            prompt_task=features.task,
            base=read_base_sampling(base.path).settings,
        ),
    )


def _build_planned_expert(choice: SelectedExpert, score: float) -> PlannedExpert:
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


def _elapsed_ms(start: float) -> float:
    return (time.perf_counter() - start) * 1000
