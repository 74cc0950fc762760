"""The operations of the torch decoder.

- A plan changes a linear layer as `adapters.steps` says. Activations keep their dtype: they are
  cast only for a product with a weight of another one, and adapters are cast to theirs.
- Attention is causal; a window of W lets a token see W tokens, itself included. The mask of a step
  is computed once per window size, not once per layer (`make_attention_mask`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from expertctl.engine.adapters.steps import LinearDelta
from expertctl.package.attention_config import (
    AlphaScaling,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    RopeConfig,
    YarnScaling,
)

TorchDelta = LinearDelta[Tensor]
TorchDeltas = Mapping[str, TorchDelta]
"""Changes of a plan by module name: ``model.layers.0.self_attn.q_proj``, …, ``lm_head``."""


class PlanDeltas(dict[str, TorchDelta]):
    """The changes of a compiled plan, which can be referenced weakly, unlike other mappings."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """One linear layer: its module name, weights [out, in] and bias [out]."""

    module: str
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, plans: "LinearPlans") -> Tensor:
        """Apply the layer with the changes of its plans: [tokens, in] -> [tokens, out]."""
        if isinstance(plans, Mapping):
            return apply_linear(x, self.weight, self.bias, plans.get(self.module))
        return plans.apply_linear(x, self)


class RowPlans(Protocol):
    """The plan of each row of a batch."""

    def apply_linear(self, x: Tensor, layer: Linear) -> Tensor:
        """Apply a linear layer with the plan of each row: [rows, in] -> [rows, out]."""
        ...


LinearPlans = TorchDeltas | RowPlans
"""One plan for all tokens, or one for each."""


def make_linear(tensors: Mapping[str, Tensor], module: str) -> Linear:
    """Return a linear layer of a base by its module name."""
    return Linear(module, tensors[f"{module}.weight"], tensors.get(f"{module}.bias"))


def apply_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, delta: TorchDelta | None
) -> Tensor:
    """Apply a linear layer with the change of a plan: [tokens, in] -> [tokens, out]."""
    if delta is None:
        return _matmul(x, weight, bias)
    y = _apply_scaled(x, weight, bias, delta)
    if delta.a is None or delta.b is None:
        return y
    inner = F.linear(x, delta.a.to(x.dtype))  # [tokens, rank]
    return torch.addmm(y, inner, delta.b.to(x.dtype).T)


def _apply_scaled(x: Tensor, weight: Tensor, bias: Tensor | None, delta: TorchDelta) -> Tensor:
    scaled = x if delta.input_scale is None else x * delta.input_scale
    if bias is not None and delta.bias_scale is not None:
        bias = bias * delta.bias_scale
    if delta.output_scale is None:
        return _matmul(scaled, weight, bias)
    y = _matmul(scaled, weight, None) * delta.output_scale
    return y if bias is None else y + bias


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    y = F.linear(x.to(weight.dtype), weight).to(x.dtype)
    return y if bias is None else y + bias


@dataclass(frozen=True, slots=True, eq=False)
class FeedForward:
    """A gated MLP, of a dense layer or of one routed expert: ``down(silu(gate(x)) * up(x))``."""

    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, x: Tensor, plans: LinearPlans) -> Tensor:
        """Apply it with the changes of its plans: [tokens, hidden] -> [tokens, hidden]."""
        gated = F.silu(self.gate(x, plans)) * self.up(x, plans)  # [tokens, intermediate]
        return self.down(gated, plans)


def make_feed_forward(tensors: Mapping[str, Tensor], module: str) -> FeedForward:
    """Return the MLP whose three matrices are below a module name."""
    gate, up, down = (
        make_linear(tensors, f"{module}.{name}") for name in ("gate_proj", "up_proj", "down_proj")
    )
    return FeedForward(gate, up, down)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMask:
    """The keys that a step attends to: from ``first`` on, as far as ``mask`` allows."""

    first: int
    mask: Tensor | None  # bool [tokens, keys]; None: all, or causal
    causal: bool


def make_attention_mask(
    start: int, tokens: int, window: int | None, *, device: torch.device | str = "cpu"
) -> AttentionMask:
    """Return the mask of ``tokens`` new tokens after ``start`` earlier ones."""
    first = 0 if window is None else max(0, start + 1 - window)
    if tokens == 1:
        return AttentionMask(first, None, causal=False)
    keys = torch.arange(first, start + tokens, device=device)
    queries = torch.arange(start, start + tokens, device=device)[:, None]
    if window is not None and window < start + tokens:
        return AttentionMask(first, (keys <= queries) & (keys > queries - window), causal=False)
    if start == 0:
        return AttentionMask(0, None, causal=True)
    return AttentionMask(first, keys <= queries, causal=False)


def scaled_dot_product_attention(
    queries: Tensor, keys: Tensor, values: Tensor, view: AttentionMask
) -> Tensor:
    """Return [tokens, heads * dim] from queries [heads, tokens, dim], keys [kv_heads, length, dim].

    Several query heads share one key head without copies of the keys.
    """
    if queries.is_cuda:
        return grouped_query_attention(queries, keys, values, view)
    out = F.scaled_dot_product_attention(
        queries.to(keys.dtype)[None],
        keys[None, :, view.first :],
        values[None, :, view.first :],
        attn_mask=view.mask,
        is_causal=view.causal,
        enable_gqa=queries.shape[0] != keys.shape[0],
    )
    return out[0].transpose(0, 1).flatten(1).to(queries.dtype)


def grouped_query_attention(
    queries: Tensor, keys: Tensor, values: Tensor, view: AttentionMask
) -> Tensor:
    """Compute `scaled_dot_product_attention` with heads that share keys as tokens of one head.

    No fused CUDA kernel supports both a mask and shared heads; without one, torch would copy the
    keys for each head and keep all scores. Kernels differ in their memory order of heads and
    tokens.
    """
    heads, tokens, width = queries.shape
    shares = heads // keys.shape[0]
    mask = view.mask
    if view.causal:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=queries.device).tril()
    out = F.scaled_dot_product_attention(
        queries.to(keys.dtype).reshape(1, keys.shape[0], shares * tokens, width),
        keys[None, :, view.first :],
        values[None, :, view.first :],
        attn_mask=None if mask is None else mask.repeat(shares, 1),
    )
    split = out.view(-1, shares, tokens, width)  # by key head; a view whatever their order
    return split.permute(2, 0, 1, 3).flatten(1).to(queries.dtype)


def compute_inverse_frequencies(
    config: RopeConfig, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the angle per position of each pair of dimensions: float32, [dims / 2]."""
    exponents = torch.arange(0, config.dims, 2, dtype=torch.float32, device=device) / config.dims
    plain = 1.0 / (config.theta**exponents)
    match config.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _scale_llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _scale_yarn(plain, scaling, config)
        case AlphaScaling(alpha):
            stretched = config.theta * alpha ** (config.dims / (config.dims - 2))
            return torch.reciprocal(stretched**exponents)
        case LongropeScaling() as scaling:
            return plain / torch.tensor(scaling.short, device=device)


