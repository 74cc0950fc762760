"""A base model in packed matrices, and the place of each tensor in them.

Queries, keys and values are one matrix, and so are gate and up, unless a GGUF file has them in
different kinds of blocks. The size follows from the
configuration: memory is allocated first, in one block, then every tensor of the files is packed
into its place, so no second copy is in memory meanwhile. Routed experts follow everything else, one
block each; if not all of them fit into memory, none is here and `moe` owns them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any

import numpy as np

from expertctl.engine.arrays import AnyArray, widen
from expertctl.engine.kernels.packed_format import (
    ATTENTION_INPUTS,
    LANES,
    MLP_INPUTS,
    SHARED_INPUTS,
    SHARED_OUTPUT,
    Scheme,
)
from expertctl.engine.kernels.packed_matrix import (
    AllocateArray,
    ArrayShape,
    BlockAllocator,
    ExpertShape,
    MatrixStack,
    PackedMatrix,
    align_to_vector,
    allocate_matrix,
    pack_rows,
    unpack_matrix,
)
from expertctl.engine.memory.host import allocate
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import (
    EMBEDDING_TENSOR,
    HEAD_BIAS_TENSOR,
    HEAD_TENSOR,
    POSITIONS_TENSOR,
    ModelConfig,
)

TensorPlace = PackedMatrix | AnyArray
"""The memory of a tensor: rows of a matrix that begin a block, or a float32 vector."""
ATTENTION_OUTPUT = ("self_attn.o_proj",)
MLP_OUTPUT = ("mlp.down_proj",)
ROUTER, SELECTION_BIAS = "mlp.gate.weight", "mlp.gate.e_score_correction_bias"
SHARED_GATE = "mlp.shared_expert_gate.weight"


@dataclass(frozen=True, slots=True, eq=False)
class PackedMlp:
    """An MLP that every token passes; biases are float32, or None.

    Without a gate, ``gate_up`` has the rows of up alone.
    """

    gate_up: MatrixStack
    gate_up_bias: AnyArray | None
    down: PackedMatrix
    down_bias: AnyArray | None

    @property
    def arrays(self) -> tuple[TensorPlace | None, ...]:
        """Its matrices and vectors."""
        return *self.gate_up.parts, self.gate_up_bias, self.down, self.down_bias


@dataclass(frozen=True, slots=True, eq=False)
class PackedRouting:
    """The router of a layer, and the expert that all tokens share, if there is one.

    ``router`` and ``shared_gate`` are float32 in every base, because the selection depends on their
    last bits.
    """

    router: PackedMatrix
    selection_bias: AnyArray | None
    shared: PackedMlp | None
    shared_gate: PackedMatrix | None

    @property
    def arrays(self) -> tuple[TensorPlace | None, ...]:
        """Its matrices and vectors."""
        shared = () if self.shared is None else self.shared.arrays
        return self.router, self.selection_bias, self.shared_gate, *shared


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One layer; biases and norms are float32, or None."""

    input_norm: AnyArray | None
    inputs: MatrixStack
    input_bias: AnyArray | None
    query_norm: AnyArray | None
    key_norm: AnyArray | None
    output: PackedMatrix
    output_bias: AnyArray | None
    mlp_norm: AnyArray | None
    mlp: PackedMlp | PackedRouting
    window: int | None
    input_norm_bias: AnyArray | None = None
    query_norm_bias: AnyArray | None = None
    key_norm_bias: AnyArray | None = None
    output_norm: AnyArray | None = None
    """Of what attention adds."""
    mlp_norm_bias: AnyArray | None = None
    mlp_output_norm: AnyArray | None = None

    @property
    def arrays(self) -> tuple[TensorPlace, ...]:
        """Its matrices and vectors, without those of routed experts."""
        apart = ("inputs", "mlp")
        own = (getattr(self, each.name) for each in fields(self) if each.name not in apart)
        parts = (*self.inputs.parts, *own, *self.mlp.arrays)
        return tuple(part for part in parts if isinstance(part, PackedMatrix | np.ndarray))

    def tensor_places(
        self, rows: Mapping[str, int], *, own_norms: int = 0
    ) -> dict[str, TensorPlace]:
        """Return the place of each of its tensors by name; ``rows`` gives the rows of modules.

        ``own_norms`` is the size of heads if each has its own norm.
        """
        vectors = {
            "input_layernorm.weight": self.input_norm,
            "input_layernorm.bias": self.input_norm_bias,
            "post_attention_layernorm.weight": self.mlp_norm,
            "post_attention_layernorm.bias": self.mlp_norm_bias,
            "attention_output_layernorm.weight": self.output_norm,
            "mlp_output_layernorm.weight": self.mlp_output_norm,
            **_head_norm_places("q_norm", self.query_norm, self.query_norm_bias, own_norms),
            **_head_norm_places("k_norm", self.key_norm, self.key_norm_bias, own_norms),
        }
        found: dict[str, TensorPlace] = {n: v for n, v in vectors.items() if v is not None}
        found |= _split_modules(ATTENTION_INPUTS, self.inputs, self.input_bias, rows)
        found |= _split_modules(ATTENTION_OUTPUT, self.output, self.output_bias, rows)
        if isinstance(self.mlp, PackedMlp):
            return found | _mlp_places(MLP_INPUTS, MLP_OUTPUT, self.mlp, rows)
        return found | _routing_places(self.mlp, rows)


