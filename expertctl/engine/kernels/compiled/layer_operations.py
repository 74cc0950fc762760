"""Code of the operations of a layer, except matrices and attention."""

import math
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic, register_jitable

from expertctl.engine.arrays import VECTOR_BYTES
from expertctl.engine.kernels.compiled.compiler import KernelFunction
from expertctl.engine.kernels.compiled.llvm_math import exponential
from expertctl.engine.kernels.compiled.memory import (
    float32_to_half_bits,
    float32_view,
    int64_view,
    load_int64s,
    uint16_view,
)
from expertctl.engine.kernels.compiled.simd import SimdBuilder, Value, require_literal
from expertctl.engine.kernels.layer_operations import ACTIVATIONS
from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS, LANES


def normalise_rows(first: int, last: int, arguments: int) -> None:
    """Compute the RMSNorm of rows."""
    rows, stride, weight, width, out, out_stride, eps = load_int64s(arguments, 7)
    for token in range(first, last):
        row = float32_view(rows + token * stride, width)
        normed = float32_view(out + token * out_stride, width)
        rms_norm_row(row, float32_view(weight, width), normed, float32_view(eps, 1)[0])


@numba.njit(fastmath={"reassoc", "contract"})  # vectorises the sum; NaN stays NaN
def rms_norm_row(row: Any, weight: Any, out: Any, eps: Any) -> None:
    """Compute the RMSNorm of one row, in compiled code."""
    total = np.float32(0)
    for k in range(len(row)):
        total += row[k] * row[k]
    factor = np.float32(1) / np.sqrt(total / np.float32(len(row)) + eps)
    for k in range(len(row)):
        out[k] = row[k] * factor * weight[k]


def normalise_vectors(first: int, last: int, arguments: int) -> None:
    """Compute the LayerNorm of vectors that follow each other in rows."""
    rows, stride, count, width, weights, step, bias, out, out_stride, eps = load_int64s(
        arguments, 10
    )
    for token in range(first, last):
        for number in range(count):
            begin = number * width * 4
            row = float32_view(rows + token * stride + begin, width)
            normed = float32_view(out + token * out_stride + begin, width)
            weight = float32_view(weights + number * step, width)
            layer_norm_row(row, weight, normed, float32_view(eps, 1)[0])
            if bias != 0:
                shift = float32_view(bias, width)
                for k in range(width):
                    normed[k] += shift[k]


@numba.njit(fastmath={"reassoc", "contract"})
def layer_norm_row(row: Any, weight: Any, out: Any, eps: Any) -> None:
    """Compute the LayerNorm of one row without a bias, in compiled code."""
    total, squares = np.float32(0), np.float32(0)
    for k in range(len(row)):
        total += row[k]
    mean = total / np.float32(len(row))
    for k in range(len(row)):
        squares += (row[k] - mean) * (row[k] - mean)
    factor = np.float32(1) / np.sqrt(squares / np.float32(len(row)) + eps)
    for k in range(len(row)):
        out[k] = (row[k] - mean) * factor * weight[k]


