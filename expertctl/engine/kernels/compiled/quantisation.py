"""Code that quantises activations to bfloat16 or int8, and weights to int4.

`expertctl.engine.kernels.quantisation` describes the formats.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from expertctl.engine.arrays import VECTOR_BYTES
from expertctl.engine.kernels.compiled.memory import (
    allocate_stack_floats,
    float32_view,
    int8_view,
    int32_view,
    load_int64s,
    uint16_view,
)
from expertctl.engine.kernels.compiled.simd import SimdBuilder, Value
from expertctl.engine.kernels.packed_format import GROUP_SIZE, LANES
from expertctl.engine.kernels.quantisation import INT4_SCALE_CANDIDATES, INT8_MAX

_MAGNITUDE, _INFINITY, _LEAST = 0x7FFFFFFF, 0x7F800000, (127 - 100) << 23
"""Bits of a float32 magnitude, which have the order of the numbers."""


def round_rows(first: int, last: int, arguments: int) -> None:
    """Round rows to bfloat16."""
    rows, stride, columns, out, wide, scales, sums, _, _ = load_int64s(arguments, 9)
    for token in range(first, last):
        round_row(rows + token * stride * 4, columns, out + token * wide * 2, scales, sums)


@numba.njit
def round_row(row: Any, columns: Any, out: Any, _scales: Any, _sums: Any) -> None:
    """Round one row to bfloat16, in compiled code; all arguments are addresses."""
    bits, rounded = int32_view(row, columns), uint16_view(out, columns)
    for k in range(columns):
        # Round the bits of float32 to the nearest bfloat16, ties to even.
        number = np.uint32(bits[k])
        if (number & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            rounded[k] = np.uint16((number >> np.uint32(16)) | np.uint32(0x40))
        else:
            tie = (number >> np.uint32(16)) & np.uint32(1)
            rounded[k] = np.uint16((number + np.uint32(0x7FFF) + tie) >> np.uint32(16))


def quantise_rows(first: int, last: int, arguments: int) -> None:
    """Quantise rows to int8."""
    rows, stride, columns, out, wide, scales, sums, groups, most = load_int64s(arguments, 9)
    for token in range(first, last):
        group = token * groups * 4
        _quantise_row(
            rows + token * stride * 4, columns, out + token * wide,
            scales + group, sums + group, np.float32(most),
        )  # fmt: skip


@numba.njit
def quantise_row(row: Any, columns: Any, out: Any, scales: Any, sums: Any) -> None:
    """Quantise one row to int8 by groups, in compiled code; all arguments are addresses."""
    _quantise_row(row, columns, out, scales, sums, np.float32(INT8_MAX))


@numba.njit
def _quantise_row(place: Any, columns: Any, out: Any, scales: Any, sums: Any, steps: Any) -> None:
    groups = (columns + GROUP_SIZE - 1) // GROUP_SIZE
    for group in range(groups):
        begin = group * GROUP_SIZE
        row, count = place + begin * 4, min(GROUP_SIZE, columns - begin)
        scale, factor = _group_scale(_largest_magnitude(row, count), steps)
        float32_view(scales, groups)[group] = scale
        int32_view(sums, groups)[group] = _quantise_group(row, out + begin, count, factor)


@numba.njit
def _largest_magnitude(row: Any, count: Any) -> Any:
    """Return the bits of the largest magnitude; infinity is above numbers, NaN above infinity."""
    largest = vector_largest_magnitude(row, count // LANES)
    bits = int32_view(row, count)
    for k in range(count // LANES * LANES, count):
        largest = max(largest, bits[k] & np.int32(_MAGNITUDE))
    return largest


@intrinsic
def vector_largest_magnitude(_context: Any, row: Any, vectors: Any) -> Any:
    """Do the same as `_largest_magnitude` for whole vectors at an address."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (place, count) = SimdBuilder(builder), values
        largest = lanes.create_variable(lanes.zero_ints())
        with lanes.loop(count) as vector:
            bits = lanes.load_ints(lanes.offset(place, vector, VECTOR_BYTES))
            bits = lanes.mask_ints(bits, _MAGNITUDE)
            lanes.store_variable(lanes.max_int(lanes.load_variable(largest), bits), largest)
        return lanes.reduce_max_ints(lanes.load_variable(largest))

    return types.int32(types.int64, types.int64), emit


@numba.njit
def _group_scale(largest: Any, steps: Any) -> Any:
    """Return the value of a step and the steps per 1; 0 steps where that is not a number."""
    if largest >= _INFINITY:
        return np.float32(np.nan), np.float32(0)
    if largest < _LEAST:
        return np.float32(0), np.float32(0)
    number = np.int32(largest).view(np.float32)
    return number / steps, steps / number


