"""Gated DeltaNet in torch: layers without keys and values, for prompts and for captured steps.

The formulas are those of `expertctl.engine.cpu.plain_delta_net`. Sequences of a batch have as many
new tokens each: a prompt is one sequence with many, a step several with one. Nothing here reads a
number from the device, so a CUDA graph can record a step. States are float32 [sequences, numbers].
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from expertctl.engine.torch.functional import Linear, LinearPlans, make_linear
from expertctl.package.delta_net_config import DeltaNetConfig

SEGMENT_TOKENS = 64
"""Maximum number of tokens of a sequence that are read at once."""
_NORM_EPS = 1e-6
"""That of queries and keys, whatever the base has for others."""


@dataclass(frozen=True, slots=True, eq=False)
class _HeadTensors:
    """What heads read: [sequences, value_heads, tokens, ...]; queries and keys are repeated."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    decay: Tensor  # logarithms [sequences, value_heads, tokens]
    beta: Tensor  # [sequences, value_heads, tokens]

    def take(self, tokens: slice) -> "_HeadTensors":
        """Return some tokens."""
        return _HeadTensors(
            self.queries[:, :, tokens],
            self.keys[:, :, tokens],
            self.values[:, :, tokens],
            self.decay[:, :, tokens],
            self.beta[:, :, tokens],
        )


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNet:
    """The heads of a layer, and its linear layers."""

    config: DeltaNetConfig
    inputs: tuple[Linear, ...]
    output: Linear
    kernel: Tensor  # [kernel, channels]
    decay: Tensor  # [value_heads]
    decay_bias: Tensor  # [value_heads]
    norm: Tensor  # [value_dim]
    eps: float

    def apply_inputs(self, x: Tensor, plans: LinearPlans) -> Tensor:
        """Apply the linear layers of the input: [rows, hidden] -> [rows, inputs]."""
        return torch.cat([layer(x, plans) for layer in self.inputs], dim=-1)

    def __call__(self, made: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Read tokens [sequences, tokens, inputs] after those of states.

        Returns [sequences, tokens, values] and the states after them.
        """
        net, (sequences, tokens, _) = self.config, made.shape
        begin, place = net.channels + net.values, net.conv_numbers
        earlier = states[:, :place].view(sequences, net.kernel - 1, net.channels)
        window = torch.cat((earlier, made[..., : net.channels]), dim=1)
        heads = self._split_heads(self._convolve(window, tokens), made[..., begin:])
        matrix = states[:, place:].view(sequences, net.value_heads, net.key_dim, net.value_dim)
        parts = []
        for first in range(0, tokens, SEGMENT_TOKENS):
            part, matrix = _read_segment(heads.take(slice(first, first + SEGMENT_TOKENS)), matrix)
            parts.append(part)
        out = torch.cat(parts, dim=2).transpose(1, 2)  # [sequences, tokens, heads, value_dim]
        gate = made[..., net.channels : begin].reshape(out.shape)
        out = F.rms_norm(out, self.norm.shape, self.norm, self.eps) * F.silu(gate)
        state = torch.cat((window[:, tokens:].flatten(1), matrix.flatten(1)), dim=1)
        return out.flatten(2), state

    def _convolve(self, window: Tensor, tokens: int) -> Tensor:
        """Return ``silu`` of the weighted sums of inputs: [sequences, tokens, channels]."""
        found = window[:, :tokens] * self.kernel[0]
        for place in range(1, len(self.kernel)):
            found = found + window[:, place : place + tokens] * self.kernel[place]
        return F.silu(found)

    def _split_heads(self, mixed: Tensor, gates: Tensor) -> _HeadTensors:
        net, shape = self.config, mixed.shape[:2]
        queries, keys, values = torch.split(mixed, [net.keys, net.keys, net.values], -1)
        shares = net.value_heads // net.key_heads

        def norm(x: Tensor) -> Tensor:
            heads = x.reshape(*shape, net.key_heads, net.key_dim)
            normed = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _NORM_EPS)
            return normed.repeat_interleave(shares, dim=2).transpose(1, 2)

        beta, shifted = torch.split(gates, [net.value_heads, net.value_heads], -1)
        return _HeadTensors(
            queries=norm(queries) * net.key_dim**-0.5,
            keys=norm(keys),
            values=values.reshape(*shape, net.value_heads, net.value_dim).transpose(1, 2),
            decay=(F.softplus(shifted + self.decay_bias) * -self.decay).transpose(1, 2),
            beta=beta.sigmoid().transpose(1, 2),
        )


def build_delta_net(
    config: DeltaNetConfig, tensors: Mapping[str, Tensor], layer: str, *, eps: float
) -> DeltaNet:
    """Return the DeltaNet of a layer by its prefix; ``eps`` is that of its norm."""
    name = f"{layer}.linear_attn"
    *inputs, output = config.list_linear_shapes(1)
    return DeltaNet(
        config,
        inputs=tuple(make_linear(tensors, f"{layer}.{module}") for module in inputs),
        output=make_linear(tensors, f"{layer}.{output}"),
        kernel=tensors[f"{name}.conv1d.weight"][:, 0].T.contiguous(),
        decay=tensors[f"{name}.A_log"].exp(),
        decay_bias=tensors[f"{name}.dt_bias"],
        norm=tensors[f"{name}.norm.weight"],
        eps=eps,
    )


def estimate_delta_net_floats(config: DeltaNetConfig, *, tokens: int, sequences: int = 1) -> int:
    """Return how many float32 values a layer needs for a pass, at most."""
    shares, segment = config.value_heads // config.key_heads, min(tokens, SEGMENT_TOKENS)
    token = 7 * config.channels + (4 + 4 * shares) * config.keys + 8 * config.values
    token += 12 * config.value_heads
    heads = segment * (6 * segment + 6 * (config.key_dim + config.value_dim))
    state = 5 * config.state_shape[1]
    return sequences * (tokens * token + config.value_heads * heads + state)


def _read_segment(heads: _HeadTensors, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Read some tokens; return [sequences, heads, tokens, value_dim], and the new matrices."""
    total = heads.decay.cumsum(-1)  # logarithms of the decay since the segment began
    grown, beta = total.exp()[..., None], heads.beta[..., None]
    fresh = (heads.values - (heads.keys * grown) @ matrix) * beta
    scores = heads.queries @ heads.keys.transpose(-1, -2)
    tokens = total.shape[-1]
    if tokens > 1:
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=total.device).triu(1)
        between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
        scores = scores * between  # times the decay from one token to a later one
        system = (heads.keys * beta) @ heads.keys.transpose(-1, -2) * between
        fresh = torch.linalg.solve_triangular(system, fresh, upper=False, unitriangular=True)
    out = (heads.queries * grown) @ matrix + scores @ fresh
    left = heads.keys * (total[..., -1:] - total).exp()[..., None]
    return out, matrix * grown[:, :, -1:] + left.transpose(-1, -2) @ fresh
