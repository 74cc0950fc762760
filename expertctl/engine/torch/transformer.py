"""The layers of a base: what prompts and captured steps compute alike.

What differs between the two is the `LayerPass` of a call: how the plans of its rows change linear
layers, where keys and values are stored, and which of them a row attends to. Nothing here reads a
number from the device, so a CUDA graph can record it. Activations are float32, [rows, features];
base weights are read-only.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from expertctl.engine.decoding import LayerTimer
from expertctl.engine.torch.delta_net import DeltaNet, build_delta_net
from expertctl.engine.torch.functional import (
    FeedForward,
    Linear,
    LinearPlans,
    NormWeights,
    ScoreChange,
    make_feed_forward,
    make_linear,
    make_norm,
)
from expertctl.engine.torch.routed_mlp import RoutedMlp, build_routed_mlp
from expertctl.engine.torch.varied_layers import (
    TorchVariedLayer,
    build_token_inputs,
    build_varied_layer,
)
from expertctl.engine.torch.weights import BaseWeights
from expertctl.package.architectures import NormKind
from expertctl.package.block_config import RopeKind
from expertctl.package.delta_net_config import OUTPUT_GATE_MODULE
from expertctl.package.model_config import (
    EMBEDDING_TENSOR,
    HEAD_BIAS_TENSOR,
    POSITIONS_TENSOR,
    SINKS,
    ModelConfig,
)
from expertctl.package.varied_layers import LayerSizes

if TYPE_CHECKING:
    from expertctl.engine.torch.stacked_mlp import StackedMlp


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """The attention of a layer.

    Norms of queries and keys are as long as one head, or as all of them.
    """

    query: Linear
    key: Linear | None
    value: Linear | None
    output: Linear
    gate: Linear | None
    """What scales its output, if anything does."""
    query_norm: NormWeights | None
    key_norm: NormWeights | None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """One layer of a decoder; without a ``window`` it attends to all earlier tokens."""

    input_norm: NormWeights | None
    mixer: AttentionWeights | DeltaNet
    """What reads other tokens."""
    place: int
    """Its place among the layers with such a mixer."""
    output_norm: NormWeights | None
    mlp_norm: NormWeights | None
    mlp: "FeedForward | RoutedMlp | StackedMlp"
    mlp_output_norm: NormWeights | None
    window: int | None
    rope: RopeKind
    change: ScoreChange | None
    """What changes the scores of attention, if anything does."""
    sizes: LayerSizes
    varied: TorchVariedLayer | None
    """What it has beside other layers of the base."""


class LayerPass(Protocol):
    """One pass of some rows through the layers, with their plans and their keys and values."""

    @property
    def plans(self) -> LinearPlans:
        """The plans that change linear layers."""
        ...

    @property
    def query_rows(self) -> int:
        """How many of the last rows attend; the others only store keys and values."""
        ...

    @property
    def positions(self) -> Tensor:
        """The position of each row, int64 [rows]."""
        ...

    def rotate(self, x: Tensor, kind: RopeKind) -> Tensor:
        """Rotate the last rows by their positions: [some rows, heads, head_dim] -> the same."""
        ...

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [rows, kv_heads, head_dim]; return what `attend` takes."""
        ...

    def run_delta_net(self, layer: int, net: DeltaNet, made: Tensor) -> Tensor:
        """Read rows after the states of their sequences: [rows, inputs] -> [rows, values]."""
        ...

    def read(self, layer: int, *, heads: int, dims: int) -> tuple[Tensor, Tensor]:
        """Return what `attend` takes, as another layer of this pass stored it."""
        ...

    @property
    def embedded(self) -> Tensor | None:
        """The embeddings of tokens that each layer reads, [rows, layers, size]."""
        ...

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        change: ScoreChange | None,
    ) -> Tensor:
        """Attend with [query_rows, heads, head_dim] -> [query_rows, features]."""
        ...


