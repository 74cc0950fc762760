"""The weights of a base sorted into layers, with the names by which plans change them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from expertctl.engine.base_weights import BaseWeights
from expertctl.engine.feed_forward import FeedForward, feed_forward_of
from expertctl.engine.linear import Linear, linear_of
from expertctl.engine.moe.routed_mlp import RoutedMlp, routed_mlp_of
from expertctl.package.model_config import ModelConfig

if TYPE_CHECKING:
    from expertctl.engine.moe.stacked_mlp import StackedMlp


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer of a decoder; without a ``window`` every earlier token is seen.

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


def layers_of(
    config: ModelConfig, weights: BaseWeights, stacked: "Mapping[int, StackedMlp] | None" = None
) -> list[Layer]:
    """Return all layers, the first one first; those with experts in a stack are given."""
    given = stacked or {}
    return [
        _layer(config, weights, number, given.get(number) or _mlp(config, weights, number))
        for number in range(config.layers)
    ]


def head_of(weights: BaseWeights) -> Linear:
    """Return what scores tokens: the output matrix, tied or not."""
    return Linear("lm_head", weights.head(), None)


def _layer(
    config: ModelConfig,
    weights: BaseWeights,
    number: int,
    mlp: "FeedForward | RoutedMlp | StackedMlp",
) -> Layer:
    tensors, prefix = weights.tensors, f"model.layers.{number}"

    return Layer(
        input_norm=tensors[f"{prefix}.input_layernorm.weight"],
        query=linear_of(tensors, f"{prefix}.self_attn.q_proj"),
        key=linear_of(tensors, f"{prefix}.self_attn.k_proj"),
        value=linear_of(tensors, f"{prefix}.self_attn.v_proj"),
        output=linear_of(tensors, f"{prefix}.self_attn.o_proj"),
        query_norm=tensors.get(f"{prefix}.self_attn.q_norm.weight"),
        key_norm=tensors.get(f"{prefix}.self_attn.k_norm.weight"),
        mlp_norm=tensors[f"{prefix}.post_attention_layernorm.weight"],
        mlp=mlp,
        window=config.windows[number],
    )


def _mlp(config: ModelConfig, weights: BaseWeights, number: int) -> FeedForward | RoutedMlp:
    layer = f"model.layers.{number}"
    if config.experts is None or not config.is_routed(number):
        return feed_forward_of(weights.tensors, f"{layer}.mlp")
    return routed_mlp_of(weights.tensors, config.experts, layer=layer)
