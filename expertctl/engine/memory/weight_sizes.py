"""What bases and experts take in memory, before any of them is there."""

from collections.abc import Mapping
from typing import get_args

from expertctl.engine.adapters.load import estimate_adapter_bytes
from expertctl.engine.kernels.layer_operations import KV_PAGE_TOKENS
from expertctl.engine.model.load_plan import LoadConfig, choose_backend
from expertctl.errors import ExpertError, IncompatibleError
from expertctl.package.model_config import ModelConfig, read_model_config
from expertctl.routing.numerics import choose_dtype
from expertctl.routing.request import Dtype
from expertctl.store.base_record import StoredBase
from expertctl.store.refs import StoredExpert
from expertctl.store.store import Store

ALL_DTYPES: tuple[Dtype, ...] = get_args(Dtype)


def estimate_base_sizes(base: StoredBase) -> tuple[Mapping[Dtype, int], int | None]:
    """Return the weights of a base in each dtype it can be held in, and a token's keys and values.

    The latter are those of a run that is told no dtype. Both are missing for a base that only
    ``--engine transformers`` runs, or whose files are gone.
    """
    try:
        config = read_model_config(base.path)
        usual, _ = choose_backend(config, LoadConfig(choose_dtype(base, None)))
    except (ExpertError, OSError):
        return {}, None
    weights = {
        dtype: size for dtype in ALL_DTYPES if (size := _weight_bytes(config, dtype)) is not None
    }
    return weights, usual.kv_bytes(KV_PAGE_TOKENS) // KV_PAGE_TOKENS


def estimate_expert_size(store: Store, expert: StoredExpert) -> int | None:
    """Return what the weights of an expert take; None where its files are damaged."""
    sizes = {file.path: file.size for file in expert.files}
    try:
        return estimate_adapter_bytes(store.read_manifest(expert), sizes)
    except (ExpertError, OSError, KeyError):
        return None


def _weight_bytes(config: ModelConfig, dtype: Dtype) -> int | None:
    try:
        backend, _ = choose_backend(config, LoadConfig(dtype))
    except IncompatibleError:
        return None
    return backend.weight_bytes
