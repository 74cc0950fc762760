"""The layers of the plain decoder, and the memory of a pass through them.

What may differ between architectures (`expertctl.package.block_config`) is decided here, when a
layer is built: the norms that it has, what they compute, and the activation of its MLP.
"""

from dataclasses import dataclass

import numpy as np

from expertctl.engine.adapters.steps import Deltas
from expertctl.engine.arrays import AnyArray
from expertctl.engine.cpu.plain_delta_net import PlainDeltaNet, build_delta_net, delta_net_bytes
from expertctl.engine.cpu.plain_functional import (
    LayerNorm,
    Norm,
    RmsNorm,
    StackedLinear,
    attention_scratch_bytes,
    plan_scratch_bytes,
    query_blocks_bytes,
    stack_linear,
    widening_bytes,
)
from expertctl.engine.cpu.plain_routed_mlp import (
    ActivatedMlp,
    ExpertMixture,
    GatedMlp,
    build_dense_mlp,
    build_expert_mixture,
    expert_mixture_bytes,
    gated_mlp_bytes,
)
from expertctl.engine.cpu.plain_varied_layers import (
    PlainVariedLayer,
    build_varied_layer,
    varied_pass_bytes,
)
from expertctl.engine.cpu.plain_weights import WeightTensors
from expertctl.engine.cpu.rope import RotationTable, rotate, rotate_first, rotation_table_bytes
from expertctl.engine.decoding import PREFILL_CHUNK
from expertctl.engine.kernels.packed_format import ATTENTION_INPUTS, KV_PAGE_TOKENS
from expertctl.engine.kv.block_pool import count_pages
from expertctl.engine.kv.recurrent_state import estimate_pass_state_bytes
from expertctl.package.architectures import NormKind
from expertctl.package.block_config import RopeKind
from expertctl.package.delta_net_config import OUTPUT_GATE_MODULE
from expertctl.package.model_config import SINKS, ModelConfig