def _head_norm_places(
    name: str, weight: AnyArray | None, bias: AnyArray | None, size: int
) -> dict[str, AnyArray | None]:
    """Return the places of the norm of queries or keys, or of those of heads of a size."""
    if weight is None or not size:
        return {f"self_attn.{name}.weight": weight, f"self_attn.{name}.bias": bias}
    heads = enumerate(weight.reshape(-1, size))
    return {f"self_attn.{name}.norms.{number}.weight": part for number, part in heads}


def _split_modules(
    modules: Sequence[str],
    matrix: PackedMatrix | MatrixStack,
    bias: AnyArray | None,
    rows: Mapping[str, int],
) -> dict[str, TensorPlace]:
    """Return the places of modules, those that there are, that are consecutive in one matrix."""
    found: dict[str, TensorPlace] = {}
    there = [module for module in modules if module in rows]
    ends = list(accumulate(rows[module] for module in there))
    for module, end in zip(there, ends, strict=True):
        first = end - rows[module]
        found[f"{module}.weight"] = matrix.row_slice(first, rows[module])
        if bias is not None:
            found[f"{module}.bias"] = bias[first:end]
    return found


def _mlp_places(
    inputs: Sequence[str], output: Sequence[str], mlp: PackedMlp, rows: Mapping[str, int]
) -> dict[str, TensorPlace]:
    found = _split_modules(inputs, mlp.gate_up, mlp.gate_up_bias, rows)
    return found | _split_modules(output, mlp.down, mlp.down_bias, rows)


def _routing_places(mlp: PackedRouting, rows: Mapping[str, int]) -> dict[str, TensorPlace]:
    found: dict[str, TensorPlace] = {ROUTER: mlp.router}
    if mlp.selection_bias is not None:
        found[SELECTION_BIAS] = mlp.selection_bias
    if mlp.shared_gate is not None:
        found[SHARED_GATE] = mlp.shared_gate
    if mlp.shared is not None:
        found |= _mlp_places(SHARED_INPUTS, (SHARED_OUTPUT,), mlp.shared, rows)
    return found


TRY_TRANSFORMERS = "try --engine transformers, which supports any size, but only one expert"
"""Hint for a base whose sizes do not fill blocks."""
_FINAL_NORM, _FINAL_NORM_BIAS = "model.norm.weight", "model.norm.bias"
_LAYERS, EXPERTS = "model.layers.", "mlp.experts."


