"""The weights of a base sorted into layers, with the names by which plans change them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from expertctl.engine.base_weights import BaseWeights
from expertctl.engine.linear import LinearDelta, linear
from expertctl.package.model_config import ModelConfig

Deltas = Mapping[str, LinearDelta]
"""What a plan changes, by module name: ``model.layers.0.self_attn.q_proj``, …, ``lm_head``."""

NO_DELTAS: Deltas = {}


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """One linear layer: its module name, weights [out, in] and bias [out]."""

    module: str
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, deltas: Deltas) -> Tensor:
        """Apply it, with what a plan changes: [tokens, in] -> [tokens, out]."""
        return linear(x, self.weight, self.bias, deltas.get(self.module))


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer of a decoder; without a ``window`` every earlier token is seen."""

    input_norm: Tensor
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    mlp_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear
    window: int | None


def layers_of(config: ModelConfig, weights: BaseWeights) -> list[Layer]:
    """Return all layers, the first one first."""
    return [_layer(config, weights, number) for number in range(config.layers)]


def head_of(weights: BaseWeights) -> Linear:
    """Return what scores tokens: the output matrix, tied or not."""
    return Linear("lm_head", weights.head(), None)


def _layer(config: ModelConfig, weights: BaseWeights, number: int) -> Layer:
    tensors, prefix = weights.tensors, f"model.layers.{number}"

    def read(name: str) -> Linear:
        module = f"{prefix}.{name}"
        return Linear(module, tensors[f"{module}.weight"], tensors.get(f"{module}.bias"))

    return Layer(
        input_norm=tensors[f"{prefix}.input_layernorm.weight"],
        query=read("self_attn.q_proj"),
        key=read("self_attn.k_proj"),
        value=read("self_attn.v_proj"),
        output=read("self_attn.o_proj"),
        query_norm=tensors.get(f"{prefix}.self_attn.q_norm.weight"),
        key_norm=tensors.get(f"{prefix}.self_attn.k_norm.weight"),
        mlp_norm=tensors[f"{prefix}.post_attention_layernorm.weight"],
        gate=read("mlp.gate_proj"),
        up=read("mlp.up_proj"),
        down=read("mlp.down_proj"),
        window=config.windows[number],
    )
