"""What layers of different sizes have beside the others, in torch; see `package.varied_layers`.

Keys and values of all layers are in caches of the largest size.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from expertctl.engine.torch.functional import (
    FeedForward,
    Linear,
    LinearPlans,
    NormWeights,
    make_linear,
    make_norm,
)
from expertctl.package.model_config import ModelConfig
from expertctl.package.varied_layers import (
    LAYER_EMBEDDINGS,
    LAYER_GATE,
    LAYER_INPUT_NORM,
    LAYER_OUTPUT,
    LAYER_PROJECTION,
    LAYER_PROJECTION_NORM,
    LAYER_SCALAR,
)


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedTokens:
    """Makes the embeddings of tokens that each layer reads."""

    embeddings: Tensor
    """By token; [tokens, layers * size]."""
    projection: Linear
    norm: NormWeights
    layers: int

    def __call__(self, ids: Tensor, x: Tensor, plans: LinearPlans) -> Tensor:
        """Return them for tokens with their embeddings: [rows, hidden] -> [rows, layers, size].

        They are those of the tokens themselves, and a projection of ``x``.
        """
        made = self.projection(x, plans) * x.shape[1] ** -0.5
        made = self.norm(made.view(len(x), self.layers, -1))
        own = self.embeddings.index_select(0, ids).float().view_as(made)
        return (made + own * math.sqrt(made.shape[-1])) * math.sqrt(0.5)


def build_token_inputs(config: ModelConfig, tensors: Mapping[str, Tensor]) -> EmbeddedTokens | None:
    """Return what makes the embeddings of layers; None: they read none."""
    embeddings = tensors.get(f"{LAYER_EMBEDDINGS}.weight")
    if embeddings is None:
        return None
    weight = tensors[f"{LAYER_PROJECTION_NORM}.weight"]
    return EmbeddedTokens(
        embeddings=embeddings,
        projection=make_linear(tensors, LAYER_PROJECTION),
        norm=make_norm("rms", weight, None, config.norm_eps),
        layers=config.layers,
    )


@dataclass(frozen=True, slots=True, eq=False)
class TorchVariedLayer:
    """What one layer has beside the others."""

    number: int
    eps: float
    token_input: FeedForward | None
    """Multiplies an activation of hidden states by an embedding of the token, see `finish`."""
    norm: NormWeights | None
    scalar: Tensor  # [1]

    def norm_values(self, values: Tensor) -> Tensor:
        """Norm values [rows, kv_heads, head_dim], without weights."""
        return F.rms_norm(values, values.shape[-1:], None, self.eps)

    def finish(self, x: Tensor, embedded: Tensor | None, plans: LinearPlans) -> Tensor:
        """Return the output of the layer: [rows, hidden] and embeddings [.., layers, size].

        The rows of ``x`` are the last ones of the embeddings.
        """
        if self.token_input is not None and self.norm is not None and embedded is not None:
            own = embedded[-len(x) :, self.number]
            x = x + self.norm(self.token_input.multiply(x, own, plans))
        return x * self.scalar


def build_varied_layer(
    config: ModelConfig, tensors: Mapping[str, Tensor], number: int
) -> TorchVariedLayer | None:
    """Return what a layer has beside the others; None where layers are alike."""
    if config.block.varied is None:
        return None
    prefix, token_input, norm = f"model.layers.{number}", None, None
    if config.block.varied.input_size:
        gate, output = (make_linear(tensors, f"{prefix}.{n}") for n in (LAYER_GATE, LAYER_OUTPUT))
        token_input = FeedForward(None, gate, output, config.block.activation)
        norm = make_norm(
            "rms", tensors[f"{prefix}.{LAYER_INPUT_NORM}.weight"], None, config.norm_eps
        )
    scalar = tensors[f"{prefix}.{LAYER_SCALAR}"]
    return TorchVariedLayer(number, config.norm_eps, token_input, norm, scalar)


def estimate_varied_floats(config: ModelConfig) -> int:
    """Return how many float32 values a token needs on top in layers of different sizes, at most."""
    varied = config.block.varied
    if varied is None:
        return 0
    inner = max(sizes.intermediate_size for sizes in varied.sizes) - config.intermediate_size
    inputs = 5 * config.layers * varied.input_size + 4 * varied.input_size
    return inputs + 4 * inner + 2 * config.kv_heads * config.head_dim + 2 * config.hidden_size