@dataclass(frozen=True, slots=True, eq=False)
class PackedBase:
    """A packed base; a tied head is the embedding.

    ``scheme`` is that of the layers; with integers there, embedding and head are int8.
    ``warnings`` describe lost precision, ``read_bytes`` counts the bytes of files read for it.
    """

    config: ModelConfig
    scheme: Scheme
    embedding: PackedMatrix
    head: PackedMatrix
    norm: AnyArray
    layers: tuple[PackedLayer, ...]
    experts: Mapping[tuple[int, int], AnyArray] = field(default_factory=dict)
    """The block of each routed expert by layer and number; all of them, or none."""
    warnings: tuple[str, ...] = ()
    read_bytes: int = 0
    positions: PackedMatrix | None = None
    """The embeddings of positions."""
    norm_bias: AnyArray | None = None
    head_bias: AnyArray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices and vectors, each once, including alignment."""
        others = (self.positions, self.norm_bias, self.head_bias)
        heads = [part for part in others if part is not None]
        if self.head is not self.embedding:
            heads.append(self.head)
        layers = (part for layer in self.layers for part in layer.arrays)
        blocks = sum(block.nbytes for block in self.experts.values())
        return blocks + sum(map(_array_bytes, (self.embedding, self.norm, *heads, *layers)))

    def tensor_places(self) -> dict[str, TensorPlace]:
        """Return the place of each tensor of the files, by name."""
        found: dict[str, TensorPlace] = {EMBEDDING_TENSOR: self.embedding, _FINAL_NORM: self.norm}
        if self.head is not self.embedding:
            found[HEAD_TENSOR] = self.head
        others = {
            POSITIONS_TENSOR: self.positions,
            _FINAL_NORM_BIAS: self.norm_bias,
            HEAD_BIAS_TENSOR: self.head_bias,
        }
        found |= {name: place for name, place in others.items() if place is not None}
        for number in range(self.config.layers):
            found |= self._layer_tensor_places(number)
        for number, expert in self.experts:
            found |= self._expert_tensor_places(number, expert)
        return found

    def unpack_weights(self, module: str) -> AnyArray:
        """Return the effective weights of a linear layer, as a new float32 [out, in]."""
        if module == HEAD_TENSOR.removesuffix(".weight"):
            return unpack_matrix(self.head)
        routed = parse_routed_expert(module)
        if routed is None:
            places = self._layer_tensor_places(int(module.removeprefix(_LAYERS).partition(".")[0]))
        else:
            places = self._expert_tensor_places(*routed)
        place = places[f"{module}.weight"]
        assert isinstance(place, PackedMatrix)
        return unpack_matrix(place)

    def _layer_tensor_places(self, number: int) -> dict[str, TensorPlace]:
        own = self.config.head_dim if self.config.block.own_head_norms else 0
        rows = _module_rows(self.config)[number]
        found = self.layers[number].tensor_places(rows, own_norms=own)
        return {f"{_LAYERS}{number}.{name}": place for name, place in found.items()}

    def _expert_tensor_places(self, number: int, expert: int) -> dict[str, TensorPlace]:
        at = f"{_LAYERS}{number}.{EXPERTS}{expert}"
        shape = make_expert_shape(self.config, self.scheme)
        return expert_tensor_places(at, shape, self.experts[number, expert])


Schemes = Mapping[str, Scheme]
"""The scheme of tensors that do not have that of the base, by name."""
_NO_SCHEMES: Schemes = {}


def packed_base_bytes(
    config: ModelConfig, scheme: Scheme, *, schemes: Schemes = _NO_SCHEMES, experts: bool = True
) -> int:
    """Return the bytes of a packed base, with or without its routed experts.

    Raises:
        IncompatibleError: for head or MLP sizes that do not fill blocks.
    """
    counting = _SizeCounter()
    _allocate_parts(config, scheme, schemes, counting.allocate, experts=experts)
    return counting.size


def allocate_base(
    config: ModelConfig,
    scheme: Scheme,
    memory: memoryview | None = None,
    *,
    schemes: Schemes = _NO_SCHEMES,
    experts: bool = True,
) -> PackedBase:
    """Return an empty base in one block of `packed_base_bytes`, to be filled through its places.

    Raises:
        IncompatibleError: for head or MLP sizes that do not fill blocks.
    """
    if memory is None:
        memory = allocate(packed_base_bytes(config, scheme, schemes=schemes, experts=experts))
    take = BlockAllocator(memory).allocate
    return _allocate_parts(config, scheme, schemes, take, experts=experts)


def make_expert_shape(config: ModelConfig, scheme: Scheme) -> ExpertShape:
    """Return the shape of the block of a routed expert."""
    assert config.experts is not None, "a base with routed experts"
    return ExpertShape(scheme, config.hidden_size, config.experts.intermediate_size)


def parse_routed_expert(module: str) -> tuple[int, int] | None:
    """Return the layer and the number of the routed expert that a module belongs to, or None."""
    number, _, name = module.removeprefix(_LAYERS).partition(".")
    if not name.startswith(EXPERTS):
        return None
    return int(number), int(name.removeprefix(EXPERTS).partition(".")[0])


def expert_tensor_places(at: str, shape: ExpertShape, block: AnyArray) -> dict[str, TensorPlace]:
    """Return the places of a routed expert's tensors in its block; ``at`` is its name."""
    gate_up, wide = shape.view_gate_up(block), shape.intermediate
    return {
        f"{at}.gate_proj.weight": gate_up.row_slice(0, wide),
        f"{at}.up_proj.weight": gate_up.row_slice(wide, wide),
        f"{at}.down_proj.weight": shape.view_down(block),
    }


