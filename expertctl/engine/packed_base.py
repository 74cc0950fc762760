"""A base in packed matrices: what the kernels read; queries, keys and values lie in one.

Its size follows from its configuration: room is made first, in one block, then every tensor of the
files is packed into its place there, so that no second base is in memory meanwhile. Routed experts
lie behind all else, one block each; where not all of them fit into memory, none is here: `moe` has
them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertctl.engine.base_weights import BaseWeights
from expertctl.engine.kernels.expert_block import ExpertShape
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
from expertctl.engine.packed_delta import (
    ATTENTION_INPUTS,
    MLP_INPUTS,
    SHARED_INPUTS,
    SHARED_OUTPUT,
)
from expertctl.engine.packed_layer import (
    ATTENTION_OUTPUT,
    CHOICE_BIAS,
    MLP_OUTPUT,
    ROUTER,
    SHARED_GATE,
    PackedLayer,
    PackedMlp,
    PackedRouting,
    Place,
)
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import EMBEDDING, HEAD, ModelConfig

Numbers = np.ndarray[Any, Any]
EVERY_SIZE = "try --engine transformers, which runs bases of every size, with one expert"
"""The way out for a run whose base does not fill blocks."""
_NORM = "model.norm.weight"
_LAYERS, EXPERTS = "model.layers.", "mlp.experts."


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
    experts: Mapping[tuple[int, int], Numbers] = field(default_factory=dict)
    """By layer and number, the block of each routed expert; all of them, or none is here."""
    warnings: tuple[str, ...] = ()
    read_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices and vectors, each once, and what fills them up to vectors."""
        heads = () if self.head is self.embedding else (self.head,)
        layers = (part for layer in self.layers for part in layer.parts)
        blocks = sum(block.nbytes for block in self.experts.values())
        return blocks + sum(map(_part_bytes, (self.embedding, self.norm, *heads, *layers)))

    def places(self) -> dict[str, Place]:
        """Return where each tensor of the files lies, by its name."""
        found: dict[str, Place] = {EMBEDDING: self.embedding, _NORM: self.norm}
        if self.head is not self.embedding:
            found[HEAD] = self.head
        for number in range(self.config.layers):
            found |= self._layer_places(number)
        for number, expert in self.experts:
            found |= self._expert_places(number, expert)
        return found

    def matrix(self, module: str) -> Tensor:
        """Return the weights of a linear layer as they are used, as a new float32 [out, in]."""
        if module == HEAD.removesuffix(".weight"):
            return torch.from_numpy(unpack(self.head))
        routed = routed_expert(module)
        if routed is None:
            places = self._layer_places(int(module.removeprefix(_LAYERS).partition(".")[0]))
        else:
            places = self._expert_places(*routed)
        place = places[f"{module}.weight"]
        assert isinstance(place, PackedMatrix)
        return torch.from_numpy(unpack(place))

    def _layer_places(self, number: int) -> dict[str, Place]:
        found = self.layers[number].places(_module_rows(self.config)[number])
        return {f"{_LAYERS}{number}.{name}": place for name, place in found.items()}

    def _expert_places(self, number: int, expert: int) -> dict[str, Place]:
        at = f"{_LAYERS}{number}.{EXPERTS}{expert}"
        shape = expert_shape(self.config, self.scheme)
        return expert_places(at, shape, self.experts[number, expert])


def packed_bytes(config: ModelConfig, scheme: Scheme, *, experts: bool = True) -> int:
    """Return the bytes that a packed base will have, with its routed experts or without.

    Raises:
        IncompatibleError: for heads or a middle of an MLP that do not fill blocks.
    """
    counting = _Counting()
    _cut(config, scheme, counting.take, experts=experts)
    return counting.size


def empty_base(
    config: ModelConfig,
    scheme: Scheme,
    memory: memoryview | None = None,
    *,
    experts: bool = True,
) -> PackedBase:
    """Return room for a base in one block of `packed_bytes`, to be filled by its places.

    Raises:
        IncompatibleError: for heads or a middle of an MLP that do not fill blocks.
    """
    if memory is None:
        memory = allocate(packed_bytes(config, scheme, experts=experts))
    return _cut(config, scheme, _Cutting(memory).take, experts=experts)


def expert_shape(config: ModelConfig, scheme: Scheme) -> ExpertShape:
    """Return what the block of a routed expert holds."""
    assert config.experts is not None, "a base with routed experts"
    return ExpertShape(scheme, config.hidden_size, config.experts.intermediate_size)


def routed_expert(module: str) -> tuple[int, int] | None:
    """Return the layer and the number of the routed expert that a linear layer is of, if it is."""
    number, _, name = module.removeprefix(_LAYERS).partition(".")
    if not name.startswith(EXPERTS):
        return None
    return int(number), int(name.removeprefix(EXPERTS).partition(".")[0])


def expert_places(at: str, shape: ExpertShape, block: Numbers) -> dict[str, Place]:
    """Return where the tensors of a routed expert lie in its block; ``at`` is its name."""
    gate_up, wide = shape.gate_up(block), shape.intermediate
    return {
        f"{at}.gate_proj.weight": gate_up.part(0, wide),
        f"{at}.up_proj.weight": gate_up.part(wide, wide),
        f"{at}.down_proj.weight": shape.down(block),
    }


