"""The operations of the torch decoder.

- A plan changes a linear layer as `adapters.steps` says. Activations keep their dtype: they are
  cast only for a product with a weight of another one, and adapters are cast to theirs.
- Attention is causal; a window of W lets a token see W tokens, itself included. The mask of a step
  is computed once per window size, not once per layer (`make_attention_mask`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from expertctl.engine.adapters.steps import LinearDelta
from expertctl.package.architectures import Activation, NormKind
from expertctl.package.attention_config import (
    AlphaScaling,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    RopeConfig,
    YarnScaling,
)
from expertctl.package.block_config import ClampedGate, RopeKind
from expertctl.package.model_config import ModelConfig
from expertctl.package.varied_layers import ProportionalScaling

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
    """An MLP, of a dense layer or of one routed expert: ``down(silu(gate(x)) * up(x))``.

    Dense ones may have another activation, and no gate: ``down(activation(up(x)))``. With a
    ``clamped`` gate it computes that in place of ``silu(gate) * up``.
    """

    gate: Linear | None
    up: Linear
    down: Linear
    activation: Activation = "silu"
    clamped: ClampedGate | None = None

    def __call__(self, x: Tensor, plans: LinearPlans) -> Tensor:
        """Apply it with the changes of its plans: [tokens, hidden] -> [tokens, hidden]."""
        activate = _ACTIVATIONS[self.activation]
        if self.gate is None:
            return self.down(activate(self.up(x, plans)), plans)
        gate, up = self.gate(x, plans), self.up(x, plans)  # [tokens, intermediate]
        if self.clamped is not None:
            return self.down(apply_clamped_gate(gate, up, self.clamped), plans)
        return self.down(activate(gate) * up, plans)

    def multiply(self, x: Tensor, factors: Tensor, plans: LinearPlans) -> Tensor:
        """Apply one without a gate, with factors [tokens, intermediate] on its inner numbers."""
        inner = _ACTIVATIONS[self.activation](self.up(x, plans))
        return self.down(inner * factors, plans)


def apply_clamped_gate(gate: Tensor, up: Tensor, rule: ClampedGate) -> Tensor:
    """Return ``gate * sigmoid(alpha * gate) * (up + 1)`` of limited numbers."""
    gate, up = gate.clamp(max=rule.limit), up.clamp(-rule.limit, rule.limit)
    return gate * (gate * rule.alpha).sigmoid() * (up + 1)


_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def make_feed_forward(
    tensors: Mapping[str, Tensor],
    module: str,
    *,
    activation: Activation = "silu",
    gated: bool = True,
    clamped: ClampedGate | None = None,
) -> FeedForward:
    """Return the MLP whose matrices are below a module name."""
    gate = make_linear(tensors, f"{module}.gate_proj") if gated else None
    up, down = (make_linear(tensors, f"{module}.{name}") for name in ("up_proj", "down_proj"))
    return FeedForward(gate, up, down, activation, clamped)


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """A norm of the last dimension; the weight may be [heads, width]."""

    kind: NormKind
    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise vectors [..., width]."""
        shape, weight = self.weight.shape[-1:], self.weight
        if self.kind in ("rms", "rms_plus_one"):
            if weight.dtype == x.dtype and weight.ndim == 1:
                return F.rms_norm(x, shape, weight, self.eps)
            return F.rms_norm(x, shape, None, self.eps) * weight  # or seven kernels, not two
        made = F.layer_norm(x, shape, None, None, self.eps) * weight
        return made if self.bias is None else made + self.bias


def make_norm(kind: NormKind, weight: Tensor, bias: Tensor | None, eps: float) -> NormWeights:
    """Return a norm by its stored weights."""
    return NormWeights(kind, weight + 1 if kind == "rms_plus_one" else weight, bias, eps)


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


@dataclass(frozen=True, slots=True, eq=False)
class ScoreChange:
    """What changes the scores of attention that fused kernels do not know."""

    cap: float | None
    """Scores become ``cap * tanh(score / cap)``."""
    sinks: Tensor | None  # [heads]
    """Scores of no key, which share the softmax."""


