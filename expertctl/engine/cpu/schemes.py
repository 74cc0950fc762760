"""The scheme of the matrices of a base: by data type, or as the blocks of a GGUF file.

The matrices of a base in GGUF stay in their blocks if there are kernels for these, and their rows
consist of whole blocks. Everything else is quantised to int8, which takes more memory but loses
little: the activations are int8 in either case.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from expertctl.engine.kernels.gguf_blocks import BLOCK_COLUMNS
from expertctl.engine.kernels.packed_format import Scheme, find_fused_projections
from expertctl.engine_config import GGUF_BLOCKS, Dtype
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import EMBEDDING_TENSOR, HEAD_TENSOR, ModelConfig

_SCHEMES: dict[Dtype, Scheme] = {
    "float32": Scheme.FLOAT32,
    "bf16": Scheme.BFLOAT16,
    "int8": Scheme.INT8,
    "int4": Scheme.INT4,
    "gguf": Scheme.INT8,
}
FOUR_BIT_WEIGHTS = 500_000_000
"""Minimum weights of a base that can spare the fifth bit of each in int4."""
_BLOCKS = {name: Scheme[name] for name in GGUF_BLOCKS}


def choose_scheme(config: ModelConfig, dtype: Dtype) -> Scheme:
    """Return the scheme of the layers of a base: int4 is five bits in small bases.

    For ``gguf`` it is that of activations, and of matrices that cannot stay in their blocks.
    """
    if dtype == "int4" and _count_weights(config) < FOUR_BIT_WEIGHTS:
        return Scheme.INT5
    return _SCHEMES[dtype]


@lru_cache(maxsize=8)
def _count_weights(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in config.tensor_shapes().values())


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """The scheme of each matrix, by the name of its tensor, and what is held in int8."""

    schemes: Mapping[str, Scheme]
    requantised: tuple[str, ...]
    """Kinds that are stored, sorted."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user may want to know."""
        if not self.requantised:
            return ()
        kinds = " and ".join(self.requantised)
        return (f"some base weights, stored in blocks of {kinds}, are held in int8",)


def choose_block_schemes(config: ModelConfig, storages: Mapping[str, str]) -> BlockChoice:
    """Return the scheme of each matrix of a base whose tensors are stored as ``storages``.

    Raises:
        IncompatibleError: when there is no block that kernels read, or there are routed experts.
    """
    if config.experts is not None:
        raise IncompatibleError(
            "blocks of routed experts cannot be computed as they are",
            hint="use --dtype int8 or int4",
        )
    if GGUF_BLOCKS.isdisjoint(storages.values()):
        raise IncompatibleError(
            "the base has no blocks of a GGUF file that kernels read as they are",
            hint=f"those are {', '.join(sorted(_BLOCKS))}; use --dtype int8 or bf16",
        )
    schemes: dict[str, Scheme] = {}
    requantised: set[str] = set()
    for name in _iter_matrices(config):
        scheme = _choose_scheme(storages[name], columns=config.tensor_shapes()[name][1])
        schemes[name] = scheme
        if scheme is Scheme.INT8:
            requantised.add(storages[name])
    return BlockChoice(schemes, tuple(sorted(requantised)))


def _choose_scheme(kind: str, *, columns: int) -> Scheme:
    scheme = _BLOCKS.get(kind)
    return Scheme.INT8 if scheme is None or columns % BLOCK_COLUMNS[scheme] else scheme


def _iter_matrices(config: ModelConfig) -> Iterator[str]:
    """Yield the names of the tensors of all matrices."""
    yield EMBEDDING_TENSOR
    for projection in find_fused_projections(config.linear_shapes()):
        for module in projection.modules:
            if (name := f"{module}.weight") != HEAD_TENSOR or not config.tied:
                yield name
