"""Routing one prompt: which experts answer it, in which order, and why the others do not.

Routing is automatic unless experts are forced. The best candidate answers; another one joins only
if both declare it. The router never chooses an expert with an untrusted signer automatically.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from expertctl.digest import Digest
from expertctl.errors import UsageError
from expertctl.package.compatibility import check_expert_base
from expertctl.routing.candidate import (
    EligibleExperts,
    InstalledExpert,
    RoutingCandidate,
    build_candidate,
    explain_ineligible,
    explain_low_score,
    is_excluded,
)
from expertctl.routing.decision import (
    RoutingDecision,
    collect_notes,
    collect_warnings,
    score_prompt,
)
from expertctl.routing.features import PromptFeatures, extract_features
from expertctl.routing.index import MAX_HITS, RoutingIndex, Similarity
from expertctl.routing.plan import (
    Plan,
    PlannedExpert,
    build_numeric_settings,
    compute_plan_identity,
    find_context_length,
)
from expertctl.routing.prompt_normalisation import normalise_prompt
from expertctl.routing.request import (
    RouteRequest,
    check_request,
    read_base_sampling,
    resolve_sampling,
)
from expertctl.routing.score import THRESHOLD
from expertctl.routing.selection import (
    SelectedExpert,
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
    normalised = normalise_prompt(request.prompt, eligible.names)
    features = extract_features(request.prompt, normalised=normalised)
    router = _PromptRouter(request, features, normalised, eligible, index, success_rate)
    if request.force:
        choices = _select_forced_experts(request, eligible, base)
        candidates = router.measure_forced(choices)
    else:
        choices, candidates = select_experts(
            router.measure_closest(),
            eligible.usable,
            max_experts=request.max_experts,
            context=find_context_length(base, engine=request.config.engine),
            gains=eligible.gains,
        )
        candidates += router.measure_dependencies(choices, candidates)
    scores = {candidate.expert.digest: candidate.score for candidate in candidates}
    return RoutingResult(
        plan=build_plan(request, choices, scores, features, base),
        selected=tuple(choices),
        candidates=tuple(candidates),
        features=features,
        encoder=index.encoder.name,
        notes=tuple(collect_notes(request, choices, candidates, eligible, index, base)),
        warnings=(
            *list_unused_exclusions(request.exclude, eligible.experts),
            *collect_warnings(choices, base),
        ),
        timings_ms={**router.timings, "total": _elapsed_ms(start)},
        other_bases=Counter(eligible.other_bases.values()),
    )


@dataclass(frozen=True, slots=True)
class _PromptRouter:
    """Measures experts for one prompt, of which the router reads ``normalised_prompt``."""

    request: RouteRequest
    features: PromptFeatures
    normalised_prompt: str
    eligible: EligibleExperts
    index: RoutingIndex
    success_rate: SuccessRate
    timings: dict[str, float] = field(default_factory=dict)

    def measure_closest(self) -> list[RoutingCandidate]:
        """Return the experts closest to the prompt as candidates; none for ``base_alone``."""
        if self.request.base_alone or not self.eligible.experts:
            return []
        encoded, decision = self._score()
        closest, ineligible = [decision.hits], self.eligible.ineligible
        if len(ineligible) > MAX_HITS:
            closest.append(self.index.search(encoded.rows[0]))
        elif len(ineligible):
            closest.append(self.index.measure_similarity(encoded.rows[0], ineligible))
        return self._build_candidates(decision, closest)

    def measure_forced(self, choices: Sequence[SelectedExpert]) -> list[RoutingCandidate]:
        """Return the forced experts and their requirements as accepted candidates."""
        encoded, decision = self._score()
        positions = self.index.find_positions([choice.expert.digest for choice in choices])
        found = self.index.measure_similarity(encoded.rows[0], positions)
        by_digest = {c.expert.digest: c for c in self._build_candidates(decision, [found])}
        return [by_digest[choice.expert.digest].mark_accepted(choice.reason) for choice in choices]

    def measure_dependencies(
        self, choices: Sequence[SelectedExpert], candidates: Sequence[RoutingCandidate]
    ) -> list[RoutingCandidate]:
        """Return the requirements of the chosen experts that are not yet candidates."""
        known = {candidate.expert.digest for candidate in candidates}
        reasons = {c.expert.digest: c.reason for c in choices if c.expert.digest not in known}
        if not reasons:
            return []
        query = self.index.encode_prompt(self.normalised_prompt).rows[0]
        found = self.index.measure_similarity(query, self.index.find_positions(reasons))
        undecided = RoutingDecision(SearchHits.empty())
        measured = self._build_candidates(undecided, [found])
        return [candidate.mark_accepted(reasons[candidate.expert.digest]) for candidate in measured]

    def _score(self) -> tuple[EncodedTexts, RoutingDecision]:
        start = time.perf_counter()
        encoded = self.index.encode_prompt(self.normalised_prompt)
        self.timings["encode"] = _elapsed_ms(start)
        start = time.perf_counter()
        decision = score_prompt(
            self.eligible, self.index, self.features, encoded, self._lookup_success
        )
        self.timings["decide"] = _elapsed_ms(start)
        return encoded, decision

    def _lookup_success(self, expert: InstalledExpert) -> float | None:
        return self.success_rate(expert.digest, self.features.task)

    def _build_candidates(
        self, decision: RoutingDecision, closest: Sequence[SearchHits]
    ) -> list[RoutingCandidate]:
        """Build candidates from search hits, best first."""
        similar: dict[int, Similarity] = {}
        for found in closest:
            similar |= _read_similarities(self.index, found)
        candidates = []
        for at, similarity in similar.items():
            expert = self.eligible.by_position.get(at)
            if expert is None:  # in the index, but not in ``eligible``
                continue
            measured = build_candidate(
                expert,
                self.features,
                similarity,
                success=self._lookup_success(expert),
                flags=self.eligible.flags.get(expert.digest, ()),
            )
            candidates.append(_apply_decision(measured, at, self.eligible, decision))
        return sorted(candidates, key=lambda candidate: candidate.sort_key)


def _read_similarities(index: RoutingIndex, found: SearchHits) -> dict[int, Similarity]:
    cosines = index.encoder.calibrate(found.cosines).tolist()
    hits = zip(found.experts.tolist(), cosines, found.texts.tolist(), strict=True)
    return {at: Similarity(cosine, text) for at, cosine, text in hits}


def _apply_decision(
    candidate: RoutingCandidate, position: int, eligible: EligibleExperts, decision: RoutingDecision
) -> RoutingCandidate:
    """Add the scores of a candidate and, if it is refused, the reason."""
    if why := eligible.ineligible_reasons.get(candidate.expert.digest):
        other_base = eligible.other_bases.get(candidate.expert.digest, "")
        return replace(candidate.mark_ineligible(why), other_base=other_base)
    if why := decision.vetoes.get(position):
        return candidate.mark_vetoed(why)
    if scores := decision.scores.get(position):
        is_leader = position == decision.leader
        candidate = replace(candidate, **scores._asdict(), is_leader=is_leader)
    low = explain_low_score(candidate)
    return candidate.mark_rejected(low) if low else candidate


def _select_forced_experts(
    request: RouteRequest, eligible: EligibleExperts, base: StoredBase
) -> list[SelectedExpert]:
    ineligible = {
        e.digest for e in eligible.experts if explain_ineligible(e, request)
    } | eligible.other_bases.keys()
    usable = [expert for expert in eligible.experts if expert.digest not in ineligible]
    context = find_context_length(base, engine=request.config.engine)
    choices = select_forced(request.force, eligible.experts, usable, context=context)
    for choice in choices:
        if is_excluded(choice.expert, request.exclude):
            raise UsageError(
                f"{choice.expert.ref} is both forced and excluded",
                hint="leave out the one or the other",
            )
        check_expert_base(
            choice.expert.manifest, base.identity, allow_mismatch=request.allow_base_mismatch
        )
    if len(choices) > request.max_experts:
        raise UsageError(
            f"with their requirements, {len(choices)} experts are forced; at most "
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
    numerics = build_numeric_settings(request.config, base)
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