def pack_base(config: ModelConfig, weights: BaseWeights, scheme: Scheme) -> PackedBase:
    """Pack a base that is in memory; see `packed_load` for one that is not.

    Raises:
        IncompatibleError: for heads or a middle of an MLP that do not fill blocks.
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
    """Check that each of several matrices that lie in one begins a block there."""
    sizes = {"head_dim": config.head_dim}
    routed = config.experts
    if routed is None or len(routed.layers) < config.layers:
        sizes["intermediate_size"] = config.intermediate_size
    if routed is not None:
        sizes["moe_intermediate_size"] = routed.intermediate_size
        sizes["shared_expert_intermediate_size"] = routed.shared_size
    wrong = [f"{name} is {size}" for name, size in sizes.items() if size % LANES]
    if wrong:
        raise IncompatibleError(
            f"the kernels of this machine cannot run this base: {' and '.join(wrong)}, "
            f"not a multiple of {LANES}",
            hint=EVERY_SIZE,
        )


def _cut(config: ModelConfig, scheme: Scheme, take: Take, *, experts: bool) -> PackedBase:
    """Take the memory of each part, in the order in which they are read."""
    _check_sizes(config)
    rooms = _Rooms(config.tensor_shapes(), scheme, take)
    embedding = rooms.tensor(EMBEDDING)
    layers = tuple(rooms.layer(config, number) for number in range(config.layers))
    norm = rooms.vector(_NORM)
    head = embedding if config.tied else rooms.tensor(HEAD)
    base = PackedBase(config, scheme, embedding, head, norm, layers)
    if config.experts is None or not experts:
        return base
    size = expert_shape(config, scheme).nbytes
    numbers = [(n, e) for n in config.experts.layers for e in range(config.experts.count)]
    return replace(base, experts={number: take(size, np.uint8) for number in numbers})


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
    """Return a number of bytes, rounded up to where the next vector may begin."""
    return -(-size // VECTOR_BYTES) * VECTOR_BYTES


class _Rooms:
    """Makes room for tensors by their shapes; what has no shape is not there."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme, take: Take) -> None:
        self._shapes, self._scheme, self._take = shapes, scheme, take

    def layer(self, config: ModelConfig, number: int) -> PackedLayer:
        at = f"model.layers.{number}"
        heads = f"{at}.self_attn"
        routed = config.experts is not None and number in config.experts.layers
        return PackedLayer(
            input_norm=self.vector(f"{at}.input_layernorm.weight"),
            inputs=self.matrix(at, ATTENTION_INPUTS),
            input_bias=self._bias(at, ATTENTION_INPUTS),
            query_norm=self._vector(f"{heads}.q_norm.weight"),
            key_norm=self._vector(f"{heads}.k_norm.weight"),
            output=self.matrix(at, ATTENTION_OUTPUT),
            output_bias=self._bias(at, ATTENTION_OUTPUT),
            mlp_norm=self.vector(f"{at}.post_attention_layernorm.weight"),
            mlp=self._routing(at) if routed else self._mlp(at, MLP_INPUTS, MLP_OUTPUT),
            window=config.windows[number],
        )

    def _mlp(self, at: str, inputs: Sequence[str], output: Sequence[str]) -> PackedMlp:
        return PackedMlp(
            gate_up=self.matrix(at, inputs),
            gate_up_bias=self._bias(at, inputs),
            down=self.matrix(at, output),
            down_bias=self._bias(at, output),
        )

    def _routing(self, at: str) -> PackedRouting:
        shared = f"{at}.{SHARED_OUTPUT}.weight" in self._shapes
        gated = f"{at}.{SHARED_GATE}" in self._shapes
        return PackedRouting(
            router=self.tensor(f"{at}.{ROUTER}", scheme=Scheme.FLOAT32),
            choice_bias=self._vector(f"{at}.{CHOICE_BIAS}"),
            shared=self._mlp(at, SHARED_INPUTS, (SHARED_OUTPUT,)) if shared else None,
            shared_gate=(
                self.tensor(f"{at}.{SHARED_GATE}", scheme=Scheme.FLOAT32) if gated else None
            ),
        )

    def tensor(self, name: str, *, scheme: Scheme | None = None) -> PackedMatrix:
        return empty_matrix(scheme or self._scheme, *self._shapes[name], take=self._take)

    def matrix(self, at: str, modules: Sequence[str]) -> PackedMatrix:
        """Make room for some matrices as one, their rows behind each other."""
        shapes = [self._shapes[f"{at}.{module}.weight"] for module in modules]
        rows = sum(shape[0] for shape in shapes)
        return empty_matrix(self._scheme, rows, shapes[0][1], take=self._take)

    def vector(self, *names: str) -> Numbers:
        return self._take((sum(self._shapes[name][0] for name in names),), np.float32)

    def _vector(self, name: str) -> Numbers | None:
        return self.vector(name) if name in self._shapes else None

    def _bias(self, at: str, modules: Sequence[str]) -> Numbers | None:
        names = [f"{at}.{module}.bias" for module in modules]
        return self.vector(*names) if names[0] in self._shapes else None


@lru_cache(maxsize=8)
def _module_rows(config: ModelConfig) -> list[dict[str, int]]:
    """Return how many rows each module of each layer has, by its name in the layer."""
    found: list[dict[str, int]] = [{} for _ in range(config.layers)]
    for name, shape in config.linear_shapes().items():
        if name.startswith(_LAYERS):
            number, _, module = name.removeprefix(_LAYERS).partition(".")
            found[int(number)][module] = shape[0]
    return found


def _numbers(tensor: Tensor) -> Numbers:
    """Return a tensor as it can be packed: bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