def write_tensor(target: TensorPlace, numbers: AnyArray) -> bool:
    """Write the numbers of a tensor to its place; return whether all can be stored there."""
    if isinstance(target, PackedMatrix):
        return pack_rows(target, numbers)
    target[...] = widen(numbers)
    return True


def _check_sizes(config: ModelConfig) -> None:
    """Check that each of several matrices stored in one begins a block there."""
    wrong = config.list_uneven_sizes(LANES)
    if wrong:
        raise IncompatibleError(
            f"the CPU kernels cannot run this base: {' and '.join(wrong)}, "
            f"not a multiple of {LANES}",
            hint=TRY_TRANSFORMERS,
        )


def _allocate_parts(
    config: ModelConfig, scheme: Scheme, schemes: Schemes, take: AllocateArray, *, experts: bool
) -> PackedBase:
    """Allocate each part, in the order in which they are read."""
    _check_sizes(config)
    rooms = _LayerAllocator(config.tensor_shapes(), scheme, schemes, take)
    embedding = rooms.allocate_tensor(EMBEDDING_TENSOR)
    learned = config.block.learned_positions
    positions = rooms.allocate_tensor(POSITIONS_TENSOR) if learned else None
    layers = tuple(rooms.allocate_layer(config, number) for number in range(config.layers))
    norm = rooms.allocate_vector(_FINAL_NORM)
    norm_bias = rooms.allocate_optional_vector(_FINAL_NORM_BIAS)
    head = embedding if config.tied else rooms.allocate_tensor(HEAD_TENSOR)
    head_bias = rooms.allocate_optional_vector(HEAD_BIAS_TENSOR)
    base = PackedBase(
        config, scheme, embedding, head, norm, layers,
        positions=positions, norm_bias=norm_bias, head_bias=head_bias,
    )  # fmt: skip
    if config.experts is None or not experts:
        return base
    size = make_expert_shape(config, scheme).nbytes
    numbers = [(n, e) for n in config.experts.layers for e in range(config.experts.count)]
    return replace(base, experts={number: take(size, np.uint8) for number in numbers})