class Transformer:
    """The embedding, the layers and the output layer of a base."""

    def __init__(
        self,
        config: ModelConfig,
        weights: BaseWeights,
        *,
        stacked: "Mapping[int, StackedMlp] | None" = None,
    ) -> None:
        """Group the weights by layer; ``stacked`` are the MLPs whose experts are in a stack."""
        given = stacked or {}
        self.config, self.device = config, weights.device
        self.layers = [
            _build_layer(
                config, weights, number, given.get(number) or _build_mlp(config, weights, number)
            )
            for number in range(config.layers)
        ]
        bias = weights.tensors.get(HEAD_BIAS_TENSOR)
        self.head = Linear("lm_head", weights.get_output_matrix(), bias)
        """The output layer, whose matrix may be tied to the embedding."""
        self.times: LayerTimer | None = None
        """Gets the time of each part while passes are timed; nothing is captured then."""
        self._embedding = weights.tensors[EMBEDDING_TENSOR]
        self._positions = weights.tensors.get(POSITIONS_TENSOR)
        self._norm = _build_norm(config, weights, "model.norm")
        self.token_inputs = build_token_inputs(config, weights.tensors)
        """Makes the embeddings that each layer reads, if it reads any."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens: int64 [rows] -> [rows, hidden]."""
        rows = self._embedding.index_select(0, tokens).float()
        scale = self.config.block.embedding_scale
        return rows if scale == 1.0 else rows * scale

    def embed_for_layers(self, tokens: Tensor, x: Tensor, plans: LinearPlans) -> Tensor | None:
        """Return what each layer reads of tokens with their embeddings, [rows, layers, size]."""
        return None if self.token_inputs is None else self.token_inputs(tokens, x, plans)

    def scale_virtual_tokens(self, rows: Tensor) -> Tensor:
        """Return the rows of a soft prompt as the first layer reads them."""
        block = self.config.block
        return rows * block.embedding_scale if block.scales_virtual_tokens else rows

    def add_positions(self, x: Tensor, step: LayerPass) -> Tensor:
        """Add the embeddings of positions, if the base has any: [rows, hidden]."""
        if self._positions is None:
            return x
        places = step.positions.clamp(max=len(self._positions) - 1)  # of unused rows
        return x + self._positions.index_select(0, places).float()

    def run_block(self, x: Tensor, number: int, step: LayerPass) -> Tensor:
        """Run a layer of any kind: [rows, hidden] -> [query_rows, hidden]."""
        layer, block = self.layers[number], self.config.block
        assert isinstance(layer.mlp, FeedForward | RoutedMlp), "no stack has experts of such blocks"
        with self.time_place(f"layers.{number}.attention"):
            normed = x if layer.input_norm is None else layer.input_norm(x)
            made = self._attend(normed, number, step)
            if layer.output_norm is not None:
                made = layer.output_norm(made)
            before, normed = x[-len(made) :], normed[-len(made) :]
            x = before + made * block.residual_scale
        with self.time_place(f"layers.{number}.mlp"):
            is_parallel = block.places in ("parallel", "parallel_apart")
            read = before if is_parallel else x
            if layer.mlp_norm is not None:
                read = layer.mlp_norm(read)
            elif is_parallel:
                read = normed
            if isinstance(layer.mlp, RoutedMlp):
                assert isinstance(step.plans, Mapping), "a step has one plan for all of its rows"
                made = layer.mlp(read, step.plans)
            else:
                made = layer.mlp(read, step.plans)
            if layer.mlp_output_norm is not None:
                made = layer.mlp_output_norm(made)
            x = x + made * block.residual_scale
            return x if layer.varied is None else layer.varied.finish(x, step.embedded, step.plans)

    def run_attention(self, x: Tensor, number: int, step: LayerPass) -> Tensor:
        """Run the attention part of a layer: [rows, hidden] -> [query_rows, hidden]."""
        norm = self.layers[number].input_norm
        assert norm is not None, "other blocks are run by `run_block`"
        with self.time_place(f"layers.{number}.attention"):
            made = self._attend(norm(x), number, step)
            return x[-len(made) :] + made

    def norm_for_mlp(self, x: Tensor, number: int) -> Tensor:
        """Return the normed input of the MLP of a layer."""
        norm = self.layers[number].mlp_norm
        assert norm is not None, "other blocks are run by `run_block`"
        return norm(x)

    def compute_logits(self, x: Tensor, plans: LinearPlans) -> Tensor:
        """Return the logits of the last layer's output: [rows, hidden] -> [rows, vocab]."""
        block, logits = self.config.block, self.head(self._norm(x), plans)
        if block.logit_scale != 1.0:
            logits = logits * block.logit_scale
        if block.logit_cap is not None:
            logits = (logits / block.logit_cap).tanh() * block.logit_cap
        return logits

    def _attend(self, normed: Tensor, number: int, step: LayerPass) -> Tensor:
        """Return the output of attention: [rows, hidden] -> [query_rows, hidden]."""
        layer, plans, mixer = self.layers[number], step.plans, self.layers[number].mixer
        if isinstance(mixer, DeltaNet):
            made = step.run_delta_net(layer.place, mixer, mixer.apply_inputs(normed, plans))
            return mixer.output(made[-step.query_rows :], plans)
        keys, values = self._exchange(normed, layer, mixer, step)
        asking = normed[-step.query_rows :]
        queries = self._make_heads(mixer.query(asking, plans), mixer.query_norm, layer, step)
        if self.config.block.attention_scale is not None:
            dims = layer.sizes.head_dim
            queries = queries * (self.config.block.attention_scale * math.sqrt(dims))
        if self.config.block.query_growth:
            queries = queries * self._compute_query_growth(step.positions[-len(queries) :])
        made = step.attend(queries, keys, values, layer.window, layer.change)
        if mixer.gate is not None:
            made = made * mixer.gate(asking, plans).sigmoid()
        return mixer.output(made, plans)

    def _exchange(
        self, normed: Tensor, layer: DecoderLayer, mixer: AttentionWeights, step: LayerPass
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values; return those that a layer attends to."""
        sizes, plans = layer.sizes, step.plans
        if mixer.key is None:
            assert sizes.source is not None, "other layers have keys"
            return step.read(sizes.source, heads=sizes.kv_heads, dims=sizes.head_dim)
        made = mixer.key(normed, plans)
        keys = self._make_heads(made, mixer.key_norm, layer, step)
        values = made if mixer.value is None else mixer.value(normed, plans)
        values = values.view(len(values), -1, sizes.head_dim)
        if layer.varied is not None:
            values = layer.varied.norm_values(values)
        return step.write(layer.place, keys, values)

    def _make_heads(
        self, x: Tensor, norm: NormWeights | None, layer: DecoderLayer, step: LayerPass
    ) -> Tensor:
        """[rows, heads * dim] -> [rows, heads, dim], normed and rotated."""
        if self.config.block.norms_after_rope and norm is not None:
            return norm(step.rotate(self._split_heads(x, None, layer), layer.rope))
        return step.rotate(self._split_heads(x, norm, layer), layer.rope)

    def _compute_query_growth(self, positions: Tensor) -> Tensor:
        """Return the factor on the queries of each row, [rows, 1, 1]."""
        block = self.config.block
        steps = (positions // block.query_growth_positions).float()
        return (1 + block.query_growth * steps.log1p())[:, None, None]

    @contextmanager
    def time_place(self, place: str) -> Iterator[None]:
        """Add the time of a part, while passes are timed."""
        if self.times is None:
            yield
            return
        started = self.read_clock()
        yield
        self.times.add(place, self.read_clock() - started)

    def read_clock(self) -> float:
        """Return the time in seconds, after the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _split_heads(self, x: Tensor, norm: NormWeights | None, layer: DecoderLayer) -> Tensor:
        """[rows, heads * dim] -> [rows, heads, dim], normed per head or over all heads."""
        if norm is not None:
            x = norm(x.view(len(x), -1, norm.weight.shape[-1]))
        return x.view(len(x), -1, layer.sizes.head_dim)


def _build_layer(
    config: ModelConfig,
    weights: BaseWeights,
    number: int,
    mlp: "FeedForward | RoutedMlp | StackedMlp",
) -> DecoderLayer:
    tensors, prefix, block = weights.tensors, f"model.layers.{number}", config.block
    norms = {name: _build_norm(config, weights, f"{prefix}.{name}") for name in block.list_norms()}
    sizes = config.get_layer_sizes(number)
    change = ScoreChange(block.attention_cap, tensors.get(f"{prefix}.{SINKS}"))
    attends = config.has_attention(number)
    mixer: AttentionWeights | DeltaNet
    if attends or config.delta_net is None:
        mixer = _build_attention(config, weights, prefix, sizes)
    else:
        mixer = build_delta_net(config.delta_net, tensors, prefix, eps=config.norm_eps)
    return DecoderLayer(
        input_norm=norms.get("input_layernorm"),
        mixer=mixer,
        place=sum(config.has_attention(other) is attends for other in range(number)),
        output_norm=norms.get("attention_output_layernorm"),
        mlp_norm=norms.get("post_attention_layernorm"),
        mlp=mlp,
        mlp_output_norm=norms.get("mlp_output_layernorm"),
        window=config.windows[number],
        rope=block.get_rope_kind(number),
        change=None if change.cap is None and change.sinks is None else change,
        sizes=sizes,
        varied=build_varied_layer(config, tensors, number),
    )


def _build_attention(
    config: ModelConfig, weights: BaseWeights, prefix: str, sizes: LayerSizes
) -> AttentionWeights:
    tensors, has_keys = weights.tensors, sizes.source is None
    query_norm, key_norm = _build_head_norms(config, weights, f"{prefix}.self_attn")
    gate = f"{prefix}.{OUTPUT_GATE_MODULE}"
    return AttentionWeights(
        query=make_linear(tensors, f"{prefix}.self_attn.q_proj"),
        key=make_linear(tensors, f"{prefix}.self_attn.k_proj") if has_keys else None,
        value=make_linear(tensors, f"{prefix}.self_attn.v_proj")
        if has_keys and sizes.has_values
        else None,
        output=make_linear(tensors, f"{prefix}.self_attn.o_proj"),
        gate=make_linear(tensors, gate) if f"{gate}.weight" in tensors else None,
        query_norm=query_norm,
        key_norm=key_norm,
    )


def _build_norm(
    config: ModelConfig, weights: BaseWeights, name: str, kind: NormKind | None = None
) -> NormWeights:
    tensors, kind = weights.tensors, kind or config.block.norm
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    return make_norm(kind, weight, bias, config.norm_eps)


def _build_head_norms(
    config: ModelConfig, weights: BaseWeights, attention: str
) -> tuple[NormWeights | None, NormWeights | None]:
    """Return the norms of queries and keys of a layer, if it has any."""
    block = config.block
    if not config.qk_norm:
        return None, None
    found: list[NormWeights | None] = []
    for name, heads in (("q_norm", config.heads), ("k_norm", config.kv_heads)):
        if block.own_head_norms:
            names = [f"{attention}.{name}.norms.{head}.weight" for head in range(heads)]
            rows = torch.stack([weights.tensors[each] for each in names])
            found.append(make_norm(block.head_norm, rows, None, config.norm_eps))
        elif f"{attention}.{name}.weight" in weights.tensors:
            found.append(_build_norm(config, weights, f"{attention}.{name}", block.head_norm))
        else:
            found.append(None)  # it reads keys of another layer
    return found[0], found[1]


def _build_mlp(config: ModelConfig, weights: BaseWeights, number: int) -> FeedForward | RoutedMlp:
    layer = f"model.layers.{number}"
    if config.experts is None or not config.is_routed(number):
        block = config.block
        return make_feed_forward(
            weights.tensors, f"{layer}.mlp", activation=block.activation, gated=block.gated
        )
    clamped = config.block.clamped_gate
    return build_routed_mlp(weights.tensors, config.experts, layer=layer, clamped=clamped)
