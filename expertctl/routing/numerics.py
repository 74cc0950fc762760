"""The numeric settings of a base, and whether a saved plan still gives the same numbers."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import get_args

from expertctl.engine_config import (
    AdapterDtype,
    DeviceName,
    Dtype,
    EngineConfig,
    EngineName,
    MoeMiss,
)
from expertctl.errors import ExpertError, IncompatibleError, NotFoundError
from expertctl.package.base_model import read_base_config
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import ModelConfig, read_model_config
from expertctl.reference import Digest
from expertctl.routing.plan import (
    NUMERIC_VERSION,
    NumericSettings,
    Plan,
    PlannedExpert,
    compute_plan_identity,
)
from expertctl.store.base_record import StoredBase

SMALL_BASE = 64 << 20
"""Below this size, a base generates many tokens before kernels are compiled for a new machine."""
_FLOAT_BYTES = 4
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
        dtype=choose_dtype(base, config.dtype, engine=config.engine),
        adapter_dtype=config.adapter_dtype,
        engine=_describe_native_version(config)
        if config.engine == "native"
        else describe_compat_version(),
    )


def choose_dtype(
    base: StoredBase, requested: Dtype | None, *, engine: EngineName = "native"
) -> Dtype:
    """Return the dtype of the base weights in memory: as requested, else float32 or bf16.

    The default is bf16 for a base of at least `SMALL_BASE` that is stored in it. Small ones are
    exact and fast in float32, and bfloat16 would round weights stored in float16. Raises as
    `read_model_config`.
    """
    if requested is not None or engine == "transformers":
        return requested or "float32"
    config = read_model_config(base.path)
    if _FLOAT_BYTES * sum(map(math.prod, config.tensor_shapes().values())) < SMALL_BASE:
        return "float32"
    return "bf16" if _read_matrix_dtypes(base, config) == {"BF16"} else "float32"


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
            hint="pip install 'expertctl[compat]'",
        ) from error


def _read_matrix_dtypes(base: StoredBase, config: ModelConfig) -> set[str]:
    """Return the dtypes of the matrices of a base; empty if it cannot be read."""
    try:
        tensors = read_base_tensors(base.path, config).values()
    except ExpertError:
        return set()
    return {tensor.info.dtype for tensor in tensors if len(tensor.info.shape) == 2}


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
            hint="`expertctl run --engine transformers` does, slowly and with one expert at most",
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