def apply_swiglu(first: int, last: int, arguments: int) -> None:
    """Compute ``gate * sigmoid(gate) * up`` for rows."""
    gates, stride, ups, up_stride, outs, out_stride, width = load_int64s(arguments, 7)
    for token in range(first, last):
        gate, up, out = gates + token * stride, ups + token * up_stride, outs + token * out_stride
        whole = width // LANES * LANES
        vector_swiglu(gate, up, out, width // LANES)
        _swiglu_scalar(
            float32_view(gate, width)[whole:], float32_view(up, width)[whole:],
            float32_view(out, width)[whole:],
        )  # fmt: skip


@intrinsic
def vector_swiglu(_context: Any, gate: Any, up: Any, out: Any, vectors: Any) -> Any:
    """Do the same as `_swiglu_scalar`, with the same bits, for whole vectors at these addresses."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (gates, ups, outs, count) = SimdBuilder(builder), values
        with lanes.loop(count) as vector:
            gate, up, out = (lanes.offset(row, vector, VECTOR_BYTES) for row in (gates, ups, outs))
            numbers = lanes.load_floats(gate)
            minus = lanes.exp_floats(lanes.subtract_floats(lanes.float_constant(0), numbers))
            share = lanes.divide_floats(numbers, lanes.add_floats(lanes.float_constant(1), minus))
            lanes.store_floats(lanes.multiply_floats(share, lanes.load_floats(up)), out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@numba.njit
def _swiglu_scalar(gate: Any, up: Any, out: Any) -> None:
    for k in range(len(gate)):
        out[k] = gate[k] / (np.float32(1) + exponential(-gate[k])) * up[k]


def make_gate(activation: int, gated: int) -> KernelFunction:
    """Return the function of an activation, by its place in `ACTIVATIONS`.

    If ``gated`` is not 0, it is multiplied by the rows ``up``.
    """

    def gate(first: int, last: int, arguments: int) -> None:
        gates, stride, ups, up_stride, outs, out_stride, width = load_int64s(arguments, 7)
        for token in range(first, last):
            vector_gate(
                activation, gated, gates + token * stride, ups + token * up_stride,
                outs + token * out_stride, width // LANES,
            )  # fmt: skip

    return gate


@intrinsic(prefer_literal=True)
def vector_gate(
    _context: Any, activation: Any, gated: Any, gate: Any, up: Any, out: Any, vectors: Any
) -> Any:
    """Apply an activation to whole vectors; the first two operands are compile-time constants."""
    name = ACTIVATIONS[require_literal(activation, "the activation")]
    is_gated = bool(require_literal(gated, "whether it is multiplied"))

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (gates, ups, outs, count) = SimdBuilder(builder), values[2:]
        with lanes.loop(count) as vector:
            gate, up, out = (lanes.offset(row, vector, VECTOR_BYTES) for row in (gates, ups, outs))
            found = _EMITTERS[name](lanes, lanes.load_floats(gate))
            if is_gated:
                found = lanes.multiply_floats(found, lanes.load_floats(up))
            lanes.store_floats(found, out)
        return context.get_dummy_value()

    return types.void(activation, gated, *[types.int64] * 4), emit


def _emit_silu(lanes: SimdBuilder, x: Value) -> Value:
    return _divide_by_exponential(lanes, x, x)


def _emit_gelu_tanh(lanes: SimdBuilder, x: Value) -> Value:
    """Return ``x / (1 + exp(-2 z))``, which is ``x (1 + tanh z) / 2``."""
    inner = lanes.fma(
        lanes.multiply_floats(x, x), lanes.float_constant(0.044715), lanes.float_constant(1)
    )
    twice = lanes.multiply_floats(x, lanes.float_constant(2 * math.sqrt(2 / math.pi)))
    return _divide_by_exponential(lanes, x, lanes.multiply_floats(twice, inner))


def _divide_by_exponential(lanes: SimdBuilder, x: Value, minus_exponent: Value) -> Value:
    exponent = lanes.subtract_floats(lanes.float_constant(0), minus_exponent)
    return lanes.divide_floats(
        x, lanes.add_floats(lanes.float_constant(1), lanes.exp_floats(exponent))
    )


def _emit_gelu(lanes: SimdBuilder, x: Value) -> Value:
    """Return ``x erfc(-x / sqrt 2) / 2``, by the formula 7.1.26 of Abramowitz and Stegun."""
    zero, one, half = (lanes.float_constant(number) for number in (0, 1, 0.5))
    size = lanes.max_floats(x, lanes.subtract_floats(zero, x))
    size = lanes.multiply_floats(size, lanes.float_constant(math.sqrt(0.5)))
    t = lanes.divide_floats(one, lanes.fma(size, lanes.float_constant(0.3275911), one))
    series = lanes.float_constant(_ERF[0])
    for coefficient in _ERF[1:]:
        series = lanes.fma(series, t, lanes.float_constant(coefficient))
    squared = lanes.subtract_floats(zero, lanes.multiply_floats(size, size))
    rest = lanes.multiply_floats(lanes.multiply_floats(series, t), lanes.exp_floats(squared))
    rest = lanes.multiply_floats(rest, half)  # erfc(size) / 2
    share = lanes.select_lanes(lanes.less_than(x, zero), rest, lanes.subtract_floats(one, rest))
    return lanes.multiply_floats(x, share)


def _emit_relu(lanes: SimdBuilder, x: Value) -> Value:
    return lanes.max_floats(lanes.float_constant(0), x)


_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_EMITTERS = {
    "silu": _emit_silu,
    "gelu": _emit_gelu,
    "gelu_tanh": _emit_gelu_tanh,
    "relu": _emit_relu,
}


def add_scaled_rows(first: int, last: int, arguments: int) -> None:
    """Scale rows; add the results, or overwrite with them."""
    rows, stride, outs, out_stride, factor, adds, width = load_int64s(arguments, 7)
    scale = float32_view(factor, 1)[0]
    for token in range(first, last):
        row = float32_view(rows + token * stride, width)
        out = float32_view(outs + token * out_stride, width)
        if adds != 0:
            for k in range(width):
                out[k] += row[k] * scale
        else:
            for k in range(width):
                out[k] = row[k] * scale


def cap_rows(first: int, last: int, arguments: int) -> None:
    """Replace ``x`` by ``cap * tanh(x / cap)`` in whole vectors."""
    rows, stride, cap, vectors = load_int64s(arguments, 4)
    for token in range(first, last):
        vector_cap(rows + token * stride, cap, vectors)


@intrinsic
def vector_cap(_context: Any, row: Any, cap: Any, vectors: Any) -> Any:
    """Cap vectors at ``row`` by the float32 at the address ``cap``."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (row, place, count) = SimdBuilder(builder), values
        cap = lanes.broadcast_float(place)
        with lanes.loop(count) as vector:
            at = lanes.offset(row, vector, VECTOR_BYTES)
            lanes.store_floats(emit_cap(lanes, lanes.load_floats(at), cap), at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), emit


def emit_cap(lanes: SimdBuilder, x: Value, cap: Value) -> Value:
    """Return ``cap * tanh(x / cap)``."""
    return lanes.multiply_floats(_emit_tanh(lanes, lanes.divide_floats(x, cap)), cap)


def _emit_tanh(lanes: SimdBuilder, x: Value) -> Value:
    """Return the hyperbolic tangent; Cephes' polynomial for small numbers. NaN stays NaN."""
    zero, one = lanes.float_constant(0), lanes.float_constant(1)
    squared, series = lanes.multiply_floats(x, x), lanes.float_constant(_TANH[0])
    for coefficient in _TANH[1:]:
        series = lanes.fma(series, squared, lanes.float_constant(coefficient))
    small = lanes.fma(lanes.multiply_floats(series, squared), x, x)
    size = lanes.max_floats(x, lanes.subtract_floats(zero, x))
    power = lanes.exp_floats(lanes.multiply_floats(size, lanes.float_constant(-2)))
    large = lanes.divide_floats(lanes.subtract_floats(one, power), lanes.add_floats(one, power))
    negative = lanes.subtract_floats(zero, large)
    large = lanes.select_lanes(lanes.less_than(x, zero), negative, large)
    return lanes.select_lanes(lanes.less_than(size, lanes.float_constant(0.625)), small, large)


_TANH = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)


