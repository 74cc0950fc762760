"""The plan: which experts answer one prompt, in which order, with which weights and settings.

The identity of a plan (design decision 11) is the digest of everything that the numbers depend on
and of nothing else: never a name, a path or a sampling setting. It is the key of compiled weights
and of reusable KV blocks.

A saved plan is the document of ``route --json`` or ``run --json``, and untrusted: it is checked
against ``schemas/route.schema.json``, and its experts are looked up by digest before anything is
loaded. Besides the plan only ``threads`` is read: the last bits of the numbers depend on it. The
numeric settings of the base decide whether a saved plan still gives the same numbers.
"""

import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Self, get_args

import msgspec

from expertctl.digest import Digest
from expertctl.engine_config import (
    AdapterDtype,
    DeviceName,
    Dtype,
    EngineConfig,
    EngineName,
    MoeMiss,
)
from expertctl.errors import (
    ExpertError,
    IncompatibleError,
    InvalidPackageError,
    NotFoundError,
    format_install_command,
)
from expertctl.files import open_regular_file
from expertctl.package.base_model import read_base_config
from expertctl.package.model_config import ModelConfig, read_model_config
from expertctl.routing.base_dtype import choose_dtype
from expertctl.schema.strict_json import JsonObject, JsonValue, encode_canonical, load_object
from expertctl.schema.validation import convert_document, find_problems
from expertctl.store.base_record import StoredBase

NUMERIC_VERSION = 8
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


_COMPAT_PACKAGES = ("transformers", "peft")


def build_numeric_settings(config: EngineConfig, base: StoredBase) -> NumericSettings:
    """Return the numeric settings of a base under a configuration.

    Raises:
        IncompatibleError: when the engine does not support such a model.
        InvalidPackageError: when its configuration is malformed.
        NotFoundError: when the libraries of the engine are not installed.
    """
    _check_engine(base, config.engine)
    return NumericSettings(
        arch=base.identity.arch,
        weights=base.identity.weights,
        tokenizer=base.identity.tokenizer,
        rope={} if base.foreign else read_model_config(base.path).rope.to_json(),
        dtype=choose_dtype(base, config.dtype, engine=config.engine, device=config.device),
        adapter_dtype=config.adapter_dtype,
        engine=_describe_native_version(config)
        if config.engine == "native"
        else describe_compat_version(),
    )


def find_context_length(base: StoredBase, *, engine: EngineName) -> int:
    """Return the context length of a base in tokens, including the answer.

    Raises:
        IncompatibleError: when the engine does not support such a model.
        InvalidPackageError: when its configuration is malformed.
    """
    _check_engine(base, engine)
    return read_base_config(base.path).max_positions


def describe_compat_version() -> str:
    """Return the versions that ``--engine transformers`` uses: ``transformers 5.1, peft 0.19``.

    Raises:
        NotFoundError: when it is not installed.
    """
    try:
        return ", ".join(f"{name} {version(name)}" for name in _COMPAT_PACKAGES)
    except PackageNotFoundError as error:
        raise NotFoundError(
            f"--engine transformers needs {error.name}, which is not installed",
            hint=format_install_command("compat"),
        ) from error


def _describe_native_version(config: EngineConfig) -> int | str:
    """Return the version of our engine, with whatever else its numbers depend on.

    KV blocks computed under one skip cap cannot be reused under another.
    """
    besides = [
        *([config.device] if config.device != "cpu" else ()),
        *(["deterministic"] if config.deterministic else ()),
        *([f"skips up to {float(config.moe_skip_cap)} of a token"] * (config.moe_miss == "skip")),
    ]
    return ", ".join([str(NUMERIC_VERSION), *besides]) if besides else NUMERIC_VERSION


def _check_engine(base: StoredBase, engine: EngineName) -> None:
    if base.foreign and engine == "native":
        raise IncompatibleError(
            f"expertctl's own decoder does not run the base {base.name}",
            hint="`expertctl run --engine transformers` does, slowly and with one expert at most"
            + _suggest_adding_again(base),
        )


