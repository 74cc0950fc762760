"""A candidate: one installed expert as the router sees it for one prompt, with the reasons."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Self

from expertctl.digest import Digest
from expertctl.package.base_model import BaseIdentity
from expertctl.package.compatibility import NO_WIDTHS, Widths, describe_mismatch
from expertctl.reference import ANY, Reference
from expertctl.routing.expert_texts import described
from expertctl.routing.features import Features
from expertctl.routing.hint import holds
from expertctl.routing.index import Similarity
from expertctl.routing.score import (
    DEFAULT_SUCCESS,
    THRESHOLD,
    Order,
    mebibytes,
    order_key,
    two_decimals,
)
from expertctl.routing.words import contains, says_something
from expertctl.schema.hint import parse_hint
from expertctl.schema.manifest import Manifest
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.store.flags import Flag, flag_documents
from expertctl.store.preference import Precedence, precedence
from expertctl.store.ref import StoredExpert

_SHOWN_KEYWORDS = 3
SAID = ", says its manifest"


@dataclass(frozen=True, slots=True)
class Installed:
    """An expert that a prompt may be routed to."""

    stored: StoredExpert
    manifest: Manifest
    revoked: bool = False
    home: str | None = None
    """The registry that its namespace belongs to, where it came from another one."""
    yanked: str | None = None
    """Why it was yanked, as its registry said last; None when it was not."""
    pinned: Path | None = None
    """The lock file or list that names exactly this version; None when nothing does."""

    @property
    def precedence(self) -> Precedence:
        """The sort key by which one of several versions is meant: `store.preference`."""
        return precedence(
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
        """What its adapters take in memory."""
        paths = {adapter.path for adapter in self.manifest.adapters}
        return sum(file.size for file in self.stored.files if file.path in paths)

    def is_meant(self, target: Reference | Digest) -> bool:
        """Tell whether a reference or digest names this expert."""
        if isinstance(target, Digest):
            return target in {self.stored.content_digest, self.stored.package_digest}
        here = target.registry is None or target.registry == self.stored.registry
        same = target.package == self.stored.package
        digests = self.stored.package_digest, self.stored.content_digest
        pinned = self.pinned is not None and target.constraint == ANY and target.digest is None
        return here and same and (pinned or target.allows(self.stored.version, *digests))


@dataclass(frozen=True, slots=True)
class Candidate:
    """An expert, what speaks for it, and what was decided; a refusal is a sentence.

    An expert that was not among the closest has no ``cosine``; one that the head did not compare,
    or that must not answer, has neither ``share`` nor ``support``, and the score 0.
    """

    expert: Installed
    cosine: float | None
    text: str  # the text of the expert that is closest
    keywords: tuple[str, ...]  # those of its manifest that occur in the prompt
    hint: bool | None  # whether its hint holds; None: it has none
    success: float
    vram_mb: float
    score: float = 0.0
    share: float | None = None
    support: float | None = None
    flags: tuple[Flag, ...] = ()
    refusal: str = ""
    barred: bool = False  # refused whatever the prompt is
    vetoed: bool = False  # refused for another reason than its score
    reason: str = ""
    chosen: bool = False
    leads: bool = False  # the expert that others may join
    other_base: str = ""  # the base that it was made for, where it is barred for that

    @property
    def order(self) -> tuple[bool, bool, float, float, Order]:
        """Sort key: the best first; below the threshold the closest first; barred ones last."""
        key = order_key(
            score=self.score,
            flagged=bool(self.flags),
            success=self.success,
            priority=self.expert.manifest.routing.priority,
            vram_mb=self.vram_mb,
            name=self.expert.ref,
        )
        close = -2.0 if self.cosine is None else self.cosine
        compared = self.share is not None
        return (not self.leads, self.barred, -2.0 if compared else -close, self._distance, key)

    @property
    def _distance(self) -> float:
        """How far it is from being used; all that are close enough are equals."""
        evidence = (self.share or 0.0) + (self.support or 0.0)
        return math.exp(-evidence) if self.score < THRESHOLD else 0.0

    @property
    def told(self) -> str:
        """The reason, short enough to stand beside a column for each figure."""
        if self.chosen or self.vetoed:
            words = self.reason.removesuffix(f": {evidence(self)}")
            return words.removeprefix("refused: ").removeprefix("was ").removesuffix(SAID)
        if self.share is None:
            return "others are closer"
        return f"below {THRESHOLD:.2f}" if self.score < THRESHOLD else self.reason

    def refused(self, why: str) -> Self:
        """Return the candidate, refused for this prompt."""
        return replace(self, refusal=why, reason=why, chosen=False)

    def barred_because(self, why: str) -> Self:
        """Return the candidate, refused whatever the prompt is."""
        return replace(self.refused(why), barred=True, vetoed=True)

    def vetoed_because(self, why: str) -> Self:
        """Return the candidate, refused for this prompt however well it scores."""
        return replace(self.refused(why), vetoed=True)

    def accepted(self, why: str) -> Self:
        """Return the candidate, chosen."""
        return replace(self, refusal="", barred=False, vetoed=False, reason=why, chosen=True)

    def to_json(self) -> JsonObject:
        """Return the entry of ``candidates`` in ``route --json``."""
        keywords: list[JsonValue] = list(self.keywords)
        flags: list[JsonValue] = [dict(flag) for flag in flag_documents(self.flags)]
        return {
            "ref": self.expert.ref,
            "content_digest": str(self.expert.digest),
            "chosen": self.chosen,
            "score": round(self.score, 4),
            "reason": self.reason,
            "features": {
                "cosine": _rounded(self.cosine),
                "share": _rounded(self.share),
                "support": _rounded(self.support),
                "keywords": keywords,
                "hint": self.hint,
                "success": round(self.success, 4),
                "vram_mb": round(self.vram_mb, 3),
                "priority": self.expert.manifest.routing.priority,
            },
            "flags": flags,
        }


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 4) + 0.0  # + 0.0: there is no -0


def measure(
    expert: Installed,
    features: Features,
    similarity: Similarity | None,
    *,
    success: float | None,
    flags: tuple[Flag, ...] = (),
) -> Candidate:
    """Gather what is known of an expert for a prompt; nothing is decided yet."""
    hint = expert.manifest.routing.hint
    return Candidate(
        expert=expert,
        cosine=None if similarity is None else similarity.cosine,
        text="" if similarity is None else described(expert.manifest, similarity.text),
        keywords=_keywords(expert.manifest, features),
        hint=None if hint is None else holds(parse_hint(hint), features),
        success=DEFAULT_SUCCESS if success is None else success,
        vram_mb=mebibytes(expert.resident_bytes),
        flags=flags,
    )


def untrusted(expert: Installed) -> str:
    """Say why an expert may not be used without being named; empty when it may."""
    if expert.revoked:
        return "refused: the key that signed it was revoked"
    if expert.stored.signer is None:
        return "refused: unsigned experts are used only when they are named with --expert"
    return ""


def misfit(
    expert: Installed, base: BaseIdentity, *, allow_mismatch: bool, widths: Widths = NO_WIDTHS
) -> str:
    """Say why an expert does not fit the base; empty when it does or a misfit is allowed."""
    if allow_mismatch:
        return ""
    problem = describe_mismatch(expert.manifest.base, base, widths)
    return f"refused: {problem}" if problem else ""


def veto(manifest: Manifest, features: Features) -> str:
    """Say why a prompt is not for an expert, whatever it is about; empty when nothing forbids."""
    routing = manifest.routing
    unwanted = [word for word in routing.exclude_keywords if contains(features.words, word)]
    if unwanted:
        return f"not for prompts with {unwanted[0]!r}{SAID}"
    if routing.hint is not None and not holds(parse_hint(routing.hint), features):
        return f"not for this prompt, says its hint {routing.hint!r}"
    if features.script and routing.languages and not _speaks(routing.languages, features.script):
        return f"not for prompts in {features.script!r}{SAID}"
    return ""


def may_veto(manifest: Manifest) -> bool:
    """Tell whether an expert can refuse prompts for a reason other than their script."""
    return bool(manifest.routing.exclude_keywords or manifest.routing.hint)


def too_low(candidate: Candidate) -> str:
    """Say why the score of a candidate is not enough; empty when it is."""
    if candidate.share is None:
        return f"others are closer: {evidence(candidate)}"
    if candidate.score < THRESHOLD:
        return f"score {candidate.score:.2f} is below {THRESHOLD:.2f} ({evidence(candidate)})"
    return ""


def superseded(experts: Iterable[Installed]) -> dict[Digest, str]:
    """Return why other versions and prereleases are passed over, by content digest."""
    newest: dict[object, Installed] = {}
    reasons: dict[Digest, str] = {}
    for expert in sorted(experts, key=lambda e: e.precedence, reverse=True):
        if expert.stored.version.prerelease and expert.pinned is None:
            reasons[expert.digest] = "a prerelease is used only when it is named"
        elif (first := newest.setdefault(expert.stored.package, expert)) is not expert:
            reasons[expert.digest] = _passed_over(expert, first)
    return reasons


def _passed_over(expert: Installed, first: Installed) -> str:
    if expert.home is not None and first.home is None:
        return f"from {expert.stored.registry}; {first.ref} is from {expert.home}, its own registry"
    if first.pinned is not None:
        return f"{first.pinned} names {first.ref}"
    if expert.yanked is not None and first.yanked is None:
        return f"yanked; {first.ref} is used instead"
    return f"older than {first.ref}"


def evidence(candidate: Candidate) -> str:
    """Return what speaks for a candidate, in a few words."""
    if candidate.cosine is None:
        return "not among the closest"
    cosine = f"cosine {candidate.cosine:.2f} to {candidate.text}"
    return cosine if candidate.share is None else f"share {two_decimals(candidate.share)}, {cosine}"


def _keywords(manifest: Manifest, features: Features) -> tuple[str, ...]:
    words = manifest.routing.keywords
    found = (w for w in words if says_something(w) and contains(features.words, w))
    return tuple(islice(found, _SHOWN_KEYWORDS))


def _speaks(languages: Iterable[str], language: str) -> bool:
    return any(tag.split("-")[0] == language for tag in languages)