def compute_rope_table(config: RopeConfig, positions: int, *, device: torch.device | str) -> Tensor:
    """Return cosines and sines, float32 [2, positions, dims], each half of the dims repeated."""
    angles = torch.outer(
        torch.arange(positions, dtype=torch.float32, device=device),
        compute_inverse_frequencies(config, device=device),
    )
    half = config.dims // 2
    table = torch.empty(2, positions, config.dims, device=device)
    for rows, function in zip(table, (torch.cos, torch.sin), strict=True):
        rows[:, :half] = function(angles)
        rows[:, half:] = rows[:, :half]
    return table.mul_(config.attention)


def round_up_positions(length: int) -> int:
    """Return the number of positions of a table that must cover ``length``."""
    return 1 << (length - 1).bit_length()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate vectors by their positions: [heads, tokens, dims] with tables of [tokens, dims]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _scale_llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Scale as Llama 3.1's reference code does."""
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > scaling.original / scaling.low, plain / scaling.factor, plain)
    smooth = (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low)
    medium = (wavelength >= scaling.original / scaling.high) & (
        wavelength <= scaling.original / scaling.low
    )
    return torch.where(medium, (1 - smooth) * scaled / scaling.factor + smooth * scaled, scaled)


def _scale_yarn(plain: Tensor, scaling: YarnScaling, config: RopeConfig) -> Tensor:
    """Scale as in the YaRN paper (arXiv:2309.00071), section 3."""
    low, high = (
        config.dims
        * math.log(scaling.original / (rotations * 2 * math.pi))
        / (2 * math.log(config.theta))
        for rotations in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dims - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(config.dims // 2, dtype=torch.float32, device=plain.device)
    ramp = ((steps - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)
