"""The plan: which experts answer one prompt, in which order, with which weights and settings.

Its identity (design decision 11) is the digest of everything that the numbers depend on, and of
nothing else: never a name, a path or a sampling setting. It keys compiled weights and KV reuse.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Self

from expertctl.digest import Digest
from expertctl.schema.strict_json import JsonObject, JsonValue, canonical

NUMERIC_VERSION = 4
"""Raised whenever the engine's numbers change, so that nothing computed before is reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; 0 switches ``top_k``, ``min_p`` and the additive penalties off.

    ``repetition_penalty`` 1 is off; it looks at the last tokens of the answer only.
    """

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 2048
    stop: tuple[str, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    def greedy(self) -> Self:
        """Return the same limits with the likeliest token always taken, every penalty neutral."""
        return replace(
            self,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
        )

    def to_json(self) -> JsonObject:
        """Return the ``params`` object of a plan document."""
        return {**asdict(self), "stop": list(self.stop)}


@dataclass(frozen=True, slots=True)
class PlannedExpert:
    """One expert of a plan and why it is there."""

    ref: str
    content_digest: Digest
    package_digest: Digest
    kind: str
    """`Manifest.kind`: its adapters' kinds in order, joined by ``+``."""
    score: float
    weight: float
    reason: str

    def to_json(self) -> JsonObject:
        """Return the entry of ``experts`` in a plan document."""
        return {
            "ref": self.ref,
            "content_digest": str(self.content_digest),
            "package_digest": str(self.package_digest),
            "kind": self.kind,
            "score": round(self.score, 4),
            "weight": self.weight,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """Experts in order on one base; no experts means that the base answers alone."""

    identity: Digest
    seed: int
    base: str
    experts: tuple[PlannedExpert, ...]
    params: SamplingParams

    def to_json(self) -> JsonObject:
        """Return the ``plan`` object of ``route --json`` and ``run --json``."""
        experts: list[JsonValue] = [expert.to_json() for expert in self.experts]
        return {
            "identity": str(self.identity),
            "seed": self.seed,
            "base": self.base,
            "experts": experts,
            "params": self.params.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericSettings:
    """What the numbers depend on besides the experts.

    ``rope`` is `expertctl.package.rope_config.RopeConfig` as JSON; ``dtype`` is the base's, or its
    quantisation; ``engine`` is `NUMERIC_VERSION`, with what else decides which of our decoders
    runs, or the names and versions of other libraries.
    """

    arch: Digest
    weights: Digest | None
    tokenizer: Digest
    rope: JsonObject
    dtype: str
    adapter_dtype: str = "published"
    recompression: str | None = None
    engine: int | str = NUMERIC_VERSION


def plan_identity(
    settings: NumericSettings, experts: Iterable[tuple[Digest, float]] = ()
) -> Digest:
    """Return the identity of a plan: ordered (content digest, weight) under numeric settings."""
    ordered: list[JsonValue] = [[str(digest), weight] for digest, weight in experts]
    return Digest.of(
        canonical(
            {
                "arch": str(settings.arch),
                "weights": str(settings.weights) if settings.weights else None,
                "tokenizer": str(settings.tokenizer),
                "rope": settings.rope,
                "dtype": settings.dtype,
                "experts": ordered,
                "adapter_dtype": settings.adapter_dtype,
                "recompression": settings.recompression,
                "engine": settings.engine,
            }
        )
    )
