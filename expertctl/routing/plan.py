"""The plan: which experts answer one prompt, in which order, with which weights and settings.

The identity of a plan (design decision 11) is the digest of everything that the numbers depend on
and of nothing else: never a name, a path or a sampling setting. It is the key of compiled weights
and of reusable KV blocks.

A saved plan is the document of ``route --json`` or ``run --json``, and untrusted: it is checked
against ``schemas/route.schema.json``, and its experts are looked up by digest before anything is
loaded. Besides the plan only ``threads`` is read: the last bits of the numbers depend on it.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import msgspec

from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.files import open_regular_file
from expertctl.reference import Digest
from expertctl.schema.strict_json import JsonObject, JsonValue, encode_canonical, load_object
from expertctl.schema.validation import convert_document, find_problems

NUMERIC_VERSION = 5
"""Incremented whenever the engine's numbers change, so that no earlier result is reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings; 0 disables ``top_k``, ``min_p`` and the additive penalties.

    ``repetition_penalty`` 1 disables it; it applies to the last generated tokens only.
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
        """Whether the most likely token is always chosen."""
        return self.temperature == 0.0

    def to_greedy(self) -> Self:
        """Return a greedy copy: temperature 0, all penalties neutral, the same limits."""
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
    """One expert of a plan and the reason why it was chosen."""

    ref: str
    content_digest: Digest
    package_digest: Digest
    kind: str
    """`Manifest.kind`: the kinds of its adapters in order, joined by ``+``."""
    score: float
    weight: float
    reason: str

    def to_json(self) -> JsonObject:
        """Return its entry of ``experts`` in a plan document."""
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
    """Experts in order on one base; without experts the base answers alone."""

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
    """Everything that the numbers depend on except the experts.

    ``rope`` is `expertctl.package.attention_config.RopeConfig` as JSON; ``dtype`` is that of the
    base or its quantisation; ``engine`` is `NUMERIC_VERSION` with whatever else selects one of our
    decoders, or the names and versions of other libraries.
    """

    arch: Digest
    weights: Digest | None
    tokenizer: Digest
    rope: JsonObject
    dtype: str
    adapter_dtype: str = "published"
    recompression: str | None = None
    engine: int | str = NUMERIC_VERSION


def compute_plan_identity(
    settings: NumericSettings, experts: Iterable[tuple[Digest, float]] = ()
) -> Digest:
    """Return the identity of a plan: ordered (content digest, weight) pairs and the settings."""
    ordered: list[JsonValue] = [[str(digest), weight] for digest, weight in experts]
    return Digest.compute(
        encode_canonical(
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


MAX_PLAN_BYTES = 16 << 20
_MAX_THREADS = 1 << 16
_SAVE_HINT = "save one with `expertctl route --json PROMPT > plan.json`"


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A plan read from a document, and the thread count if a run wrote the document."""

    plan: Plan
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class _ExpertDocument:
    ref: str
    content_digest: str
    package_digest: str
    kind: str
    score: float
    weight: float
    reason: str


@dataclass(frozen=True, slots=True)
class _PlanDocument:
    identity: str
    seed: int
    base: str
    experts: tuple[_ExpertDocument, ...]
    params: SamplingParams


def read_plan(path: Path) -> SavedPlan:
    """Read the plan in a file; raises as `parse_plan`, and NotFoundError for an unreadable file."""
    try:
        with open_regular_file(path) as stream:
            data = stream.read(MAX_PLAN_BYTES + 1)
    except NotFoundError as error:
        error.hint = _SAVE_HINT
        raise
    except OSError as error:
        message = f"plan {path}: {error.strerror or error}"
        raise NotFoundError(message, hint=_SAVE_HINT) from error
    return parse_plan(data, what=str(path))


def parse_plan(data: bytes, *, what: str = "plan") -> SavedPlan:
    """Read the plan in a ``route --json`` or ``run --json`` document.

    Raises:
        InvalidPackageError: with every problem of the document.
    """
    document = load_object(data, what=what, max_bytes=MAX_PLAN_BYTES)
    if "plan" not in document:
        raise InvalidPackageError(what, ["there is no 'plan' in it"], hint=_SAVE_HINT)
    read: JsonObject = {"plan": document["plan"]}
    problems = find_problems(read, "route")
    threads = document.get("threads")
    if threads is not None and not _is_thread_count(threads):
        problems = [*problems, "threads: not a number of threads"]
    if problems:
        raise InvalidPackageError(what, problems)
    try:
        plan = _build_plan(convert_document(read["plan"], _PlanDocument))
    except msgspec.ValidationError as error:  # 7.0 is an integer for JSON Schema, not for us
        raise InvalidPackageError(what, [str(error)]) from error
    doubled = _find_duplicates(plan)
    if doubled:
        raise InvalidPackageError(what, [f"{ref} is planned twice" for ref in doubled])
    return SavedPlan(plan, threads if isinstance(threads, int) else None)


def _is_thread_count(value: JsonValue) -> bool:
    """Tell whether a value is a valid thread count; ``true`` is not."""
    return type(value) is int and 1 <= value <= _MAX_THREADS


def _build_plan(document: _PlanDocument) -> Plan:
    return Plan(
        identity=Digest.parse(document.identity),
        seed=document.seed,
        base=document.base,
        experts=tuple(map(_build_planned_expert, document.experts)),
        params=document.params,
    )


def _build_planned_expert(expert: _ExpertDocument) -> PlannedExpert:
    return PlannedExpert(
        ref=expert.ref,
        content_digest=Digest.parse(expert.content_digest),
        package_digest=Digest.parse(expert.package_digest),
        kind=expert.kind,
        score=expert.score,
        weight=expert.weight,
        reason=expert.reason,
    )


def _find_duplicates(plan: Plan) -> list[str]:
    digests = [expert.content_digest for expert in plan.experts]
    return sorted({e.ref for e in plan.experts if digests.count(e.content_digest) > 1})