@numba.njit
def _quantise_group(row: Any, steps: Any, count: Any, factor: Any) -> Any:
    """Write the steps of a group at an address; return their sum."""
    numbers, stored, total = float32_view(row, count), int8_view(steps, count), np.int32(0)
    if not factor > 0:  # the products may be NaN, which has no integer value
        for k in range(count):
            stored[k] = 0
        return total
    total += vector_quantise(row, steps, count // LANES, factor)
    for k in range(count // LANES * LANES, count):
        step = np.int32(np.rint(numbers[k] * factor))
        stored[k] = step
        total += step
    return total


@intrinsic
def vector_quantise(_context: Any, row: Any, steps: Any, vectors: Any, factor: Any) -> Any:
    """Do the same as `_quantise_group` for whole vectors, where the factor is positive."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (place, out, count, number) = SimdBuilder(builder), values
        total, every = lanes.create_variable(lanes.zero_ints()), lanes.splat_float(number)
        with lanes.loop(count) as vector:
            floats = lanes.load_floats(lanes.offset(place, vector, VECTOR_BYTES))
            found = lanes.round_to_ints(lanes.multiply_floats(floats, every))
            lanes.store_bytes(found, lanes.offset(out, vector, LANES))
            lanes.store_variable(lanes.add_int(lanes.load_variable(total), found), total)
        return lanes.reduce_add_ints(lanes.load_variable(total))

    return types.int32(*[types.int64] * 3, types.float32), emit


_LOWEST, _HIGHEST = -8, 7
_VECTORS, _STEP_FLOATS = GROUP_SIZE // LANES, GROUP_SIZE // 4


def quantise_int4_rows(first: int, last: int, arguments: int) -> None:
    """Quantise rows to int4."""
    rows, stride, columns, out, wide, scales, _, groups, _ = load_int64s(arguments, 9)
    numbers, steps = allocate_stack_floats(GROUP_SIZE), allocate_stack_floats(_STEP_FLOATS)
    for row in range(first, last):
        found = float32_view(scales + row * groups * 4, groups)
        for group in range(groups):
            begin = group * GROUP_SIZE
            place, target = rows + (row * stride + begin) * 4, out + row * wide + begin
            if begin + GROUP_SIZE <= columns:
                found[group] = _fit_group(place, target)
            else:
                _load_group(place, columns - begin, numbers)
                found[group] = _fit_group(numbers, steps)
                _copy_steps(steps, target, wide - begin)


@numba.njit
def _load_group(place: Any, count: Any, room: Any) -> None:
    """Copy the existing columns and pad the group with zeros."""
    numbers, filled = float32_view(place, count), float32_view(room, GROUP_SIZE)
    for k in range(GROUP_SIZE):
        filled[k] = numbers[k] if k < count else np.float32(0)


@numba.njit
def _copy_steps(steps: Any, target: Any, count: Any) -> None:
    source, out = int8_view(steps, GROUP_SIZE), int8_view(target, count)
    for k in range(count):
        out[k] = source[k]


@numba.njit
def _fit_group(place: Any, out: Any) -> Any:
    """Write the steps of a group; return its scale."""
    bits = vector_largest_magnitude(place, _VECTORS)
    if bits >= _INFINITY or bits < _LEAST:
        steps = int8_view(out, GROUP_SIZE)
        for k in range(GROUP_SIZE):
            steps[k] = 0
        return np.float32(np.nan) if bits >= _INFINITY else np.float32(0)
    largest = np.int32(bits).view(np.float32)
    if vector_signed_extreme(place) < largest:
        largest = -largest
    unit = np.float32(-1) / largest
    best, worth, chosen = np.float32(0), np.float32(0), np.float32(0)
    for stretch in INT4_SCALE_CANDIDATES:
        product, squares = vector_fit_sums(place, unit, np.float32(stretch))
        if product * product > best * squares:
            best, worth = product * product / squares, product / squares
            chosen = np.float32(stretch)
    vector_int4_steps(place, out, unit, chosen)
    return -largest * worth


@intrinsic
def vector_signed_extreme(_context: Any, place: Any) -> Any:
    """Return the largest number of a group, with its sign."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes = SimdBuilder(builder)
        most = lanes.load_floats(values[0])
        for vector in range(1, _VECTORS):
            place = lanes.offset(values[0], lanes.int_constant(vector), VECTOR_BYTES)
            other = lanes.load_floats(place)
            most = lanes.select_lanes(lanes.less_than(most, other), other, most)
        return lanes.reduce_max_floats(most)

    return types.float32(types.int64), emit


@intrinsic
def vector_fit_sums(_context: Any, place: Any, unit: Any, stretch: Any) -> Any:
    """Return ``sum(u q)`` and ``sum(q q)`` of a group, u its numbers in units, q their steps."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes = SimdBuilder(builder)
        product = squares = lanes.zero_floats()
        for vector in range(_VECTORS):
            number, step = _vector_step(lanes, values, vector)
            step = lanes.convert_to_floats(step)
            product, squares = lanes.fma(number, step, product), lanes.fma(step, step, squares)
        sums = [lanes.reduce_add_pairwise(product), lanes.reduce_add_pairwise(squares)]
        return cgutils.pack_array(builder, sums, ir.FloatType())

    return types.UniTuple(types.float32, 2)(types.int64, types.float32, types.float32), emit


@intrinsic
def vector_int4_steps(_context: Any, place: Any, out: Any, unit: Any, stretch: Any) -> Any:
    """Write the steps of a group as bytes."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (place, out, *factors) = SimdBuilder(builder), values
        for vector in range(_VECTORS):
            _, step = _vector_step(lanes, (place, *factors), vector)
            lanes.store_bytes(step, lanes.offset(out, lanes.int_constant(vector), LANES))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.float32), emit


def _vector_step(lanes: SimdBuilder, values: Any, vector: int) -> tuple[Value, Value]:
    """Return sixteen numbers in units, and their steps."""
    place, unit, stretch = values
    numbers = lanes.load_floats(lanes.offset(place, lanes.int_constant(vector), VECTOR_BYTES))
    units = lanes.multiply_floats(numbers, lanes.splat_float(unit))
    steps = lanes.round_to_ints(lanes.multiply_floats(units, lanes.splat_float(stretch)))
    return units, lanes.clamp_ints(steps, _LOWEST, _HIGHEST)