class _SizeCounter:
    """Allocates nothing, but counts what `BlockAllocator` would allocate."""

    def __init__(self) -> None:
        self.size = 0

    def allocate(self, shape: ArrayShape, dtype: Any) -> AnyArray:
        self.size += align_to_vector(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return np.empty(0, dtype)


def _array_bytes(part: TensorPlace) -> int:
    if isinstance(part, PackedMatrix):
        return align_to_vector(part.data.nbytes) + align_to_vector(part.scales.nbytes)
    return align_to_vector(part.nbytes)


class _LayerAllocator:
    """Allocates tensors by their shapes; a tensor without a shape does not exist."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        scheme: Scheme,
        schemes: Schemes,
        take: AllocateArray,
    ) -> None:
        self._shapes, self._scheme, self._take = shapes, scheme, take
        self._schemes = schemes

    def allocate_layer(self, config: ModelConfig, number: int) -> PackedLayer:
        at, vector = f"model.layers.{number}", self.allocate_optional_vector
        heads, routed = f"{at}.self_attn", config.is_routed(number)
        return PackedLayer(
            input_norm=vector(f"{at}.input_layernorm.weight"),
            input_norm_bias=vector(f"{at}.input_layernorm.bias"),
            inputs=self._allocate_stack(at, ATTENTION_INPUTS),
            input_bias=self._allocate_bias(at, ATTENTION_INPUTS),
            query_norm=self._allocate_head_norm(f"{heads}.q_norm", config.heads),
            query_norm_bias=vector(f"{heads}.q_norm.bias"),
            key_norm=self._allocate_head_norm(f"{heads}.k_norm", config.kv_heads),
            key_norm_bias=vector(f"{heads}.k_norm.bias"),
            output=self._allocate_layers_tensor(at, ATTENTION_OUTPUT),
            output_bias=self._allocate_bias(at, ATTENTION_OUTPUT),
            output_norm=vector(f"{at}.attention_output_layernorm.weight"),
            mlp_norm=vector(f"{at}.post_attention_layernorm.weight"),
            mlp_norm_bias=vector(f"{at}.post_attention_layernorm.bias"),
            mlp=self._allocate_routing(at) if routed else self._allocate_mlp(at),
            mlp_output_norm=vector(f"{at}.mlp_output_layernorm.weight"),
            window=config.windows[number],
        )

    def _allocate_head_norm(self, name: str, heads: int) -> AnyArray | None:
        """Allocate the norm of queries or keys; those of single heads follow each other."""
        own = [f"{name}.norms.{head}.weight" for head in range(heads)]
        if own[0] in self._shapes:
            return self.allocate_vector(*own)
        return self.allocate_optional_vector(f"{name}.weight")

    def _allocate_mlp(
        self, at: str, inputs: Sequence[str] = MLP_INPUTS, output: Sequence[str] = MLP_OUTPUT
    ) -> PackedMlp:
        return PackedMlp(
            gate_up=self._allocate_stack(at, inputs),
            gate_up_bias=self._allocate_bias(at, inputs),
            down=self._allocate_layers_tensor(at, output),
            down_bias=self._allocate_bias(at, output),
        )

    def _allocate_routing(self, at: str) -> PackedRouting:
        shared = f"{at}.{SHARED_OUTPUT}.weight" in self._shapes
        has_gate = (gate := f"{at}.{SHARED_GATE}") in self._shapes
        return PackedRouting(
            router=self.allocate_tensor(f"{at}.{ROUTER}", scheme=Scheme.FLOAT32),
            selection_bias=self.allocate_optional_vector(f"{at}.{SELECTION_BIAS}"),
            shared=self._allocate_mlp(at, SHARED_INPUTS, (SHARED_OUTPUT,)) if shared else None,
            shared_gate=self.allocate_tensor(gate, scheme=Scheme.FLOAT32) if has_gate else None,
        )

    def allocate_tensor(self, name: str, *, scheme: Scheme | None = None) -> PackedMatrix:
        scheme = scheme or self._schemes.get(name, self._scheme.embedding)
        return allocate_matrix(scheme, *self._shapes[name], allocate=self._take)

    def _allocate_stack(self, at: str, modules: Sequence[str]) -> MatrixStack:
        """Allocate several matrices, those that there are; those of one scheme are one part."""
        names = [name for each in modules if (name := f"{at}.{each}.weight") in self._shapes]
        parts: list[PackedMatrix] = []
        for scheme, some in groupby(names, lambda name: self._schemes.get(name, self._scheme)):
            shapes = [self._shapes[name] for name in some]
            rows, columns = sum(shape[0] for shape in shapes), shapes[0][1]
            parts.append(allocate_matrix(scheme, rows, columns, allocate=self._take))
        return MatrixStack(tuple(parts))

    def _allocate_layers_tensor(self, at: str, modules: Sequence[str]) -> PackedMatrix:
        [part] = self._allocate_stack(at, modules).parts
        return part

    def allocate_vector(self, *names: str) -> AnyArray:
        return self._take((sum(self._shapes[name][0] for name in names),), np.float32)

    def allocate_optional_vector(self, name: str) -> AnyArray | None:
        return self.allocate_vector(name) if name in self._shapes else None

    def _allocate_bias(self, at: str, modules: Sequence[str]) -> AnyArray | None:
        names = [name for each in modules if (name := f"{at}.{each}.bias") in self._shapes]
        return self.allocate_vector(*names) if names else None


@lru_cache(maxsize=8)
def _module_rows(config: ModelConfig) -> list[dict[str, int]]:
    """Return the rows of each module of each layer, by its name in the layer."""
    found: list[dict[str, int]] = [{} for _ in range(config.layers)]
    for name, shape in config.linear_shapes().items():
        if name.startswith(_LAYERS):
            number, _, module = name.removeprefix(_LAYERS).partition(".")
            found[int(number)][module] = shape[0]
    return found
