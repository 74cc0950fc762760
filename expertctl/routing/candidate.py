"""`RoutingCandidate`: one installed expert as the router sees it for one prompt, with reasons.

A reason is a sentence for the user. Functions named ``explain_…`` return why something is refused,
or an empty string.

Most of what decides about an expert does not depend on the prompt: whether it is trusted, fits the
base, was excluded by the user or is an older version. `EligibleExperts` holds which installed
experts may answer on one base, for any number of prompts, by their position in the routing index.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np

from expertctl.digest import Digest
from expertctl.package.base_model import BaseIdentity
from expertctl.package.compatibility import NO_HIDDEN_SIZES, HiddenSizes, describe_mismatch
from expertctl.reference import ANY, Reference, Target
from expertctl.routing.encoder import describe_row
from expertctl.routing.features import (
    PromptFeatures,
    contains_phrase,
    evaluate_hint,
    has_content_word,
)
from expertctl.routing.index import RoutingIndex, Similarity
from expertctl.routing.prompt_normalisation import collect_expert_names
from expertctl.routing.request import RouteRequest, check_request
from expertctl.routing.score import (
    DEFAULT_SUCCESS_RATE,
    THRESHOLD,
    CandidateSortKey,
    build_sort_key,
    format_score,
    to_mebibytes,
)
from expertctl.routing.vector_table import Rows, SearchFilter, VectorTable
from expertctl.schema.manifest import Manifest, parse_hint
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.store.base_record import StoredBase
from expertctl.store.preference import CATCH_ALL, Flag, Precedence, flags_to_json, make_precedence
from expertctl.store.refs import StoredExpert

_MAX_SHOWN_KEYWORDS = 3
MANIFEST_SUFFIX = ", according to its manifest"


@dataclass(frozen=True, slots=True)
class InstalledExpert:
    """An installed expert with what decides whether and how it may be used."""

    stored: StoredExpert
    manifest: Manifest
    revoked: bool = False
    home: str | None = None
    """The registry that owns its namespace, if it was installed from another one."""
    yanked: str | None = None
    """The reason given by its registry when it was yanked; None when it was not."""
    pinned: Path | None = None
    """The lock file or list that pins exactly this version; None when nothing does."""

    @property
    def precedence(self) -> Precedence:
        """The sort key among several versions of a package: see `store.preference`."""
        return make_precedence(
            self.stored.version,
            pinned=self.pinned is not None,
            at_home=self.home is None,
            revoked=self.revoked,
            yanked=self.yanked is not None,
        )

    @property
    def ref(self) -> str:
        """``namespace/name@version``."""
        return self.stored.ref

    @property
    def digest(self) -> Digest:
        """The content digest."""
        return self.stored.content_digest

    @property
    def resident_bytes(self) -> int:
        """The size of its adapters in memory, in bytes."""
        paths = {adapter.path for adapter in self.manifest.adapters}
        return sum(file.size for file in self.stored.files if file.path in paths)

    def matches(self, target: Reference | Digest) -> bool:
        """Tell whether a reference or digest names this expert."""
        if isinstance(target, Digest):
            return target in {self.stored.content_digest, self.stored.package_digest}
        here = target.registry is None or target.registry == self.stored.registry
        same = target.package == self.stored.package
        digests = self.stored.package_digest, self.stored.content_digest
        pinned = self.pinned is not None and target.constraint == ANY and target.digest is None
        return here and same and (pinned or target.allows(self.stored.version, *digests))


@dataclass(frozen=True, slots=True)
class RoutingCandidate:
    """An expert, the evidence for it, and the decision.

    ``cosine`` is None for an expert that was not among the closest. ``probability`` and
    ``similarity`` are None and the score is 0 for one that the reranker did not compare or that is
    not eligible.
    """

    expert: InstalledExpert
    cosine: float | None
    text: str  # a description of the expert's closest text
    keywords: tuple[str, ...]  # keywords of its manifest that occur in the prompt
    hint: bool | None  # the value of its hint; None: it has none
    success: float
    vram_mb: float
    score: float = 0.0
    probability: float | None = None
    similarity: float | None = None
    flags: tuple[Flag, ...] = ()
    rejection: str = ""
    is_ineligible: bool = False  # refused for every prompt
    is_vetoed: bool = False  # refused for a reason other than its score
    reason: str = ""
    chosen: bool = False
    is_leader: bool = False  # the expert that others may join
    other_base: str = ""  # the base it was made for, if that is why it is ineligible

    @property
    def sort_key(self) -> tuple[bool, bool, float, float, CandidateSortKey]:
        """The sort key: best first; below the threshold closest first; ineligible ones last."""
        key = build_sort_key(
            score=self.score,
            flagged=bool(self.flags),
            success=self.success,
            priority=self.expert.manifest.routing.priority,
            vram_mb=self.vram_mb,
            name=self.expert.ref,
        )
        close = -2.0 if self.cosine is None else self.cosine
        compared = self.probability is not None
        return (
            not self.is_leader,
            self.is_ineligible,
            -2.0 if compared else -close,
            self._threshold_gap,
            key,
        )

    @property
    def _threshold_gap(self) -> float:
        """How far it is from being used; equal for all that reach the threshold."""
        evidence = (self.probability or 0.0) + (self.similarity or 0.0)
        return math.exp(-evidence) if self.score < THRESHOLD else 0.0

    @property
    def short_reason(self) -> str:
        """The reason, shortened for a table that shows each figure in its own column."""
        if self.chosen or self.is_vetoed:
            words = self.reason.removesuffix(f": {describe_evidence(self)}")
            return (
                words.removeprefix("refused: ").removeprefix("was ").removesuffix(MANIFEST_SUFFIX)
            )
        if self.probability is None:
            return "others are closer"
        return f"below {THRESHOLD:.2f}" if self.score < THRESHOLD else self.reason

    def mark_rejected(self, why: str) -> Self:
        """Return the candidate, rejected for this prompt."""
        return replace(self, rejection=why, reason=why, chosen=False)

    def mark_ineligible(self, why: str) -> Self:
        """Return the candidate, rejected for every prompt."""
        return replace(self.mark_rejected(why), is_ineligible=True, is_vetoed=True)

    def mark_vetoed(self, why: str) -> Self:
        """Return the candidate, rejected for this prompt regardless of its score."""
        return replace(self.mark_rejected(why), is_vetoed=True)

    def mark_accepted(self, why: str) -> Self:
        """Return the candidate, chosen."""
        return replace(
            self, rejection="", is_ineligible=False, is_vetoed=False, reason=why, chosen=True
        )

    def to_json(self) -> JsonObject:
        """Return its entry of ``candidates`` in ``route --json``."""
        keywords: list[JsonValue] = list(self.keywords)
        flags: list[JsonValue] = [dict(flag) for flag in flags_to_json(self.flags)]
        return {
            "ref": self.expert.ref,
            "content_digest": str(self.expert.digest),
            "chosen": self.chosen,
            "score": round(self.score, 4),
            "reason": self.reason,
            "features": {
                "cosine": _round_figure(self.cosine),
                "share": _round_figure(self.probability),
                "support": _round_figure(self.similarity),
                "keywords": keywords,
                "hint": self.hint,
                "success": round(self.success, 4),
                "vram_mb": round(self.vram_mb, 3),
                "priority": self.expert.manifest.routing.priority,
            },
            "flags": flags,
        }


def _round_figure(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 4) + 0.0  # + 0.0 turns -0.0 into 0.0


def build_candidate(
    expert: InstalledExpert,
    features: PromptFeatures,
    similarity: Similarity | None,
    *,
    success: float | None,
    flags: tuple[Flag, ...] = (),
) -> RoutingCandidate:
    """Collect what is known about an expert for a prompt; nothing is decided yet."""
    hint = expert.manifest.routing.hint
    return RoutingCandidate(
        expert=expert,
        cosine=None if similarity is None else similarity.cosine,
        text="" if similarity is None else describe_row(expert.manifest, similarity.text),
        keywords=_find_matching_keywords(expert.manifest, features),
        hint=None if hint is None else evaluate_hint(parse_hint(hint), features),
        success=DEFAULT_SUCCESS_RATE if success is None else success,
        vram_mb=to_mebibytes(expert.resident_bytes),
        flags=flags,
    )


def explain_untrusted(expert: InstalledExpert) -> str:
    """Return why an expert may not be used unless it is named; empty when it may."""
    if expert.revoked:
        return "refused: the key that signed it was revoked"
    if expert.stored.signer is None:
        return "refused: unsigned experts are used only when they are named with --expert"
    return ""


def explain_misfit(
    expert: InstalledExpert,
    base: BaseIdentity,
    *,
    allow_mismatch: bool,
    widths: HiddenSizes = NO_HIDDEN_SIZES,
) -> str:
    """Return why an expert does not fit the base; empty when it does or mismatches are allowed."""
    if allow_mismatch:
        return ""
    problem = describe_mismatch(expert.manifest.base, base, widths)
    return f"refused: {problem}" if problem else ""


def explain_veto(manifest: Manifest, features: PromptFeatures) -> str:
    """Return why an expert refuses a prompt, whatever its score; empty when it does not."""
    routing = manifest.routing
    unwanted = [word for word in routing.exclude_keywords if contains_phrase(features.words, word)]
    if unwanted:
        return f"not for prompts with {unwanted[0]!r}{MANIFEST_SUFFIX}"
    if routing.hint is not None and not evaluate_hint(parse_hint(routing.hint), features):
        return f"its hint {routing.hint!r} excludes this prompt"
    if (
        features.script
        and routing.languages
        and not _supports_language(routing.languages, features.script)
    ):
        return f"not for prompts in {features.script!r}{MANIFEST_SUFFIX}"
    return ""


def can_veto(manifest: Manifest) -> bool:
    """Tell whether an expert can refuse prompts for a reason other than their script."""
    return bool(manifest.routing.exclude_keywords or manifest.routing.hint)


def explain_low_score(candidate: RoutingCandidate) -> str:
    """Return why the score of a candidate is too low; empty when it is not."""
    if candidate.probability is None:
        return f"others are closer: {describe_evidence(candidate)}"
    if candidate.score < THRESHOLD:
        return (
            f"score {candidate.score:.2f} is below {THRESHOLD:.2f} ({describe_evidence(candidate)})"
        )
    return ""


def find_superseded(experts: Iterable[InstalledExpert]) -> dict[Digest, str]:
    """Return why prereleases and all but one version of a package are unused, by content digest."""
    newest: dict[object, InstalledExpert] = {}
    reasons: dict[Digest, str] = {}
    for expert in sorted(experts, key=lambda e: e.precedence, reverse=True):
        if expert.stored.version.prerelease and expert.pinned is None:
            reasons[expert.digest] = "a prerelease is used only when it is named"
        elif (first := newest.setdefault(expert.stored.package, expert)) is not expert:
            reasons[expert.digest] = _explain_superseded(expert, first)
    return reasons


def _explain_superseded(expert: InstalledExpert, first: InstalledExpert) -> str:
    if expert.home is not None and first.home is None:
        return f"from {expert.stored.registry}; {first.ref} is from {expert.home}, its own registry"
    if first.pinned is not None:
        return f"{first.pinned} names {first.ref}"
    if expert.yanked is not None and first.yanked is None:
        return f"yanked; {first.ref} is used instead"
    return f"older than {first.ref}"


def describe_evidence(candidate: RoutingCandidate) -> str:
    """Return a short description of the evidence for a candidate."""
    if candidate.cosine is None:
        return "not among the closest"
    cosine = f"cosine {candidate.cosine:.2f} to {candidate.text}"
    return (
        cosine
        if candidate.probability is None
        else f"share {format_score(candidate.probability)}, {cosine}"
    )


def _find_matching_keywords(manifest: Manifest, features: PromptFeatures) -> tuple[str, ...]:
    words = manifest.routing.keywords
    found = (w for w in words if has_content_word(w) and contains_phrase(features.words, w))
    return tuple(islice(found, _MAX_SHOWN_KEYWORDS))


def _supports_language(languages: Iterable[str], language: str) -> bool:
    return any(tag.split("-")[0] == language for tag in languages)


PairGains = Mapping[tuple[Digest, Digest], float]
"""Two experts in plan order → the measured gain of adding the second."""
FlagsByDigest = Mapping[Digest, tuple[Flag, ...]]
"""Content digest → the flags of a suspicious expert; most experts have none."""


@dataclass(frozen=True, eq=False)
class EligibleExperts:
    """The installed experts, and which of them may answer."""

    experts: tuple[InstalledExpert, ...]
    usable: tuple[InstalledExpert, ...]  # may be in a plan; some versions only if required
    ineligible_reasons: Mapping[Digest, str]
    other_bases: Mapping[Digest, str]  # the base of each expert that was made for another one
    flags: FlagsByDigest
    gains: PairGains
    by_position: Mapping[int, InstalledExpert]
    search_filter: SearchFilter
    rerank_table: VectorTable
    rerank_positions: Rows  # index position → position in ``rerank_table``, or -1

    @cached_property
    def names(self) -> frozenset[str]:
        """The names that prompts may use for the experts."""
        return collect_expert_names(str(expert.stored.package) for expert in self.experts)

    @cached_property
    def with_vetoes(self) -> frozenset[int]:
        """The positions of experts that can veto prompts for a reason other than their script."""
        return frozenset(at for at, e in self.by_position.items() if can_veto(e.manifest))

    @cached_property
    def with_vetoes_or_languages(self) -> frozenset[int]:
        """The positions of experts that can veto prompts for any reason."""
        speaking = (at for at, e in self.by_position.items() if e.manifest.routing.languages)
        return self.with_vetoes.union(speaking)

    @cached_property
    def flagged(self) -> frozenset[int]:
        """The positions of flagged experts."""
        return frozenset(at for at, e in self.by_position.items() if self.flags.get(e.digest))

    @cached_property
    def ineligible(self) -> Rows:
        """The positions of experts that may not answer."""
        positions = (
            at for at, e in self.by_position.items() if e.digest in self.ineligible_reasons
        )
        return np.array([at for at in positions if at >= 0], np.int64)

    @cached_property
    def composing(self) -> frozenset[int]:
        """The positions of experts that compose with others."""
        gaining = frozenset(digest for pair in self.gains for digest in pair)
        return frozenset(
            at
            for at, e in self.by_position.items()
            if e.manifest.composition.composes_with or e.digest in gaining
        )

    @cached_property
    def catch_alls(self) -> frozenset[int]:
        """The positions of experts flagged as catch-all."""
        return frozenset(at for at in self.flagged if self._is_catch_all(self.by_position[at]))

    def _is_catch_all(self, expert: InstalledExpert) -> bool:
        return any(flag.code == CATCH_ALL for flag in self.flags[expert.digest])


NO_FLAGS: FlagsByDigest = {}
NO_GAINS: PairGains = {}


def find_eligible_experts(
    request: RouteRequest,
    experts: Sequence[InstalledExpert],
    *,
    base: StoredBase,
    index: RoutingIndex,
    flags: FlagsByDigest = NO_FLAGS,
    gains: PairGains = NO_GAINS,
    widths: HiddenSizes = NO_HIDDEN_SIZES,
) -> EligibleExperts:
    """Index the experts, and return which of them may answer requests like this one on a base.

    ``widths`` are the hidden sizes of the known bases, which make a misfit easier to explain.

    Raises:
        UsageError: when the request itself is wrong; nothing is indexed then.
    """
    check_request(request)
    index.add({expert.digest: expert.manifest for expert in experts})
    allow = request.allow_base_mismatch
    reasons = {e.digest: why for e in experts if (why := explain_ineligible(e, request))}
    misfits = {
        e.digest: (e.manifest.base.name, why)
        for e in experts
        if e.digest not in reasons
        and (why := explain_misfit(e, base.identity, allow_mismatch=allow, widths=widths))
    }
    reasons |= {digest: why for digest, (_, why) in misfits.items()}
    usable = [expert for expert in experts if expert.digest not in reasons]
    older = find_superseded(usable)
    table, rerank_table = index.table, index.rerank_table
    positions = table.find_positions([expert.digest for expert in experts])
    rerank_positions = _find_rerank_positions(table, rerank_table, positions, experts)
    searched = [expert.digest for expert in usable if expert.digest not in older]
    return EligibleExperts(
        experts=tuple(experts),
        usable=tuple(usable),
        ineligible_reasons={**reasons, **older},
        other_bases={digest: name for digest, (name, _) in misfits.items()},
        flags=flags,
        gains=gains,
        by_position=dict(zip(positions.tolist(), experts, strict=True)),
        search_filter=_build_filter(table, searched, rerank_positions),
        rerank_table=rerank_table,
        rerank_positions=rerank_positions,
    )


def explain_ineligible(expert: InstalledExpert, request: RouteRequest) -> str:
    """Return why an expert may not be used on any base; empty when it may."""
    if is_excluded(expert, request.exclude):
        return "excluded by the user"
    return explain_untrusted(expert)


def _build_filter(table: VectorTable, digests: Sequence[Digest], deep_at: Rows) -> SearchFilter:
    """Return a filter that admits experts with vectors for both search and reranking.

    Another process may just have removed some of them.
    """
    mask = np.zeros(len(table) + 1, np.bool_)
    mask[table.find_positions(digests)] = True
    return SearchFilter(table, mask[:-1] & (deep_at[:-1] >= 0))


def _find_rerank_positions(
    table: VectorTable, deep: VectorTable, positions: Rows, experts: Sequence[InstalledExpert]
) -> Rows:
    """Return the rerank position of each index position, -1 where there is none."""
    places = np.full(len(table) + 1, -1, np.int64)  # the last element takes experts at position -1
    places[positions] = deep.find_positions([expert.digest for expert in experts])
    return places


def is_excluded(expert: InstalledExpert, exclude: Sequence[Target]) -> bool:
    """Tell whether the user excluded an expert."""
    return any(matches_target(target, expert) for target in exclude)


def matches_target(target: Target, expert: InstalledExpert) -> bool:
    """Tell whether a target matches an expert; a bare name matches prereleases as well."""
    if isinstance(target, Digest) or target.digest or target.constraint.bounds:
        return expert.matches(target)
    return target.package == expert.stored.package
