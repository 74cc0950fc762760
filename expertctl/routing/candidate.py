"""A candidate: one installed expert as the router sees it for one prompt, and why it thinks so."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Self

from expertctl.digest import Digest
from expertctl.errors import BaseMismatchError
from expertctl.package.base_model import BaseIdentity
from expertctl.package.compatibility import check_base
from expertctl.reference import Reference
from expertctl.routing.features import Features
from expertctl.routing.hint import holds
from expertctl.routing.index import Similarity
from expertctl.routing.score import (
    DEFAULT_SUCCESS,
    SIMILAR,
    THRESHOLD,
    mebibytes,
    order_key,
    score,
)
from expertctl.routing.words import contains, says_something
from expertctl.schema.hint import parse_hint
from expertctl.schema.manifest import Manifest
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.store.ref import StoredExpert

SuccessRate = Callable[[Digest], float | None]
"""Content digest → share of runs that were judged good; ``None`` when nobody judged."""

_SHOWN_KEYWORDS = 3
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Installed:
    """An expert that a prompt may be routed to."""

    stored: StoredExpert
    manifest: Manifest
    revoked: bool = False

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
        return here and same and target.allows(self.stored.version, *digests)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An expert, what speaks for it, and what was decided; a refusal is a sentence."""

    expert: Installed
    cosine: float | None  # None: not among the closest that a large index looked at
    text: str  # the text of the expert that is closest
    heuristics: tuple[str, ...]
    success: float
    vram_mb: float
    score: float
    refusal: str = ""
    barred: bool = False  # refused whatever the prompt is
    reason: str = ""
    chosen: bool = False

    @property
    def order(self) -> tuple[float, float, str]:
        """The best candidate sorts first."""
        priority = self.expert.manifest.routing.priority
        return order_key(score=self.score, priority=priority, name=self.expert.ref)

    def refused(self, why: str) -> Self:
        """Return the candidate, refused for this prompt."""
        return replace(self, refusal=why, reason=why, chosen=False)

    def barred_because(self, why: str) -> Self:
        """Return the candidate, refused whatever the prompt is."""
        return replace(self.refused(why), barred=True)

    def accepted(self, why: str) -> Self:
        """Return the candidate, chosen."""
        return replace(self, refusal="", barred=False, reason=why, chosen=True)

    def to_json(self) -> JsonObject:
        """Return the entry of ``candidates`` in ``route --json``."""
        heuristics: list[JsonValue] = list(self.heuristics)
        return {
            "ref": self.expert.ref,
            "content_digest": str(self.expert.digest),
            "chosen": self.chosen,
            "score": round(self.score, 4),
            "reason": self.reason,
            "features": {
                "cosine": None if self.cosine is None else round(self.cosine, 4),
                "heuristics": heuristics,
                "success": round(self.success, 4),
                "vram_mb": round(self.vram_mb, 3),
                "priority": self.expert.manifest.routing.priority,
            },
        }


def measure(
    expert: Installed,
    features: Features,
    similarity: Similarity | None,
    *,
    success: float | None,
    budget: int,
) -> Candidate:
    """Put together what speaks for an expert; nothing is decided yet."""
    rate = DEFAULT_SUCCESS if success is None else success
    vram = mebibytes(expert.resident_bytes)
    cosine = None if similarity is None else similarity.cosine
    total = score(cosine=cosine or 0.0, success=rate, vram_mb=vram, budget_mb=mebibytes(budget))
    return Candidate(
        expert=expert,
        cosine=cosine,
        text=_text(expert.manifest, similarity),
        heuristics=tuple(_heuristics(expert.manifest, features)),
        success=rate,
        vram_mb=vram,
        score=total,
    )


def untrusted(expert: Installed) -> str:
    """Say why an expert may not be used without being named; empty when it may."""
    if expert.revoked:
        return "refused: the key that signed it was revoked"
    if expert.stored.signer is None:
        return "refused: unsigned experts are used only when they are named with --expert"
    return ""


def misfit(expert: Installed, base: BaseIdentity, *, allow_mismatch: bool) -> str:
    """Say why an expert does not fit the base; empty when it does or a misfit is allowed."""
    try:
        check_base(expert.manifest, base, allow_mismatch=allow_mismatch)
    except BaseMismatchError as error:
        return f"refused: {error.message.removeprefix(f'{expert.ref} ')}"
    return ""


def unfit_for_prompt(candidate: Candidate, features: Features) -> str:
    """Say why an expert is not for this prompt; empty when it is a candidate that scores enough."""
    routing = candidate.expert.manifest.routing
    unwanted = [word for word in routing.exclude_keywords if contains(features.words, word)]
    if unwanted:
        return f"not for prompts with {unwanted[0]!r}, says its manifest"
    shown = (
        "not among the closest" if candidate.cosine is None else f"cosine {candidate.cosine:.2f}"
    )
    if (candidate.cosine or 0.0) < SIMILAR and not candidate.heuristics:
        return f"not similar: {shown}, below {SIMILAR:.2f}, and no keyword or hint matched"
    if candidate.score < THRESHOLD:
        return f"score {candidate.score:.2f} is below {THRESHOLD:.2f} ({evidence(candidate)})"
    return ""


def superseded(experts: Iterable[Installed]) -> dict[Digest, str]:
    """Return why older versions and prereleases are passed over, by content digest."""
    newest: dict[object, Installed] = {}
    reasons: dict[Digest, str] = {}
    for expert in sorted(experts, key=lambda e: e.stored.version, reverse=True):
        if expert.stored.version.prerelease:
            reasons[expert.digest] = "a prerelease is used only when it is named"
        elif (first := newest.setdefault(expert.stored.package, expert)) is not expert:
            reasons[expert.digest] = f"older than {first.ref}"
    return reasons


def evidence(candidate: Candidate) -> str:
    """Return what speaks for a candidate, in a few words."""
    parts = (
        [] if candidate.cosine is None else [f"cosine {candidate.cosine:.2f} to {candidate.text}"]
    )
    return ", ".join([*parts, *candidate.heuristics]) or "nothing speaks for it"


def _text(manifest: Manifest, similarity: Similarity | None) -> str:
    if similarity is None or similarity.text == 0:
        return "its description"
    if similarity.text > len(manifest.routing.examples):
        return "the mean of its examples"
    example = manifest.routing.examples[similarity.text - 1]
    short = example if len(example) <= _SHOWN_CHARACTERS else f"{example[:_SHOWN_CHARACTERS]}…"
    return f"its example {short!r}"


def _heuristics(manifest: Manifest, features: Features) -> list[str]:
    """Return the keywords and the hint that match; none when the prompt is in another language."""
    routing = manifest.routing
    if (
        features.language
        and routing.languages
        and not _speaks(routing.languages, features.language)
    ):
        return []
    words = (w for w in routing.keywords if says_something(w) and contains(features.words, w))
    found = [f"keyword {word!r}" for word, _ in zip(words, range(_SHOWN_KEYWORDS), strict=False)]
    if routing.hint is not None and holds(parse_hint(routing.hint), features):
        found.append(f"hint {routing.hint!r}")
    return found


def _speaks(languages: Iterable[str], language: str) -> bool:
    return any(tag.split("-")[0] == language for tag in languages)