def grow_rows(first: int, last: int, arguments: int) -> None:
    """Multiply rows by ``1 + growth * ln(1 + floor(position / period))``."""
    rows, stride, width, positions, growth, period = load_int64s(arguments, 6)
    for token in range(first, last):
        steps = int64_view(positions, token + 1)[token] // period
        factor = np.float32(1 + float32_view(growth, 1)[0] * math.log1p(np.float64(steps)))
        row = float32_view(rows + token * stride, width)
        for k in range(width):
            row[k] *= factor


def apply_affine(first: int, last: int, arguments: int) -> None:
    """Scale and shift rows, each if there is something to do so with."""
    rows, stride, scales, shifts, outs, out_stride, width = load_int64s(arguments, 7)
    for token in range(first, last):
        row = float32_view(rows + token * stride, width)
        out = float32_view(outs + token * out_stride, width)
        if scales != 0:
            scale = float32_view(scales, width)
            for k in range(width):
                out[k] = row[k] * scale[k]
        elif rows != outs:
            for k in range(width):
                out[k] = row[k]
        if shifts != 0:
            shift = float32_view(shifts, width)
            for k in range(width):
                out[k] += shift[k]


def add_gated_rows(first: int, last: int, arguments: int) -> None:
    """Add rows times the sigmoid of their gates."""
    shares, share_stride, rows, stride, outs, out_stride, width = load_int64s(arguments, 7)
    for token in range(first, last):
        logit = float32_view(shares + token * share_stride, 1)[0]
        share = np.float32(1) / (np.float32(1) + exponential(-logit))
        row = float32_view(rows + token * stride, width)
        out = float32_view(outs + token * out_stride, width)
        for k in range(width):
            out[k] += share * row[k]


