"""A base in packed matrices: what the kernels read; queries, keys and values lie in one.

Its size follows from its configuration: room is made first, in one block, then every tensor of the
files is packed into its place there, so that no second base is in memory meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertctl.engine.base_weights import BaseWeights
from expertctl.engine.kernels.lanes import LANES, VECTOR_BYTES
from expertctl.engine.kernels.packed import (
    PackedMatrix,
    Shape,
    Take,
    empty_matrix,
    pack_into,
    unpack,
    widened,
)
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.memory import allocate
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import EMBEDDING, HEAD, ModelConfig

Numbers = np.ndarray[Any, Any]
Place = PackedMatrix | Numbers
"""Where a tensor lies: rows of a matrix that begin a block, or float32 of a vector."""
ATTENTION_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION_OUTPUT = ("self_attn.o_proj",)
MLP_INPUTS = ("mlp.gate_proj", "mlp.up_proj")
MLP_OUTPUT = ("mlp.down_proj",)
EVERY_SIZE = "try --engine transformers, which runs bases of every size, with one expert"
"""The way out for a run whose base fills no blocks."""
_NORM = "model.norm.weight"


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One layer; biases and norms are float32, or None."""

    input_norm: Numbers
    inputs: PackedMatrix
    input_bias: Numbers | None
    query_norm: Numbers | None
    key_norm: Numbers | None
    output: PackedMatrix
    output_bias: Numbers | None
    mlp_norm: Numbers
    gate_up: PackedMatrix
    gate_up_bias: Numbers | None
    down: PackedMatrix
    down_bias: Numbers | None
    window: int | None

    @property
    def parts(self) -> tuple[Place, ...]:
        """Its matrices and vectors."""
        parts = (getattr(self, field) for field in self.__slots__)
        return tuple(part for part in parts if isinstance(part, PackedMatrix | np.ndarray))

    def places(self, rows: Mapping[str, int]) -> dict[str, Place]:
        """Return where each of its tensors lies, by its name; ``rows`` are those of modules."""
        norms = {
            "input_layernorm": self.input_norm,
            "post_attention_layernorm": self.mlp_norm,
            "self_attn.q_norm": self.query_norm,
            "self_attn.k_norm": self.key_norm,
        }
        found: dict[str, Place] = {f"{n}.weight": v for n, v in norms.items() if v is not None}
        for modules, matrix, bias in (
            (ATTENTION_INPUTS, self.inputs, self.input_bias),
            (ATTENTION_OUTPUT, self.output, self.output_bias),
            (MLP_INPUTS, self.gate_up, self.gate_up_bias),
            (MLP_OUTPUT, self.down, self.down_bias),
        ):
            ends = list(accumulate(rows[module] for module in modules))
            for module, end in zip(modules, ends, strict=True):
                first = end - rows[module]
                found[f"{module}.weight"] = matrix.part(first, rows[module])
                if bias is not None:
                    found[f"{module}.bias"] = bias[first:end]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class PackedBase:
    """A base, packed; a tied head is the embedding.

    ``warnings`` say what its numbers lost, ``read_bytes`` how much was read of files for it.
    """

    config: ModelConfig
    scheme: Scheme
    embedding: PackedMatrix
    head: PackedMatrix
    norm: Numbers
    layers: tuple[PackedLayer, ...]
    warnings: tuple[str, ...] = ()
    read_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices and vectors, each once, and what fills them up to vectors."""
        heads = () if self.head is self.embedding else (self.head,)
        layers = (part for layer in self.layers for part in layer.parts)
        return sum(map(_part_bytes, (self.embedding, self.norm, *heads, *layers)))

    def places(self) -> dict[str, Place]:
        """Return where each tensor of the files lies, by its name."""
        found: dict[str, Place] = {EMBEDDING: self.embedding, _NORM: self.norm}
        if self.head is not self.embedding:
            found[HEAD] = self.head
        rows = _layer_rows(self.config)
        for number, layer in enumerate(self.layers):
            at = f"model.layers.{number}"
            found |= {f"{at}.{name}": place for name, place in layer.places(rows).items()}
        return found

    def matrix(self, module: str) -> Tensor:
        """Return the weights of a linear layer as they are used, as a new float32 [out, in]."""
        if module == HEAD.removesuffix(".weight"):
            return torch.from_numpy(unpack(self.head))
        _, _, number, name = module.split(".", 3)
        place = self.layers[int(number)].places(_layer_rows(self.config))[f"{name}.weight"]
        assert isinstance(place, PackedMatrix)
        return torch.from_numpy(unpack(place))


def packed_bytes(config: ModelConfig, scheme: Scheme) -> int:
    """Return the bytes of a base that nobody has packed yet.

    Raises:
        IncompatibleError: for heads or a middle of the MLP that do not fill blocks.
    """
    counting = _Counting()
    _cut(config, scheme, counting.take)
    return counting.size


def empty_base(config: ModelConfig, scheme: Scheme, memory: memoryview | None = None) -> PackedBase:
    """Return room for a base in one block of `packed_bytes`, to be filled by its places.

    Raises:
        IncompatibleError: for heads or a middle of the MLP that do not fill blocks.
    """
    size = packed_bytes(config, scheme)
    return _cut(config, scheme, _Cutting(allocate(size) if memory is None else memory).take)


def pack_base(config: ModelConfig, weights: BaseWeights, scheme: Scheme) -> PackedBase:
    """Pack a base that is in memory; see `packed_load` for one that is not.

    Raises:
        IncompatibleError: for heads or a middle of the MLP that do not fill blocks.
    """
    base = empty_base(config, scheme)
    for name, place in base.places().items():
        fill(place, _numbers(weights.tensors[name]))
    return base


def fill(place: Place, numbers: Numbers) -> None:
    """Put the numbers of a tensor where they belong."""
    if isinstance(place, PackedMatrix):
        pack_into(place, numbers)
    else:
        place[...] = widened(numbers)


def _check_sizes(config: ModelConfig) -> None:
    """Check that what lies in one matrix with others begins a block there."""
    sizes = {"head_dim": config.head_dim, "intermediate_size": config.intermediate_size}
    wrong = [f"{name} is {size}" for name, size in sizes.items() if size % LANES]
    if wrong:
        raise IncompatibleError(
            f"the kernels of this machine cannot run this base: {' and '.join(wrong)}, "
            f"not a multiple of {LANES}",
            hint=EVERY_SIZE,
        )


def _cut(config: ModelConfig, scheme: Scheme, take: Take) -> PackedBase:
    """Take the memory of each part, in the order in which they are read."""
    _check_sizes(config)
    rooms = _Rooms(config.tensor_shapes(), scheme, take)
    embedding = rooms.tensor(EMBEDDING)
    layers = tuple(rooms.layer(config, number) for number in range(config.layers))
    norm = rooms.vector(_NORM)
    head = embedding if config.tied else rooms.tensor(HEAD)
    return PackedBase(config, scheme, embedding, head, norm, layers)


class _Cutting:
    """Gives memory from a block, each piece at a multiple of 64 bytes."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._taken = memory, 0

    def take(self, shape: Shape, dtype: Any) -> Numbers:
        begin, size = self._taken, int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._taken += _filled(size)
        return np.frombuffer(self._memory[begin : begin + size], dtype).reshape(shape)


