"""What bases and experts take in memory, before any of them is there."""

from collections.abc import Mapping
from typing import get_args

from expertctl.engine.adapter_load import adapter_bytes
from expertctl.engine.kernels.heads import PAGE
from expertctl.engine.loaded_base import Wish, backend_of
from expertctl.errors import ExpertError, IncompatibleError
from expertctl.package.model_config import ModelConfig, read_config
from expertctl.routing.numerics import dtype_of
from expertctl.routing.request import Dtype
from expertctl.store.base_record import StoredBase
from expertctl.store.ref import StoredExpert
from expertctl.store.store import Store

DTYPES: tuple[Dtype, ...] = get_args(Dtype)


def base_sizes(base: StoredBase) -> tuple[Mapping[Dtype, int], int | None]:
    """Return the weights of a base in each dtype it can be held in, and a token's keys and values.

    The latter are those of a run that is told no dtype. Both are missing for a base that only
    ``--engine transformers`` runs, or whose files are gone.
    """
    try:
        config = read_config(base.path)
        usual, _ = backend_of(config, Wish(dtype_of(base, None)))
    except (ExpertError, OSError):
        return {}, None
    weights = {dtype: size for dtype in DTYPES if (size := _weights(config, dtype)) is not None}
    return weights, usual.kv_bytes(PAGE) // PAGE


def expert_size(store: Store, expert: StoredExpert) -> int | None:
    """Return what the weights of an expert take; None where its files are damaged."""
    sizes = {file.path: file.size for file in expert.files}
    try:
        return adapter_bytes(store.manifest(expert), sizes)
    except (ExpertError, OSError, KeyError):
        return None


def _weights(config: ModelConfig, dtype: Dtype) -> int | None:
    try:
        backend, _ = backend_of(config, Wish(dtype))
    except IncompatibleError:
        return None
    return backend.weight_bytes