def write_rope_table(first: int, last: int, arguments: int) -> None:
    """Write the cosines and sines of positions."""
    positions, frequencies, half, factors, out = load_int64s(arguments, 5)
    factor = float32_view(factors, 1)[0]
    for token in range(first, last):
        position = np.float32(int64_view(positions, token + 1)[token])
        row = float32_view(out + token * half * 16, 4 * half)
        for k in range(half):
            # The angle is rounded as in transformers; its cosine is computed in float64.
            angle = np.float64(position * float32_view(frequencies, half)[k])
            cosine, sine = np.float32(math.cos(angle)), np.float32(math.sin(angle))
            row[k] = row[half + k] = cosine * factor
            row[2 * half + k] = row[3 * half + k] = sine * factor


def make_rope_kv_write(half: int) -> KernelFunction:
    """Return the function that writes heads, in float16 if ``half`` is not 0."""

    def heads(first: int, last: int, arguments: int) -> None:
        (
            rows, stride, queries, keys, dim, query_norm, key_norm, eps,
            rotations, positions, tables, key_offset, value_offset, head_bytes, count,
        ) = load_int64s(arguments, 15)  # fmt: skip
        tokens, together = load_int64s(count, 1)[0], (queries + 2 * keys) * KV_PAGE_TOKENS
        for item in range(first, last):
            begin = item // together * KV_PAGE_TOKENS
            high = min(tokens - begin, KV_PAGE_TOKENS)
            token, head = begin + item % together % high, item % together // high
            row = rows + token * stride + head * dim * 4
            if head < queries + keys:
                numbers, norm = float32_view(row, dim), query_norm if head < queries else key_norm
                if norm != 0:
                    rms_norm_row(numbers, float32_view(norm, dim), numbers, float32_view(eps, 1)[0])
                _rotate_head(row, rotations + token * dim * 8, dim)
            if head >= queries:
                _write_head(
                    half, row, dim, head - queries, keys,
                    int64_view(positions, token + 1)[token], int64_view(tables, token + 1)[token],
                    key_offset, value_offset, head_bytes,
                )  # fmt: skip

    return heads


def make_turned_kv_write(half: int) -> KernelFunction:
    """Return the same for other rotations than Llama's: of a part of a head, or of neighbours.

    Norms may follow the rotation.
    """

    def heads(first: int, last: int, arguments: int) -> None:
        (
            rows, stride, queries, keys, dim, query_norm, key_norm, eps,
            rotations, positions, tables, key_offset, value_offset, head_bytes, count,
            turned, interleaved, late,
        ) = load_int64s(arguments, 18)  # fmt: skip
        tokens, together = load_int64s(count, 1)[0], (queries + 2 * keys) * KV_PAGE_TOKENS
        for item in range(first, last):
            begin = item // together * KV_PAGE_TOKENS
            high = min(tokens - begin, KV_PAGE_TOKENS)
            token, head = begin + item % together % high, item % together // high
            row = rows + token * stride + head * dim * 4
            if head < queries + keys:
                numbers, norm = float32_view(row, dim), query_norm if head < queries else key_norm
                if norm != 0 and late == 0:
                    rms_norm_row(numbers, float32_view(norm, dim), numbers, float32_view(eps, 1)[0])
                if interleaved != 0:
                    _rotate_neighbours(row, rotations + token * turned * 8, turned)
                else:
                    _rotate_head(row, rotations + token * turned * 8, turned)
                if norm != 0 and late != 0:
                    rms_norm_row(numbers, float32_view(norm, dim), numbers, float32_view(eps, 1)[0])
            if head >= queries:
                _write_head(
                    half, row, dim, head - queries, keys,
                    int64_view(positions, token + 1)[token], int64_view(tables, token + 1)[token],
                    key_offset, value_offset, head_bytes,
                )  # fmt: skip

    return heads