def _suggest_adding_again(base: StoredBase) -> str:
    """Return what to do about a base that was added before the decoder ran its architecture."""
    try:
        config = read_base_config(base.path)
    except (ExpertError, OSError):
        return ""
    if not isinstance(config, ModelConfig):
        return ""
    name = shlex.quote(base.name)
    return (
        f"; it was added by an older version: to run it with the own decoder, `expertctl base "
        f"remove {name}`, then `expertctl base add` it again"
    )


def check_identity(plan: Plan, identity: Digest, *, base: StoredBase, config: EngineConfig) -> None:
    """Check that a saved plan still gives the same numbers, that is, the same identity.

    Raises:
        IncompatibleError: when the identity differs; says why, as far as that is known.
    """
    if identity == plan.identity:
        return
    if plan.base != base.name:
        raise IncompatibleError(
            f"the plan was made for the base {plan.base}, not for {base.name}",
            hint=f"leave out --base, or name {plan.base}",
        )
    options = _find_matching_options(plan, base, config)
    if options:
        given = " ".join(options)
        raise IncompatibleError(
            f"the plan was made with {given}",
            hint=f"run it with {given}, or route the prompt again",
        )
    raise IncompatibleError(
        f"the plan was edited after it was saved, or the base {base.name} or the engine changed "
        f"since: it says {str(plan.identity)[:19]}…, here it would be {str(identity)[:19]}…",
        hint="route the prompt again",
    )


def _find_matching_options(plan: Plan, base: StoredBase, config: EngineConfig) -> list[str]:
    """Return the fewest options that reproduce a plan's identity; empty if none do."""
    experts = [(expert.content_digest, expert.weight) for expert in plan.experts]
    found = list[list[str]]()
    for other in _iter_variations(config):
        with suppress(ExpertError):  # for example an engine that cannot run this base
            if compute_plan_identity(build_numeric_settings(other, base), experts) == plan.identity:
                dtype = build_numeric_settings(config, base).dtype
                found.append(_list_differing_options(other, config, dtype=dtype))
    return min(found, key=len, default=[])


def _iter_variations(config: EngineConfig) -> Iterator[EngineConfig]:
    """Yield it with every combination of numeric options, but only its own skip cap."""
    for dtype, adapter_dtype, engine, deterministic, device, moe_miss in product(
        get_args(Dtype),
        get_args(AdapterDtype),
        get_args(EngineName),
        (False, True),
        get_args(DeviceName),
        get_args(MoeMiss),
    ):
        yield replace(
            config,
            dtype=dtype,
            adapter_dtype=adapter_dtype,
            engine=engine,
            deterministic=deterministic,
            device=device,
            moe_miss=moe_miss,
        )


def _list_differing_options(other: EngineConfig, config: EngineConfig, *, dtype: str) -> list[str]:
    """Return the options of ``other`` that differ from those of ``config``; ``dtype`` is its."""
    deterministic = "--deterministic" if other.deterministic else "--no-deterministic"
    return [
        *([f"--dtype {other.dtype}"] if other.dtype != dtype else []),
        *(
            f"--{name.replace('_', '-')} {getattr(other, name)}"
            for name in ("adapter_dtype", "engine", "device", "moe_miss")
            if getattr(other, name) != getattr(config, name)
        ),
        *([deterministic] if other.deterministic != config.deterministic else []),
    ]


def compare_experts(saved: PlannedExpert, current: PlannedExpert) -> list[str]:
    """Return warnings about an expert of a saved plan whose content is unchanged.

    Raises:
        IncompatibleError: when its name or kind does not match that content.
    """
    if (saved.ref, saved.kind) != (current.ref, current.kind):
        raise IncompatibleError(
            f"the plan says {saved.ref} ({saved.kind}), but this is {current.ref} "
            f"({current.kind}): it was edited",
            hint="route the prompt again",
        )
    if saved.package_digest == current.package_digest:
        return []
    return [
        f"{current.ref} was signed again after the plan was saved: the same content, but its "
        f"package is {current.package_digest} instead of {saved.package_digest}"
    ]
