"""Per-token operations between two GEMMs: norms, SwiGLU, affine, RoPE tables and KV writes.

An item is one token, or one head of one token for `rope_kv_write_kernel`. Rotary tables (cosines
and sines of the positions) are computed once per run, not cached by position: every layer uses the
same ones.

A KV page holds sixteen tokens of one KV head as two packed matrices: keys ``[dim][16]``, so that
the scores of sixteen keys are one vector, and values ``[dim / 16][16][16]``, so that a product with
sixteen probabilities is one too.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic, register_jitable

from expertctl.engine.arrays import VECTOR_BYTES, AnyArray
from expertctl.engine.kernels.jit import Kernel, KernelFunction, compile_kernel
from expertctl.engine.kernels.llvm_math import exponential
from expertctl.engine.kernels.memory import (
    array_address,
    encode_operands,
    float32_to_half_bits,
    float32_view,
    int64_view,
    load_int64s,
    row_address,
    uint16_view,
)
from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS, LANES, Scheme
from expertctl.engine.kernels.simd import SimdBuilder, require_literal


@cache
def rms_norm_kernel() -> Kernel:
    """Return the kernel of RMSNorm: ``out = x / sqrt(mean(x^2) + eps) * weight``."""
    return compile_kernel("norm", _rms_norm_rows)


def rms_norm_arguments(
    *, rows: AnyArray, weight: AnyArray, out: AnyArray, eps: AnyArray
) -> AnyArray:
    """Return its arguments, all float32.

    ``weight`` is [width], ``eps`` [1], the rest [tokens, at least width].
    """
    return encode_operands(
        *row_address(rows),
        array_address(weight),
        len(weight),
        *row_address(out),
        array_address(eps),
    )


def _rms_norm_rows(first: int, last: int, arguments: int) -> None:
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


@cache
def swiglu_kernel() -> Kernel:
    """Return the kernel of SwiGLU: ``out = gate * sigmoid(gate) * up``."""
    return compile_kernel("gate", _swiglu_rows)


def swiglu_arguments(*, gate: AnyArray, up: AnyArray, out: AnyArray, width: int) -> AnyArray:
    """Return its arguments; all are float32 [tokens, at least width], ``out`` may be ``gate``."""
    return encode_operands(*row_address(gate), *row_address(up), *row_address(out), width)


def _swiglu_rows(first: int, last: int, arguments: int) -> None:
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


@cache
def affine_kernel() -> Kernel:
    """Return the kernel of ``out = x * scale + shift``."""
    return compile_kernel("affine", _affine_rows)


def affine_arguments(
    *, rows: AnyArray, scale: AnyArray | None, shift: AnyArray | None, out: AnyArray, width: int
) -> AnyArray:
    """Return its arguments; ``out`` may be ``rows``, scale and shift are float32 [width]."""
    return encode_operands(
        *row_address(rows), array_address(scale), array_address(shift), *row_address(out), width
    )


def _affine_rows(first: int, last: int, arguments: int) -> None:
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


@cache
def gated_add_kernel() -> Kernel:
    """Return the kernel of ``out += sigmoid(gate) * x``, with one gate per token."""
    return compile_kernel("share", _gated_add_rows)


def gated_add_arguments(*, gates: AnyArray, rows: AnyArray, out: AnyArray, width: int) -> AnyArray:
    """Return its arguments, all float32; only the first column of ``gates`` is used."""
    return encode_operands(*row_address(gates), *row_address(rows), *row_address(out), width)


def _gated_add_rows(first: int, last: int, arguments: int) -> None:
    shares, share_stride, rows, stride, outs, out_stride, width = load_int64s(arguments, 7)
    for token in range(first, last):
        logit = float32_view(shares + token * share_stride, 1)[0]
        share = np.float32(1) / (np.float32(1) + exponential(-logit))
        row = float32_view(rows + token * stride, width)
        out = float32_view(outs + token * out_stride, width)
        for k in range(width):
            out[k] += share * row[k]


@cache
def rope_table_kernel() -> Kernel:
    """Return the kernel that computes rotary tables; one item is one token."""
    return compile_kernel("angles", _write_rope_table)


def rope_table_arguments(
    *, positions: AnyArray, frequencies: AnyArray, factor: AnyArray, out: AnyArray
) -> AnyArray:
    """Return its arguments: ``out`` float32 [tokens, 2, dim], cosines then sines.

    ``positions`` is int64 [tokens], ``frequencies`` float32 [dim / 2] as in `rope`; cosines and
    sines are repeated for both halves of a head and multiplied by ``factor``, float32 [1].
    """
    assert out.shape[1:] == (2, 2 * len(frequencies))
    return encode_operands(
        array_address(positions, np.int64),
        array_address(frequencies),
        len(frequencies),
        array_address(factor),
        array_address(out),
    )


def _write_rope_table(first: int, last: int, arguments: int) -> None:
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


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Query heads, KV heads, head size, and the scheme of KV pages: float32 or float16."""

    query_heads: int
    kv_heads: int
    head_dim: int
    kv_scheme: Scheme = Scheme.FLOAT32

    def __post_init__(self) -> None:
        """Check that heads are whole vectors and that KV heads have equally many query heads."""
        assert self.head_dim % KV_PAGE_TOKENS == 0
        assert self.query_heads % self.kv_heads == 0
        assert self.kv_scheme in (Scheme.FLOAT32, Scheme.FLOAT16)

    @property
    def head_bytes(self) -> int:
        """Bytes of the keys of one head in a page; its values take as many."""
        return self.head_dim * self.kv_scheme.layout.vector_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys of a page in one layer; its values take as many."""
        return self.kv_heads * self.head_bytes


@cache
def rope_kv_write_kernel(numbers: Scheme = Scheme.FLOAT32) -> Kernel:
    """Return the kernel that normalises and rotates heads and writes keys and values into pages.

    One item is one head of one token. For each sixteen tokens, the items of one head come first,
    because their keys share cache lines, then those of the next: query heads, then keys, then
    values. Numbers beyond 65504 become infinite in float16.
    """
    function = _rope_kv_write_function(int(numbers is Scheme.FLOAT16))
    return compile_kernel(f"heads {numbers.value}", function)


def rope_kv_write_arguments(
    *,
    rows: AnyArray,
    shape: AttentionShape,
    norms: tuple[AnyArray | None, AnyArray | None],
    eps: AnyArray,
    rotations: AnyArray,
    positions: AnyArray,
    tables: AnyArray,
    offsets: tuple[int, int],
    count: AnyArray,
) -> AnyArray:
    """Return its arguments.

    ``rows`` is float32 [tokens, heads * dim]; ``norms`` of queries and keys are [dim] or None;
    ``rotations`` [tokens, 2, dim] as `rope_table_kernel` writes them; ``tables`` holds addresses of
    page lists; ``offsets`` are the bytes from the address of a page to a layer's keys and values;
    ``count``, int64 [1], is the number of tokens of the run.
    """
    return encode_operands(
        *row_address(rows),
        shape.query_heads,
        shape.kv_heads,
        shape.head_dim,
        *(array_address(norm) for norm in norms),
        array_address(eps),
        array_address(rotations),
        array_address(positions, np.int64),
        array_address(tables, np.int64),
        *offsets,
        shape.head_bytes,
        array_address(count, np.int64),
    )


def _rope_kv_write_function(half: int) -> KernelFunction:
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
                position = int64_view(positions, token + 1)[token]
                table = int64_view(
                    int64_view(tables, token + 1)[token], position // KV_PAGE_TOKENS + 1
                )
                page, slot = table[position // KV_PAGE_TOKENS], position % KV_PAGE_TOKENS
                if head < queries + keys:
                    place = page + key_offset + (head - queries) * head_bytes
                    _write_key(half, float32_view(row, dim), place, slot)
                else:
                    place = page + value_offset + (head - queries - keys) * head_bytes
                    write_value(half, row, place, slot, dim // LANES)

    return heads


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
