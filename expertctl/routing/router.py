"""From a prompt to a plan: which experts answer it, in which order, and why the others do not.

Routing is automatic unless experts are forced. The best candidate answers; another joins only when
both declare it. Of its own accord the router never chooses an expert whose signer is not trusted.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from expertctl.digest import Digest
from expertctl.errors import UsageError
from expertctl.package.compatibility import NO_WIDTHS, Widths, check_base
from expertctl.routing.base_sampling import read_base_sampling
from expertctl.routing.candidate import (
    Candidate,
    Installed,
    measure,
    misfit,
    superseded,
    too_low,
    untrusted,
)
from expertctl.routing.choice import Choice, choose, choose_forced, is_excluded
from expertctl.routing.composition import Gains
from expertctl.routing.decision import Decision, decide
from expertctl.routing.encoded import Encoded
from expertctl.routing.features import Features, features_of
from expertctl.routing.found import Found
from expertctl.routing.index import FOUND, RoutingIndex, Similarity
from expertctl.routing.numerics import context_of, request_settings
from expertctl.routing.plan import Plan, PlannedExpert, plan_identity
from expertctl.routing.presets import resolve
from expertctl.routing.prompt_view import view
from expertctl.routing.remarks import notes_of, warnings_of
from expertctl.routing.request import RouteRequest, check_request
from expertctl.routing.roster import Flags, Roster, build_roster
from expertctl.routing.score import THRESHOLD
from expertctl.routing.suggestion import idle_exclusions
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.store.base_record import StoredBase

SuccessRate = Callable[[Digest, str], float | None]
"""Content digest, task → how often it was judged good; ``None`` without judgements."""

NO_FLAGS: Flags = {}
NO_GAINS: Gains = {}


@dataclass(frozen=True, slots=True)
class RoutingResult:
    """The plan, what was decided about every expert, and what the user should know."""

    plan: Plan
    choices: tuple[Choice, ...]
    candidates: tuple[Candidate, ...]
    features: Features
    encoder: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    timings_ms: Mapping[str, float]
    other_bases: Mapping[str, int] = field(default_factory=dict)
    """How many experts are left out because they were made for another base, by its name."""

    @property
    def threshold(self) -> float:
        """The score from which on an expert is used."""
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


def nobody_judged(_: Digest, __: str) -> None:
    """Return None: without usage, every success rate is the default."""


def route(
    request: RouteRequest,
    roster: Roster,
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
    seen = view(request.prompt, roster.names)
    asked = _Asked(request, features_of(request.prompt, seen=seen), seen)
    timings: dict[str, float] = {}
    if request.force:
        choices = _forced(request, roster, base)
        candidates = _measured_choices(asked, roster, index, choices, success_rate, timings)
    else:
        measured = _measured(asked, roster, index, success_rate, timings)
        choices, candidates = choose(
            measured,
            roster.usable,
            max_experts=request.max_experts,
            context=context_of(base, engine=request.engine),
            gains=roster.gains,
        )
        candidates += _far_off(asked, roster, index, choices, candidates, success_rate)
    scores = {candidate.expert.digest: candidate.score for candidate in candidates}
    return RoutingResult(
        plan=plan_of(request, choices, scores, asked.features, base),
        choices=tuple(choices),
        candidates=tuple(candidates),
        features=asked.features,
        encoder=index.encoder.name,
        notes=tuple(notes_of(request, choices, candidates, roster, index, base)),
        warnings=(*idle_exclusions(request.exclude, roster.experts), *warnings_of(choices, base)),
        timings_ms={**timings, "total": _since(start)},
        other_bases=Counter(roster.other_bases.values()),
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request and what the router reads of its prompt."""

    request: RouteRequest
    features: Features
    seen: str


def roster_of(
    request: RouteRequest,
    experts: Sequence[Installed],
    *,
    base: StoredBase,
    index: RoutingIndex,
    flags: Flags = NO_FLAGS,
    gains: Gains = NO_GAINS,
    widths: Widths = NO_WIDTHS,
) -> Roster:
    """Return which experts may answer requests like this one on a base.

    ``widths`` are those of the known bases, for people who ask why an expert does not fit.

    Raises:
        UsageError: when the request itself is wrong; nothing is indexed then.
    """
    check_request(request)
    return build_roster(
        experts,
        index,
        bar=lambda expert: _bar(expert, request),
        misfit=lambda expert: _misfit(expert, request, base, widths),
        passed_over=superseded,
        flags=flags,
        gains=gains,
    )


def _measured(
    asked: _Asked,
    roster: Roster,
    index: RoutingIndex,
    success_rate: SuccessRate,
    timings: dict[str, float],
) -> list[Candidate]:
    """Measure the experts closest to the prompt; none when the base is to answer alone."""
    if asked.request.base_alone or not roster.experts:
        return []
    encoded, decision = _decided(asked, roster, index, success_rate, timings)
    closest = [decision.found]
    if len(roster.barred) > FOUND:
        closest.append(index.search(encoded.rows[0]))
    elif len(roster.barred):
        closest.append(index.measure(encoded.rows[0], roster.barred))
    return _candidates(asked, roster, index, decision, closest, success_rate)


def _measured_choices(
    asked: _Asked,
    roster: Roster,
    index: RoutingIndex,
    choices: Sequence[Choice],
    success_rate: SuccessRate,
    timings: dict[str, float],
) -> list[Candidate]:
    """Measure the named experts, and those that they require."""
    encoded, decision = _decided(asked, roster, index, success_rate, timings)
    positions = index.positions([choice.expert.digest for choice in choices])
    found = [index.measure(encoded.rows[0], positions)]
    measured = _candidates(asked, roster, index, decision, found, success_rate)
    by_digest = {candidate.expert.digest: candidate for candidate in measured}
    return [by_digest[choice.expert.digest].accepted(choice.reason) for choice in choices]