_FLOAT_BYTES = 4
_MAX_STACKED, _MAX_STACKED_DELTA = 3, 6
"""Layers with the same input, at most: queries, keys and values; those and gates."""
_VIEW_BYTES, _TOKEN_BYTES, _OBJECT_BYTES = 256, 16, 64 << 10
"""Bytes of a view of a page, of a token in lists and arrays, and of all other objects."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """The norms of queries and keys, per head or over all heads."""

    norms: tuple[Norm, ...]
    """Of queries and of keys, or only of queries."""
    after_rope: bool

    def apply(self, x: AnyArray, ends: tuple[int, ...]) -> None:
        """Normalise [tokens, features] in place; queries and keys end at the first two ``ends``."""
        begin = 0
        for norm, end in zip(self.norms, ends, strict=False):
            part = x[:, begin:end].reshape(len(x), -1, norm.weight.shape[-1])
            norm(part, out=part)
            begin = end


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlainLayer:
    """One layer; without a ``window`` it attends to all earlier tokens.

    A ``parallel`` layer has no norm after attention or MLP, and its MLP reads what attention reads,
    through its own norm if it has one.
    """

    input_norm: Norm | None
    inputs: StackedLinear  # queries, keys and values
    output: StackedLinear
    head_norms: HeadNorms | None
    output_norm: Norm | None
    mlp_norm: Norm | None
    mlp: GatedMlp | ActivatedMlp | ExpertMixture
    mlp_output_norm: Norm | None
    parallel: bool
    scale: float
    """The factor on the outputs of attention and MLP."""
    rope: RopeKind
    whole_heads: bool
    """Whether all dimensions of all heads are rotated."""
    window: int | None
    sinks: AnyArray | None
    """A logit of each head that belongs to no key."""
    delta_net: PlainDeltaNet | None
    """What it has in place of attention, between ``inputs`` and ``output``; None: it attends."""
    head_dim: int
    varied: PlainVariedLayer | None
    """What it has beside other layers of the base."""

    @property
    def rotated_end(self) -> int:
        """The column after queries and keys of its inputs, or after queries if it has no keys."""
        return self.inputs.ends[min(1, len(self.inputs.ends) - 1)]

    def norm_input(self, x: AnyArray) -> AnyArray:
        """Return what attention reads: [tokens, hidden] -> [tokens, hidden]."""
        return x if self.input_norm is None else self.input_norm(x)

    def rotate(self, heads: AnyArray, table: RotationTable | None) -> AnyArray:
        """Rotate queries and keys [tokens, heads, head_dim]; returns a new array."""
        if self.whole_heads and table is not None:
            return rotate(heads, table)
        return rotate_first(heads, table)

    def add_attention(self, x: AnyArray, made: AnyArray) -> AnyArray:
        """Return the sum of hidden states and the output of attention, which it overwrites."""
        if self.output_norm is not None:
            self.output_norm(made, out=made)
        if self.scale != 1.0:
            made *= np.float32(self.scale)
        return np.add(x, made, out=made)

    def select_mlp_input(self, x: AnyArray, normed: AnyArray) -> AnyArray | None:
        """Return what the MLP of a parallel layer reads: hidden states, or what attention reads."""
        if not self.parallel:
            return None
        return normed if self.mlp_norm is None else x

    def add_mlp(self, x: AnyArray, read: AnyArray | None, deltas: Deltas) -> None:
        """Add the output of the MLP to hidden states, in place; it reads them, or ``read``."""
        rows = x if read is None else read
        made = self.mlp(rows if self.mlp_norm is None else self.mlp_norm(rows), deltas)
        if self.mlp_output_norm is not None:
            self.mlp_output_norm(made, out=made)
        if self.scale != 1.0:
            made *= np.float32(self.scale)
        x += made


def build_plain_layers(config: ModelConfig, weights: WeightTensors) -> list[PlainLayer]:
    """Return all layers in order."""
    return [_build_layer(config, weights, number) for number in range(config.layers)]


def build_norm(
    config: ModelConfig, weights: WeightTensors, name: str, kind: NormKind | None = None
) -> Norm:
    """Return a norm by its name; ``kind`` defaults to that of the layers."""
    return _make_norm(
        kind or config.block.norm,
        weights.tensors[f"{name}.weight"],
        weights.tensors.get(f"{name}.bias"),
        config.norm_eps,
    )


def _make_norm(kind: NormKind, weight: AnyArray, bias: AnyArray | None, eps: float) -> Norm:
    match kind:
        case "rms":
            return RmsNorm(weight, eps)
        case "rms_plus_one":
            return RmsNorm(weight + np.float32(1), eps)
        case "layer" | "layer_with_bias":
            return LayerNorm(weight, bias, eps)


def _build_layer(config: ModelConfig, weights: WeightTensors, number: int) -> PlainLayer:
    prefix, block = f"model.layers.{number}", config.block
    mlp: GatedMlp | ActivatedMlp | ExpertMixture
    if config.experts is None or not config.is_routed(number):
        mlp = build_dense_mlp(
            weights, f"{prefix}.mlp", activation=block.activation, gated=block.gated
        )
    else:
        mlp = build_expert_mixture(weights, config.experts, layer=prefix, gate=block.clamped_gate)
    norms = {name: build_norm(config, weights, f"{prefix}.{name}") for name in block.list_norms()}
    net, attends = config.delta_net, config.has_attention(number)
    inputs, output = [*ATTENTION_INPUTS], "self_attn.o_proj"
    if net is not None and attends:
        inputs.append(OUTPUT_GATE_MODULE)
    elif net is not None:
        *inputs, output = net.list_linear_shapes(config.hidden_size)
    kind, head_dim = block.get_rope_kind(number), config.get_layer_sizes(number).head_dim
    there = [n for each in inputs if f"{(n := f'{prefix}.{each}')}.weight" in weights.tensors]
    return PlainLayer(
        input_norm=norms.get("input_layernorm"),
        inputs=stack_linear(weights, there),
        output=stack_linear(weights, [f"{prefix}.{output}"]),
        head_norms=_build_head_norms(config, weights, number)
        if config.qk_norm and attends
        else None,
        output_norm=norms.get("attention_output_layernorm"),
        mlp_norm=norms.get("post_attention_layernorm"),
        mlp=mlp,
        mlp_output_norm=norms.get("mlp_output_layernorm"),
        parallel=block.places in ("parallel", "parallel_apart"),
        scale=block.residual_scale,
        rope=kind,
        whole_heads=kind == "local" or config.rope.dims == head_dim,
        window=config.windows[number],
        sinks=weights.tensors.get(f"{prefix}.{SINKS}"),
        delta_net=None
        if net is None or attends
        else build_delta_net(net, weights, prefix, eps=config.norm_eps),
        head_dim=head_dim,
        varied=build_varied_layer(config, weights, number),
    )


def _build_head_norms(config: ModelConfig, weights: WeightTensors, number: int) -> HeadNorms:
    block, prefix = config.block, f"model.layers.{number}"

    def build(name: str, heads: int) -> Norm:
        module = f"{prefix}.self_attn.{name}"
        if not block.own_head_norms:
            return build_norm(config, weights, module, block.head_norm)
        names = [f"{module}.norms.{head}.weight" for head in range(heads)]
        rows = weights.stack(names).reshape(heads, config.head_dim)
        return _make_norm(block.head_norm, rows, None, config.norm_eps)

    norms = [build("q_norm", config.heads)]
    if config.get_layer_sizes(number).source is None:
        norms.append(build("k_norm", config.kv_heads))
    return HeadNorms(tuple(norms), block.norms_after_rope)


def estimate_plain_pass_bytes(
    config: ModelConfig,
    capacity: int,
    *,
    dtype: str = "float32",
    width: int = 0,
    chunk: int = PREFILL_CHUNK,
) -> int:
    """Estimate the maximum bytes of a pass besides weights, pages and the logits of others.

    ``capacity`` is that of its sequence, ``width`` that of the widest plan, ``dtype`` that of
    matrices.
    """
    rows, hidden, dims = min(chunk, capacity), config.hidden_size, config.head_dim
    heads = (config.heads + 2 * config.kv_heads) * dims
    attending = attention_scratch_bytes(config.heads, dims, rows, capacity)
    attending += plan_scratch_bytes(max(hidden, heads), max(hidden, heads), rows, width=width)
    attending += _FLOAT_BYTES * rows * (hidden + 4 * heads)
    if config.unlike_llama:  # copies of heads, the input of a parallel MLP
        attending += _FLOAT_BYTES * rows * (2 * heads + 2 * hidden)
    if config.delta_net is not None:
        gates = _FLOAT_BYTES * rows * 3 * config.heads * dims
        attending = max(attending + gates, _estimate_delta_net_bytes(config, rows, width))
        attending += estimate_pass_state_bytes(config)
    layer = max(attending, _estimate_mlp_bytes(config, rows, width))
    head = plan_scratch_bytes(hidden, config.vocab_size, 1, width=width)
    head += _FLOAT_BYTES * config.vocab_size
    tables = 1 if config.block.local_rope is None else 2
    shared = tables * rotation_table_bytes(dims, capacity)
    shared += sum(query_blocks_bytes(config.heads, rows, w) for w in set(config.windows))
    if dtype != "float32":
        shapes = (shape for shape in config.tensor_shapes().values() if len(shape) == 2)
        stacked = _MAX_STACKED if config.delta_net is None else _MAX_STACKED_DELTA
        shared += max(widening_bytes(inner, stacked * outer) for outer, inner in shapes)
    shared += _FLOAT_BYTES * 2 * config.kv_heads * dims * KV_PAGE_TOKENS * count_pages(capacity)
    shared += _VIEW_BYTES * count_pages(capacity) + _TOKEN_BYTES * capacity + _OBJECT_BYTES
    shared += varied_pass_bytes(config, rows)
    return shared + _FLOAT_BYTES * 5 * rows * hidden + max(layer, head)


def _estimate_delta_net_bytes(config: ModelConfig, rows: int, width: int) -> int:
    net, hidden = config.delta_net, config.hidden_size
    assert net is not None
    outputs = net.channels + net.values + 2 * net.value_heads
    linear = plan_scratch_bytes(max(hidden, net.values), max(hidden, outputs), rows, width=width)
    return linear + _FLOAT_BYTES * rows * (hidden + outputs) + delta_net_bytes(net, rows)


def _estimate_mlp_bytes(config: ModelConfig, rows: int, width: int) -> int:
    most = gated_mlp_bytes(config.hidden_size, config.intermediate_size, rows, width=width)
    if config.experts is not None:
        routed = expert_mixture_bytes(config.experts, config.hidden_size, rows, width=width)
        most = max(most, routed)
    if config.unlike_llama:  # activations have two more arrays, norms of outputs one
        most += _FLOAT_BYTES * rows * (2 * config.intermediate_size + 2 * config.hidden_size)
    return most
