"""What layers of different sizes have beside the others, in numpy; see `package.varied_layers`.

Keys and values of all layers are in pages of the largest size; the rest of a row is zero.
"""

import math
from dataclasses import dataclass

import numpy as np

from expertctl.engine.adapters.steps import Deltas
from expertctl.engine.arrays import AnyArray, widen
from expertctl.engine.cpu.plain_functional import (
    GATES,
    RmsNorm,
    StackedLinear,
    normalise,
    stack_linear,
)
from expertctl.engine.cpu.plain_weights import WeightTensors
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

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """Makes the embeddings of tokens that each layer reads."""

    embeddings: AnyArray
    """By token; [tokens, layers * size], perhaps in the files of the base."""
    projection: StackedLinear
    norm: RmsNorm
    layers: int

    def __call__(self, ids: AnyArray, x: AnyArray, deltas: Deltas) -> AnyArray:
        """Return them for tokens with their embeddings: [tokens, hidden] -> [layers, tokens, size].

        They are those of the tokens themselves, and a projection of ``x``.
        """
        made = self.projection(x, deltas)
        made *= np.float32(x.shape[1] ** -0.5)
        made = self.norm(made.reshape(len(x), self.layers, -1))
        own = widen(self.embeddings[ids]) * np.float32(math.sqrt(made.shape[-1]))
        made += own.reshape(made.shape)
        made *= np.float32(math.sqrt(0.5))
        return made.swapaxes(0, 1)


def build_token_inputs(config: ModelConfig, weights: WeightTensors) -> TokenInputs | None:
    """Return what makes the embeddings of layers; None: they read none."""
    embeddings = weights.tensors.get(f"{LAYER_EMBEDDINGS}.weight")
    if embeddings is None:
        return None
    return TokenInputs(
        embeddings=embeddings,
        projection=stack_linear(weights, [LAYER_PROJECTION]),
        norm=RmsNorm(weights.tensors[f"{LAYER_PROJECTION_NORM}.weight"], config.norm_eps),
        layers=config.layers,
    )


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputStep:
    """Adds to hidden states what a layer makes of its embedding of each token."""

    gate: StackedLinear
    output: StackedLinear
    norm: RmsNorm
    activation: str

    def add_to(self, x: AnyArray, embedded: AnyArray, deltas: Deltas) -> None:
        """Add it in place: [tokens, hidden], with embeddings [tokens, size]."""
        gated = GATES[self.activation](self.gate(x, deltas), embedded)
        made = self.output(gated, deltas)
        x += self.norm(made, out=made)


@dataclass(frozen=True, slots=True, eq=False)
class PlainVariedLayer:
    """What one layer has beside the others."""

    source: int | None
    """The layer whose keys and values it reads; None: it has its own."""
    has_values: bool
    eps: float
    token_input: TokenInputStep | None
    scalar: AnyArray  # [1]

    def make_values(self, made: AnyArray, layer: StackedLinear, head_dim: int) -> AnyArray:
        """Return the normed values of a layer's projections, [tokens, kv_heads, head_dim].

        Keys must not have been normed yet.
        """
        if self.source is not None:
            return np.empty((len(made), 0, head_dim), np.float32)
        begin = layer.ends[1] if self.has_values else layer.ends[0]
        values = made[:, begin:].reshape(len(made), -1, head_dim)
        return normalise(values, np.ones(head_dim, np.float32), self.eps)

    def finish(self, x: AnyArray, embedded: AnyArray | None, deltas: Deltas) -> None:
        """Change the output of a layer in place; ``embedded`` is its embedding of each token."""
        if self.token_input is not None and embedded is not None:
            self.token_input.add_to(x, embedded, deltas)
        x *= self.scalar


def build_varied_layer(
    config: ModelConfig, weights: WeightTensors, number: int
) -> PlainVariedLayer | None:
    """Return what a layer has beside the others; None where layers are alike."""
    if config.block.varied is None:
        return None
    prefix, sizes = f"model.layers.{number}", config.get_layer_sizes(number)
    token_input = None
    if config.block.varied.input_size:
        token_input = TokenInputStep(
            gate=stack_linear(weights, [f"{prefix}.{LAYER_GATE}"]),
            output=stack_linear(weights, [f"{prefix}.{LAYER_OUTPUT}"]),
            norm=RmsNorm(weights.tensors[f"{prefix}.{LAYER_INPUT_NORM}.weight"], config.norm_eps),
            activation=config.block.activation,
        )
    scalar = weights.tensors[f"{prefix}.{LAYER_SCALAR}"]
    return PlainVariedLayer(sizes.source, sizes.has_values, config.norm_eps, token_input, scalar)


def pad_heads(numbers: AnyArray, config: ModelConfig) -> AnyArray:
    """Return keys or values as they are in pages: [tokens, kv_heads, head_dim] of the largest."""
    if numbers.shape[1:] == (config.kv_heads, config.head_dim):
        return numbers
    padded = np.zeros((len(numbers), config.kv_heads, config.head_dim), np.float32)
    padded[:, : numbers.shape[1], : numbers.shape[2]] = numbers
    return padded


def varied_pass_bytes(config: ModelConfig, rows: int) -> int:
    """Return the maximum bytes of a pass that layers of different sizes need on top."""
    varied = config.block.varied
    if varied is None:
        return 0
    inputs = 4 * config.layers * varied.input_size + 6 * varied.input_size + config.hidden_size
    inner = max(sizes.intermediate_size for sizes in varied.sizes) - config.intermediate_size
    heads = 4 * config.kv_heads * config.head_dim
    return _FLOAT_BYTES * rows * (inputs + 5 * inner + heads)