def _far_off(
    asked: _Asked,
    roster: Roster,
    index: RoutingIndex,
    choices: Sequence[Choice],
    candidates: Sequence[Candidate],
    success_rate: SuccessRate,
) -> list[Candidate]:
    """Measure what the chosen experts require and is not among the closest to the prompt."""
    known = {candidate.expert.digest for candidate in candidates}
    reasons = {c.expert.digest: c.reason for c in choices if c.expert.digest not in known}
    if not reasons:
        return []
    found = index.measure(index.encoded(asked.seen).rows[0], index.positions(reasons))
    undecided = Decision(Found.nothing())
    measured = _candidates(asked, roster, index, undecided, [found], success_rate)
    return [candidate.accepted(reasons[candidate.expert.digest]) for candidate in measured]


def _decided(
    asked: _Asked,
    roster: Roster,
    index: RoutingIndex,
    success_rate: SuccessRate,
    timings: dict[str, float],
) -> tuple[Encoded, Decision]:
    start = time.perf_counter()
    encoded = index.encoded(asked.seen)
    timings["encode"] = _since(start)
    start = time.perf_counter()
    success = partial(_success, success_rate, asked.features.task)
    decision = decide(roster, index, asked.features, encoded, success)
    timings["decide"] = _since(start)
    return encoded, decision


def _success(rate: SuccessRate, task: str, expert: Installed) -> float | None:
    return rate(expert.digest, task)


def _candidates(
    asked: _Asked,
    roster: Roster,
    index: RoutingIndex,
    decision: Decision,
    closest: Sequence[Found],
    success_rate: SuccessRate,
) -> list[Candidate]:
    """Describe the experts that were found as candidates, the best first."""
    similar: dict[int, Similarity] = {}
    for found in closest:
        similar |= _similarities(index, found)
    candidates = []
    for at, similarity in similar.items():
        expert = roster.by_position.get(at)
        if expert is None:  # in the index, but not in the roster
            continue
        measured = measure(
            expert,
            asked.features,
            similarity,
            success=success_rate(expert.digest, asked.features.task),
            flags=roster.flags.get(expert.digest, ()),
        )
        candidates.append(_judged(measured, at, roster, decision))
    return sorted(candidates, key=lambda candidate: candidate.order)


def _similarities(index: RoutingIndex, found: Found) -> dict[int, Similarity]:
    meant = index.encoder.calibrate(found.cosines).tolist()
    told = zip(found.experts.tolist(), meant, found.texts.tolist(), strict=True)
    return {at: Similarity(cosine, text) for at, cosine, text in told}


def _judged(candidate: Candidate, at: int, roster: Roster, decision: Decision) -> Candidate:
    """Add the head's result for a candidate, and why it is refused, if it is."""
    bar = roster.bars.get(candidate.expert.digest)
    if bar:
        other_base = roster.other_bases.get(candidate.expert.digest, "")
        return replace(candidate.barred_because(bar), other_base=other_base)
    if why := decision.vetoes.get(at):
        return candidate.vetoed_because(why)
    if standing := decision.standings.get(at):
        candidate = replace(
            candidate,
            share=standing.share,
            support=standing.support,
            score=standing.score,
            leads=at == decision.leader,
        )
    low = too_low(candidate)
    return candidate.refused(low) if low else candidate


def _bar(expert: Installed, request: RouteRequest) -> str:
    """Say why an expert may not be used on any base; empty when it may."""
    return "excluded by the user" if is_excluded(expert, request.exclude) else untrusted(expert)


def _misfit(expert: Installed, request: RouteRequest, base: StoredBase, widths: Widths) -> str:
    allow = request.allow_base_mismatch
    return misfit(expert, base.identity, allow_mismatch=allow, widths=widths)


def _forced(request: RouteRequest, roster: Roster, base: StoredBase) -> list[Choice]:
    barred = {e.digest for e in roster.experts if _bar(e, request)} | roster.other_bases.keys()
    usable = [expert for expert in roster.experts if expert.digest not in barred]
    context = context_of(base, engine=request.engine)
    choices = choose_forced(request.force, roster.experts, usable, context=context)
    for choice in choices:
        if is_excluded(choice.expert, request.exclude):
            raise UsageError(
                f"{choice.expert.ref} is forced and excluded at once",
                hint="leave out the one or the other",
            )
        check_base(
            choice.expert.manifest, base.identity, allow_mismatch=request.allow_base_mismatch
        )
    if len(choices) > request.max_experts:
        raise UsageError(
            f"with what they require, {len(choices)} experts are forced; at most "
            f"{request.max_experts} are allowed",
            hint="raise --max-experts, which goes up to 10, or name fewer",
        )
    return choices


def plan_of(
    request: RouteRequest,
    choices: Sequence[Choice],
    scores: Mapping[Digest, float],
    features: Features,
    base: StoredBase,
) -> Plan:
    """Return the plan of some experts: its identity, and the settings that they recommend."""
    numerics = request_settings(request, base)
    manifests = [choice.expert.manifest for choice in choices]
    return Plan(
        identity=plan_identity(numerics, [(c.expert.digest, c.weight) for c in choices]),
        seed=secrets.randbelow(2**32) if request.seed is None else request.seed,
        base=base.name,
        experts=tuple(_planned(choice, scores[choice.expert.digest]) for choice in choices),
        params=resolve(
            request.wishes,
            manifests,
            prompt_task=features.task,
            base=read_base_sampling(base.path).given,
        ),
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


def _since(start: float) -> float:
    return (time.perf_counter() - start) * 1000