@register_jitable
def _write_head(
    half: Any, row: Any, dim: Any, head: Any, keys: Any, position: Any, pages: Any,
    key_offset: Any, value_offset: Any, head_bytes: Any,
) -> None:  # fmt: skip
    """Write a head of keys or values into the page of its position; keys come first."""
    table = int64_view(pages, position // KV_PAGE_TOKENS + 1)
    page, slot = table[position // KV_PAGE_TOKENS], position % KV_PAGE_TOKENS
    if head < keys:
        _write_key(half, float32_view(row, dim), page + key_offset + head * head_bytes, slot)
    else:
        place = page + value_offset + (head - keys) * head_bytes
        write_value(half, row, place, slot, dim // LANES)


@register_jitable
def _rotate_neighbours(row: Any, rotation: Any, dim: Any) -> None:
    """Rotate each two neighbours of the first ``dim`` numbers of a head."""
    numbers, turns = float32_view(row, dim), float32_view(rotation, 2 * dim)
    for k in range(dim // 2):
        low, high, cosine, sine = numbers[2 * k], numbers[2 * k + 1], turns[k], turns[dim + k]
        numbers[2 * k] = low * cosine - high * sine
        numbers[2 * k + 1] = high * cosine + low * sine


@register_jitable
def _rotate_head(row: Any, rotation: Any, dim: Any) -> None:
    """Rotate the halves of one head: cosines then sines, each [dim]."""
    half = dim // 2
    vectors = half // LANES
    vector_rotate(row, rotation, half * 4, vectors)
    numbers, turns = float32_view(row, dim), float32_view(rotation, 2 * dim)
    for k in range(vectors * LANES, half):
        low, high = numbers[k], numbers[half + k]
        numbers[k] = low * turns[k] - high * turns[dim + k]
        numbers[half + k] = high * turns[half + k] + low * turns[dim + half + k]


@intrinsic
def vector_rotate(_context: Any, row: Any, rotation: Any, half: Any, vectors: Any) -> Any:
    """Do the same as `_rotate_head` for whole vectors; half a head has ``half`` bytes."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (numbers, turns, step, count) = SimdBuilder(builder), values
        with lanes.loop(count) as vector:
            low, high = (
                lanes.offset(lanes.offset(numbers, vector, VECTOR_BYTES), step, k) for k in (0, 1)
            )
            start = lanes.offset(turns, vector, VECTOR_BYTES)
            cosine, other_cosine, sine, other_sine = (
                lanes.load_floats(lanes.offset(start, step, k)) for k in range(4)
            )
            a, b = lanes.load_floats(low), lanes.load_floats(high)
            first = lanes.subtract_floats(
                lanes.multiply_floats(a, cosine), lanes.multiply_floats(b, sine)
            )
            second = lanes.add_floats(
                lanes.multiply_floats(b, other_cosine), lanes.multiply_floats(a, other_sine)
            )
            lanes.store_floats(first, low)
            lanes.store_floats(second, high)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@register_jitable
def _write_key(half: Any, key: Any, place: Any, slot: Any) -> None:
    """Write a key into its column of [dim][16]."""
    size = len(key) * KV_PAGE_TOKENS
    floats, halves = float32_view(place, size), uint16_view(place, size)
    for k in range(len(key)):
        if half:
            halves[k * KV_PAGE_TOKENS + slot] = float32_to_half_bits(key[k])
        else:
            floats[k * KV_PAGE_TOKENS + slot] = key[k]


@intrinsic(prefer_literal=True)
def write_value(_context: Any, half: Any, row: Any, place: Any, slot: Any, vectors: Any) -> Any:
    """Write a value into its rows of [dim / 16][16][16]; ``half`` is a compile-time constant."""
    is_half = bool(require_literal(half, "whether pages hold float16"))
    size = VECTOR_BYTES // 2 if is_half else VECTOR_BYTES

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (_, numbers, start, row, count) = SimdBuilder(builder), values
        store = lanes.store_halves if is_half else lanes.store_floats
        with lanes.loop(count) as vector:
            to = lanes.offset(lanes.offset(start, row, size), vector, KV_PAGE_TOKENS * size)
            store(lanes.load_floats(lanes.offset(numbers, vector, VECTOR_BYTES)), to)
        return context.get_dummy_value()

    return types.void(half, *[types.int64] * 4), emit