class _Counting:
    """Gives nothing, and counts what `_Cutting` would give."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, shape: Shape, dtype: Any) -> Numbers:
        self.size += _filled(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return np.empty(0, dtype)


def _part_bytes(part: Place) -> int:
    if isinstance(part, PackedMatrix):
        return _filled(part.data.nbytes) + _filled(part.scales.nbytes)
    return _filled(part.nbytes)


def _filled(size: int) -> int:
    """Return a number of bytes with those up to where the next vector may begin."""
    return -(-size // VECTOR_BYTES) * VECTOR_BYTES


class _Rooms:
    """Makes room for tensors whose shapes are known; what has no shape is not there."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme, take: Take) -> None:
        self._shapes, self._scheme, self._take = shapes, scheme, take

    def layer(self, config: ModelConfig, number: int) -> PackedLayer:
        at = f"model.layers.{number}"
        heads = f"{at}.self_attn"
        return PackedLayer(
            input_norm=self.vector(f"{at}.input_layernorm.weight"),
            inputs=self.matrix(at, ATTENTION_INPUTS),
            input_bias=self._bias(at, ATTENTION_INPUTS),
            query_norm=self.vector(f"{heads}.q_norm.weight") if config.qk_norm else None,
            key_norm=self.vector(f"{heads}.k_norm.weight") if config.qk_norm else None,
            output=self.matrix(at, ATTENTION_OUTPUT),
            output_bias=self._bias(at, ATTENTION_OUTPUT),
            mlp_norm=self.vector(f"{at}.post_attention_layernorm.weight"),
            gate_up=self.matrix(at, MLP_INPUTS),
            gate_up_bias=self._bias(at, MLP_INPUTS),
            down=self.matrix(at, MLP_OUTPUT),
            down_bias=self._bias(at, MLP_OUTPUT),
            window=config.windows[number],
        )

    def tensor(self, name: str) -> PackedMatrix:
        return empty_matrix(self._scheme, *self._shapes[name], take=self._take)

    def matrix(self, at: str, modules: Sequence[str]) -> PackedMatrix:
        """Make room for some matrices as one, their rows behind each other."""
        shapes = [self._shapes[f"{at}.{module}.weight"] for module in modules]
        rows = sum(shape[0] for shape in shapes)
        return empty_matrix(self._scheme, rows, shapes[0][1], take=self._take)

    def vector(self, *names: str) -> Numbers:
        return self._take((sum(self._shapes[name][0] for name in names),), np.float32)

    def _bias(self, at: str, modules: Sequence[str]) -> Numbers | None:
        names = [f"{at}.{module}.bias" for module in modules]
        return self.vector(*names) if names[0] in self._shapes else None


def _layer_rows(config: ModelConfig) -> dict[str, int]:
    """Return how many rows each module of a layer has, by its name in the layer."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, wide = config.hidden_size, config.intermediate_size
    rows = (queries, keys, keys, hidden, wide, wide, hidden)
    modules = (*ATTENTION_INPUTS, *ATTENTION_OUTPUT, *MLP_INPUTS, *MLP_OUTPUT)
    return dict(zip(modules, rows, strict=True))


def _numbers(tensor: Tensor) -> Numbers:
    """Return a tensor as it can be packed: bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
