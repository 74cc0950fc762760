"""The layers of a base: what prompts and captured steps compute alike.

What differs between the two is the `LayerPass` of a call: how the plans of its rows change linear
layers, where keys and values are stored, and which of them a row attends to. Nothing here reads a
number from the device, so a CUDA graph can record it. Activations are float32, [rows, features];
base weights are read-only.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from expertctl.engine.decoding import LayerTimer
from expertctl.engine.torch.functional import (
    FeedForward,
    Linear,
    LinearPlans,
    make_feed_forward,
    make_linear,
)
from expertctl.engine.torch.routed_mlp import RoutedMlp, build_routed_mlp
from expertctl.engine.torch.weights import BaseWeights
from expertctl.package.model_config import EMBEDDING_TENSOR, ModelConfig

if TYPE_CHECKING:
    from expertctl.engine.torch.stacked_mlp import StackedMlp


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """One layer of a decoder; without a ``window`` it attends to all earlier tokens.

    Norms of queries and keys are as long as one head, or as all of them.
    """

    input_norm: Tensor
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    mlp_norm: Tensor
    mlp: "FeedForward | RoutedMlp | StackedMlp"
    window: int | None


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

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [rows, kv_heads, head_dim], keys not yet rotated; return what `attend` takes."""
        ...

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """Attend with [query_rows, heads, head_dim], not rotated -> [query_rows, features]."""
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
        self.head = Linear("lm_head", weights.get_output_matrix(), None)
        """The output layer, whose matrix may be tied to the embedding."""
        self.times: LayerTimer | None = None
        """Gets the time of each part while passes are timed; nothing is captured then."""
        self._embedding = weights.tensors[EMBEDDING_TENSOR]
        self._norm = weights.tensors["model.norm.weight"]

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of the first layer: int64 [rows] -> [rows, hidden]."""
        return self._embedding.index_select(0, tokens).float()

    def run_attention(self, x: Tensor, number: int, step: LayerPass) -> Tensor:
        """Run the attention part of a layer: [rows, hidden] -> [query_rows, hidden]."""
        layer, plans = self.layers[number], step.plans
        with self.time_place(f"layers.{number}.attention"):
            normed = self._normalise(x, layer.input_norm)
            keys = self._split_heads(layer.key(normed, plans), layer.key_norm)
            values = self._split_heads(layer.value(normed, plans), None)
            keys, values = step.write(number, keys, values)
            asking = normed[-step.query_rows :]
            queries = self._split_heads(layer.query(asking, plans), layer.query_norm)
            made = layer.output(step.attend(queries, keys, values, layer.window), plans)
            return x[-len(made) :] + made

    def norm_for_mlp(self, x: Tensor, number: int) -> Tensor:
        """Return the normed input of the MLP of a layer."""
        return self._normalise(x, self.layers[number].mlp_norm)

    def compute_logits(self, x: Tensor, plans: LinearPlans) -> Tensor:
        """Return the logits of the last layer's output: [rows, hidden] -> [rows, vocab]."""
        return self.head(self._normalise(x, self._norm), plans)

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

    def _split_heads(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """[rows, heads * dim] -> [rows, heads, dim], normed per head or over all heads."""
        if norm is not None:
            x = self._normalise(x.view(len(x), -1, len(norm)), norm)
        return x.view(len(x), -1, self.config.head_dim)

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self.config.norm_eps
        if weight.dtype == x.dtype:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x, weight.shape, None, eps) * weight  # otherwise seven kernels, not two


def _build_layer(
    config: ModelConfig,
    weights: BaseWeights,
    number: int,
    mlp: "FeedForward | RoutedMlp | StackedMlp",
) -> DecoderLayer:
    tensors, prefix = weights.tensors, f"model.layers.{number}"

    return DecoderLayer(
        input_norm=tensors[f"{prefix}.input_layernorm.weight"],
        query=make_linear(tensors, f"{prefix}.self_attn.q_proj"),
        key=make_linear(tensors, f"{prefix}.self_attn.k_proj"),
        value=make_linear(tensors, f"{prefix}.self_attn.v_proj"),
        output=make_linear(tensors, f"{prefix}.self_attn.o_proj"),
        query_norm=tensors.get(f"{prefix}.self_attn.q_norm.weight"),
        key_norm=tensors.get(f"{prefix}.self_attn.k_norm.weight"),
        mlp_norm=tensors[f"{prefix}.post_attention_layernorm.weight"],
        mlp=mlp,
        window=config.windows[number],
    )


def _build_mlp(config: ModelConfig, weights: BaseWeights, number: int) -> FeedForward | RoutedMlp:
    layer = f"model.layers.{number}"
    if config.experts is None or not config.is_routed(number):
        return make_feed_forward(weights.tensors, f"{layer}.mlp")
    return build_routed_mlp(weights.tensors, config.experts, layer=layer)
