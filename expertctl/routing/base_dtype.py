"""The data type in which a base is held when the user names none: by how it is stored."""

import math
from importlib.util import find_spec

from expertctl.engine_config import GGUF_BLOCKS, DeviceName, Dtype, EngineName
from expertctl.errors import ExpertError
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import ModelConfig, read_model_config
from expertctl.store.base_record import StoredBase

SMALL_BASE = 64 << 20
"""Below this size, a base generates many tokens before kernels are compiled for a new machine."""
_FLOAT_BYTES = 4
_KERNEL_ROWS = 16
"""Rows of a block of the kernels; heads and MLPs must fill them."""
PLAIN_STORAGES = frozenset(("F32", "F16", "BF16"))
"""What matrices that are not quantised are stored as."""


def choose_dtype(
    base: StoredBase,
    requested: Dtype | None,
    *,
    engine: EngineName = "native",
    device: DeviceName = "cpu",
) -> Dtype:
    """Return the dtype of the base weights in memory: as requested, else by how they are stored.

    Bases below `SMALL_BASE` are exact and fast in float32. On a processor the blocks of a GGUF file
    stay as they are, if kernels compute with any of them, and another quantised base is held in
    int8. Otherwise the default is bf16 for what is stored in it, or quantised; it would round
    weights stored in float16. Raises as `read_model_config`.
    """
    if requested is not None or engine == "transformers":
        return requested or "float32"
    config = read_model_config(base.path)
    if _FLOAT_BYTES * sum(map(math.prod, config.tensor_shapes().values())) < SMALL_BASE:
        return "float32"
    stored = set(list_storages(base))
    has_kernels = device == "cpu" and _may_have_kernels(config)
    if has_kernels and stored & GGUF_BLOCKS and config.experts is None:
        return "gguf"
    if not PLAIN_STORAGES.issuperset(stored):
        return "int8" if has_kernels else "bf16"
    return "bf16" if stored == {"BF16"} else "float32"


def _may_have_kernels(config: ModelConfig) -> bool:
    """Tell whether kernels of the processor run such a base, as far as that is known here."""
    fits = config.has_kernels and not config.list_uneven_sizes(_KERNEL_ROWS)
    return fits and find_spec("numba") is not None


def list_storages(base: StoredBase) -> tuple[str, ...]:
    """Return what the matrices of a base are stored as, sorted; empty if it cannot be read.

    Raises as `read_model_config`.
    """
    config = read_model_config(base.path)
    try:
        tensors = read_base_tensors(base.path, config).values()
    except ExpertError:
        return ()
    return tuple(sorted({tensor.storage for tensor in tensors if len(tensor.info.shape) == 2}))
