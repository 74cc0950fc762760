"""The operations of the plain decoder: linear layers with a plan, norms and attention.

Everything is float32: [tokens, features] in C order, or [heads, tokens, head_dim]. Matrices may be
the bits of bfloat16: some rows at a time are widened, which is exact, so both dtypes meet the same
activations. A plan changes a layer to ``y = d * (W (u * x)) + B (A x) + e * b`` (`adapters.steps`).

Overflow of `np.exp` is expected (`silu`): callers ignore it, once per pass.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from expertctl.engine.adapters.steps import Deltas, LinearDelta
from expertctl.engine.arrays import AnyArray, FloatArray, widen
from expertctl.engine.cpu.plain_weights import StoredMatrix, WeightTensors

WIDENED_NUMBERS = 1 << 16
"""Numbers of a bfloat16 matrix that are widened at once: they and their product stay in a cache."""
MAX_SCORES = 1 << 18
"""Attention scores of all heads that are in memory at once, unless one token has more."""
_FLOAT_BYTES, _BLOCK_BYTES = 4, 512
_NO_CHANGE: LinearDelta[FloatArray] = LinearDelta()


@dataclass(frozen=True, slots=True, eq=False)
class StackedLinear:
    """Linear layers with the same input as one matrix [sum of outputs, in], and their biases."""

    modules: tuple[str, ...]
    weight: FloatArray | StoredMatrix
    bias: AnyArray | None  # [sum of outputs]
    ends: tuple[int, ...]  # the row after the last of each module

    def __call__(self, x: AnyArray, deltas: Deltas) -> AnyArray:
        """Apply all layers with the changes of a plan: [tokens, in] -> [tokens, sum of outputs]."""
        y = np.empty((len(x), len(self.weight)), np.float32)
        if deltas and any(module in deltas for module in self.modules):
            self._apply_changes(x, deltas, y)
            return y
        multiply(x, self.weight, y)
        if self.bias is not None:
            y += self.bias
        return y

    def _apply_changes(self, x: AnyArray, deltas: Deltas, y: AnyArray) -> None:
        changes = [deltas.get(module, _NO_CHANGE) for module in self.modules]
        assert not isinstance(self.weight, StoredMatrix), "plans need weights in memory"
        together = all(change.input_scale is None for change in changes)
        if together:
            multiply(x, self.weight, y)
        for change, (begin, end) in zip(changes, pairwise((0, *self.ends)), strict=True):
            part = y[:, begin:end]
            if not together:
                scaled = x if change.input_scale is None else x * widen(change.input_scale)
                multiply(scaled, self.weight[begin:end], part)
            _add_change(x, change, None if self.bias is None else self.bias[begin:end], part)


def stack_linear(weights: WeightTensors, modules: Sequence[str]) -> StackedLinear:
    """Return linear layers of a base that follow each other, by their module names."""
    names = [f"{module}.weight" for module in modules]
    biases = [f"{module}.bias" for module in modules]
    rows = np.cumsum([len(weights.tensors[name]) for name in names]).tolist()
    bias = weights.stack(biases) if biases[0] in weights.tensors else None
    return StackedLinear(tuple(modules), weights.stack(names), bias, tuple(rows))


def multiply(x: AnyArray, weight: FloatArray | StoredMatrix, out: AnyArray) -> None:
    """Multiply by a matrix [out, in], float32 or bfloat16: [tokens, in] -> [tokens, out]."""
    if isinstance(weight, StoredMatrix):
        begin = 0
        for rows in weight.iter_portions():
            np.matmul(x, rows.T, out=out[:, begin : begin + len(rows)])
            begin += len(rows)
        return
    if weight.dtype == np.float32:
        np.matmul(x, weight.T, out=out)
        return
    height = max(1, WIDENED_NUMBERS // weight.shape[1])
    wide = np.empty((min(height, len(weight)), weight.shape[1]), np.float32)
    for begin in range(0, len(weight), height):
        rows = weight[begin : begin + height]
        part = wide[: len(rows)]
        np.left_shift(rows, 16, out=part.view(np.uint32), dtype=np.uint32)
        np.matmul(x, part.T, out=out[:, begin : begin + height])


def widening_bytes(columns: int, rows: int) -> int:
    """Return the maximum bytes of the widened rows of a bfloat16 matrix."""
    return _FLOAT_BYTES * min(max(WIDENED_NUMBERS, columns), columns * rows)


def plan_scratch_bytes(inputs: int, outputs: int, tokens: int, *, width: int) -> int:
    """Return the maximum bytes that a linear layer needs for a plan of a width; 0: no plan.

    They are those of scaled inputs, ``A x`` and ``B (A x)``.
    """
    return _FLOAT_BYTES * tokens * (inputs + width + outputs) if width else 0


def _add_change(
    x: AnyArray, change: LinearDelta[FloatArray], bias: AnyArray | None, y: AnyArray
) -> None:
    """Apply all of a change except its input scale to ``W (u * x)``, in place."""
    if change.output_scale is not None:
        y *= widen(change.output_scale)
    if change.a is not None and change.b is not None:
        y += np.matmul(np.matmul(x, widen(change.a).T), widen(change.b).T)
    if bias is not None:
        y += bias if change.bias_scale is None else bias * widen(change.bias_scale)


def silu_gate(gate: AnyArray, up: AnyArray) -> AnyArray:
    """Return ``silu(gate) * up``."""
    found = np.negative(gate)
    np.exp(found, out=found)  # overflows to ∞, and x / (1 + ∞) is correctly 0
    found += 1
    np.divide(gate, found, out=found)
    found *= up
    return found


def sigmoid(x: AnyArray) -> AnyArray:
    """Return ``1 / (1 + exp(-x))``."""
    found = np.negative(x)
    np.exp(found, out=found)
    found += 1
    return np.reciprocal(found, out=found)


def normalise(x: AnyArray, weight: AnyArray, eps: float, out: AnyArray | None = None) -> AnyArray:
    """Divide vectors [..., width] by their root mean square and multiply them by weights."""
    squares = np.matmul(x[..., None, :], x[..., :, None])[..., 0]  # [..., 1]
    squares /= x.shape[-1]
    squares += eps
    np.sqrt(squares, out=squares)
    out = np.divide(x, squares, out=out)
    out *= weight
    return out


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """Root mean square normalisation; ``weight`` is [width], or [heads, width]."""

    weight: AnyArray
    eps: float

    def __call__(self, x: AnyArray, out: AnyArray | None = None) -> AnyArray:
        """Normalise vectors [..., width]."""
        return normalise(x, self.weight, self.eps, out=out)


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """Layer normalisation; ``weight`` is [width], or [heads, width]."""

    weight: AnyArray
    bias: AnyArray | None
    eps: float

    def __call__(self, x: AnyArray, out: AnyArray | None = None) -> AnyArray:
        """Normalise vectors [..., width]."""
        found: AnyArray = np.subtract(x, x.mean(axis=-1, keepdims=True), out=out)
        normalise(found, self.weight, self.eps, out=found)
        if self.bias is not None:
            found += self.bias
        return found


Norm = RmsNorm | LayerNorm


def gelu_gate(gate: AnyArray, up: AnyArray | None) -> AnyArray:
    """Return ``gelu(gate) * up``, or ``gelu(gate)``."""
    scaled = gate * np.float32(math.sqrt(0.5))
    return _multiply_gate(compute_erf(scaled), gate, up)


def gelu_tanh_gate(gate: AnyArray, up: AnyArray | None) -> AnyArray:
    """Return ``gelu(gate) * up``, or ``gelu(gate)``, with the approximation of `gelu` by tanh."""
    found = gate * gate
    found *= np.float32(0.044715)
    found += 1
    found *= gate
    found *= np.float32(math.sqrt(2 / math.pi))
    return _multiply_gate(np.tanh(found, out=found), gate, up)


def clamped_gate(gate: AnyArray, up: AnyArray, *, limit: float, alpha: float) -> AnyArray:
    """Return ``gate * sigmoid(alpha * gate) * (up + 1)`` of limited numbers, see `ClampedGate`."""
    gate = np.minimum(gate, np.float32(limit))
    found = np.multiply(gate, np.float32(-alpha))
    np.exp(found, out=found)
    found += 1
    np.divide(gate, found, out=found)
    up = np.clip(up, np.float32(-limit), np.float32(limit))
    up += 1
    found *= up
    return found


def relu_gate(gate: AnyArray, up: AnyArray | None) -> AnyArray:
    """Return ``relu(gate) * up``, or ``relu(gate)``."""
    found: AnyArray = np.maximum(gate, 0)
    if up is not None:
        found *= up
    return found


def silu_or_gate(gate: AnyArray, up: AnyArray | None) -> AnyArray:
    """Return ``silu(gate) * up``, or ``silu(gate)``."""
    return silu_gate(gate, np.ones_like(gate) if up is None else up)


GATES = {
    "silu": silu_or_gate,
    "gelu": gelu_gate,
    "gelu_tanh": gelu_tanh_gate,
    "relu": relu_gate,
}
"""The activations by name."""


def _multiply_gate(part: AnyArray, gate: AnyArray, up: AnyArray | None) -> AnyArray:
    """Return ``0.5 * (1 + part) * gate * up`` in place of the part."""
    part += 1
    part *= gate
    part *= np.float32(0.5)
    if up is not None:
        part *= up
    return part


_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def compute_erf(x: FloatArray) -> FloatArray:
    """Return the error function with an error below 5e-7 (Abramowitz and Stegun, 7.1.26)."""
    size = np.abs(x)
    t = np.reciprocal(size * np.float32(0.3275911) + np.float32(1))
    found = np.full_like(t, _ERF[0])
    for coefficient in _ERF[1:]:
        found *= t
        found += np.float32(coefficient)
    found *= t
    np.multiply(size, size, out=size)
    np.exp(np.negative(size, out=size), out=size)
    found *= size
    np.subtract(1, found, out=found)
    signed: FloatArray = np.copysign(found, x)
    return signed


@dataclass(frozen=True, slots=True, eq=False)
class QueryBlock:
    """Some tokens of a pass that attend together: rows [begin, end), and keys from ``first`` on.

    The last keys are those of the tokens themselves. Masks are added to scores: ``causal`` to those
    of the last ``end - begin`` keys, ``window`` to those of the first ones.
    """

    begin: int
    end: int
    first: int
    last: int
    causal: AnyArray | None  # [tokens, tokens]
    window: AnyArray | None  # [tokens, keys]


def split_queries(
    start: int, tokens: int, window: int | None, *, heads: int, begin: int = 0
) -> list[QueryBlock]:
    """Return the blocks of ``tokens`` tokens at position ``start``, so many that scores fit.

    Row 0 is the token at ``start``; the rows before ``begin`` are left out.
    """
    height = max(1, MAX_SCORES // (heads * (start + tokens)))
    return [
        _make_query_block(start, first, min(first + height, tokens), window)
        for first in range(begin, tokens, height)
    ]


def _make_query_block(start: int, begin: int, end: int, window: int | None) -> QueryBlock:
    rows, last = end - begin, start + end
    first = 0 if window is None else max(0, start + begin + 1 - window)
    causal = _make_mask(rows, rows, 1) if rows > 1 else None
    unseen = 0 if window is None else last - window - first  # keys that the last row cannot see
    narrow = None
    if window is not None and unseen > 0:
        narrow = _make_mask(rows, unseen, start + begin - window - first, below=True)
    return QueryBlock(begin, end, first, last, causal, narrow)


def _make_mask(rows: int, columns: int, diagonal: int, *, below: bool = False) -> AnyArray:
    """Return -∞ where ``column >= row + diagonal``, or ``<=`` if ``below``; 0 elsewhere."""
    distance = np.arange(columns) - np.arange(rows)[:, None]
    hidden = distance <= diagonal if below else distance >= diagonal
    return np.where(hidden, np.float32(-np.inf), np.float32(0))


def query_blocks_bytes(heads: int, tokens: int, window: int | None) -> int:
    """Return the maximum bytes of the masks of all blocks of a pass, while they are made."""
    rows = min(tokens, max(1, MAX_SCORES // (heads * tokens)))
    kept = _FLOAT_BYTES * rows * tokens * (1 if window is None else 2)
    return kept + 4 * _FLOAT_BYTES * rows * rows + _BLOCK_BYTES * -(-tokens // rows)


def attend(
    queries: AnyArray,
    keys: AnyArray,
    values: AnyArray,
    block: QueryBlock,
    out: AnyArray,
    *,
    cap: float | None = None,
    sinks: AnyArray | None = None,
) -> None:
    """Compute grouped-query attention of one block of tokens.

    Queries [tokens, heads, dims] are those of the block and scaled by ``dims ** -0.5``; keys and
    values [kv_heads, length, dims] are all that there are up to ``block.last``, from position
    ``block.first`` on. ``out`` is [tokens, heads, dims]. Scores stay between ``-cap`` and ``cap``.
    ``sinks`` [heads] are scores of no key, which share the softmax.
    """
    tokens, heads, dims = queries.shape
    shape = (len(keys), heads // len(keys), tokens, dims)
    grouped = queries.reshape(tokens, *shape[:2], dims).transpose(1, 2, 0, 3)
    scores = np.matmul(grouped.reshape(len(keys), -1, dims), keys.swapaxes(1, 2))
    if cap is not None:
        cap_softly(scores, cap)
    if tokens > 1:
        masked = scores.reshape(*shape[:3], -1)
        if block.causal is not None:
            masked[..., -tokens:] += block.causal
        if block.window is not None:
            masked[..., : block.window.shape[1]] += block.window
    largest = np.maximum.reduce(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = np.repeat(sinks.reshape(len(keys), -1), tokens, axis=1)[:, :, None]
        np.maximum(largest, sinks, out=largest)
    scores -= largest
    np.exp(scores, out=scores)
    sums = np.add.reduce(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sums += np.exp(sinks - largest)
    found = np.matmul(scores, values)
    found /= sums
    out.reshape(tokens, *shape[:2], dims)[...] = found.reshape(shape).transpose(2, 0, 1, 3)


def cap_softly(numbers: AnyArray, cap: float) -> None:
    """Replace ``x`` by ``cap * tanh(x / cap)``."""
    numbers /= np.float32(cap)
    np.tanh(numbers, out=numbers)
    numbers *= np.float32(cap)


def attention_scratch_bytes(heads: int, dims: int, tokens: int, length: int) -> int:
    """Return the maximum bytes that `attend` needs for a block besides its output."""
    rows = min(tokens, max(1, MAX_SCORES // (heads * tokens)))
    scores = max(min(MAX_SCORES, heads * tokens * length), heads * length)
    return _FLOAT_BYTES * (scores + 2 * rows * heads * (dims + 1))