def changed_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, change: ScoreChange
) -> Tensor:
    """Attend with changed scores: [..., kv_heads, queries, dim] -> the same shape.

    ``keys`` and ``values`` are [..., kv_heads, length, dim]; a bool mask is [..., queries, length].
    The queries are those of several tokens for each head in turn.
    """
    scores = torch.matmul(queries.float(), keys.float().transpose(-1, -2))
    scores *= queries.shape[-1] ** -0.5
    if change.cap is not None:
        scores.div_(change.cap).tanh_().mul_(change.cap)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    if change.sinks is None:
        return torch.matmul(scores.softmax(-1), values.float())
    sinks = change.sinks.float().view(keys.shape[-3], -1)  # [kv_heads, heads that share keys]
    sinks = sinks.repeat_interleave(queries.shape[-2] // sinks.shape[1], dim=1)[..., None]
    scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return torch.matmul(scores.softmax(-1)[..., :-1], values.float())


def attend_changed(
    queries: Tensor, keys: Tensor, values: Tensor, view: AttentionMask, change: ScoreChange
) -> Tensor:
    """Compute `scaled_dot_product_attention` with changed scores."""
    (heads, tokens, width), shares = queries.shape, queries.shape[0] // keys.shape[0]
    mask, length = view.mask, keys.shape[1] - view.first
    if view.causal:
        mask = torch.ones(tokens, length, dtype=torch.bool, device=keys.device).tril()
    out = changed_attention(
        queries.reshape(-1, shares * tokens, width),
        keys[:, view.first :],
        values[:, view.first :],
        None if mask is None else mask.repeat(shares, 1),
        change,
    )
    return out.reshape(heads, tokens, width).transpose(0, 1).flatten(1)


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
        case ProportionalScaling(pairs, factor):
            plain[pairs:] = 0
            return plain / factor


def compute_rope_table(
    config: RopeConfig, positions: int, *, device: torch.device | str, interleaved: bool = False
) -> Tensor:
    """Return cosines and sines, float32 [2, positions, dims], each half of the dims repeated.

    If dims are interleaved, each number is repeated in its place.
    """
    angles = torch.outer(
        torch.arange(positions, dtype=torch.float32, device=device),
        compute_inverse_frequencies(config, device=device),
    )
    half = config.dims // 2
    table = torch.empty(2, positions, config.dims, device=device)
    for rows, function in zip(table, (torch.cos, torch.sin), strict=True):
        rows[:, :half] = function(angles)
        rows[:, half:] = rows[:, :half]
    if interleaved:
        table = table[:, :, :half].repeat_interleave(2, dim=-1)
    return table.mul_(config.attention)


@dataclass(frozen=True, slots=True, eq=False)
class RotationTables:
    """Cosines and sines of rotary positions, [2, rows, …, dims], of each kind of layer."""

    tables: Mapping[RopeKind, Tensor]
    interleaved: bool

    @classmethod
    def compute(
        cls, config: ModelConfig, positions: int, *, device: torch.device | str
    ) -> "RotationTables":
        """Return the tables of the first positions."""
        interleaved = config.block.interleaved
        tables = {
            kind: compute_rope_table(rope, positions, device=device, interleaved=interleaved)
            for kind, rope in list_ropes(config).items()
        }
        return cls(tables, interleaved)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(table.nbytes for table in self.tables.values())

    def slice(self, rows: slice) -> "RotationTables":
        """Return some rows, as views."""
        found = {kind: table[:, rows] for kind, table in self.tables.items()}
        return RotationTables(found, self.interleaved)

    def select(self, rows: Tensor) -> "RotationTables":
        """Return rows by their numbers for vectors [rows, heads, dims]."""
        found = {
            kind: table.index_select(1, rows)[:, :, None] for kind, table in self.tables.items()
        }
        return RotationTables(found, self.interleaved)

    def rotate(self, x: Tensor, kind: RopeKind) -> Tensor:
        """Rotate vectors, unless their layer has no rotation."""
        table = self.tables.get(kind)
        if table is None:
            return x
        cos, sin = table
        if cos.shape[-1] == x.shape[-1] and not self.interleaved:
            return apply_rope(x, cos, sin)
        return apply_partial_rope(x, cos, sin, interleaved=self.interleaved)


def list_ropes(config: ModelConfig) -> dict[RopeKind, RopeConfig]:
    """Return the frequencies of every kind of layer that rotates."""
    kinds = {config.block.get_rope_kind(layer) for layer in range(config.layers)}
    known: dict[RopeKind, RopeConfig | None] = {
        "global": config.rope,
        "local": config.block.local_rope,
    }
    return {kind: rope for kind, rope in known.items() if kind in kinds and rope is not None}


def round_up_positions(length: int) -> int:
    """Return the number of positions of a table that must cover ``length``."""
    return 1 << (length - 1).bit_length()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate vectors by their positions: [heads, tokens, dims] with tables of [tokens, dims]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def apply_partial_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first dimensions of vectors, as many as the tables have; see `apply_rope`."""
    part, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        swapped = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
        turned = part * cos + swapped * sin
    else:
        turned = apply_rope(part, cos, sin)
    return torch.cat((turned, rest), dim=-1)


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
