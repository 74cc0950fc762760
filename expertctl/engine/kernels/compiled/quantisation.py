"""Code that converts activations to bfloat16 or int8.

`expertctl.engine.kernels.quantisation` describes the formats.
"""

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from expertctl.engine.arrays import VECTOR_BYTES
from expertctl.engine.kernels.compiled.memory import (
    float32_view,
    int8_view,
    int32_view,
    load_int64s,
    uint16_view,
)
from expertctl.engine.kernels.compiled.simd import SimdBuilder
from expertctl.engine.kernels.packed_format import GROUP_SIZE, LANES
from expertctl.engine.kernels.quantisation import INT8_MAX

MAGNITUDE, INFINITY, LEAST = 0x7FFFFFFF, 0x7F800000, (127 - 100) << 23
"""Bits of a float32 magnitude, which have the order of the numbers."""


def round_rows(first: int, last: int, arguments: int) -> None:
    """Round rows to bfloat16."""
    rows, stride, columns, out, wide, scales, sums, _ = load_int64s(arguments, 8)
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
    rows, stride, columns, out, wide, scales, sums, groups = load_int64s(arguments, 8)
    for token in range(first, last):
        group = token * groups * 4
        quantise_row(
            rows + token * stride * 4, columns, out + token * wide, scales + group, sums + group
        )


@numba.njit
def quantise_row(row: Any, columns: Any, out: Any, scales: Any, sums: Any) -> None:
    """Quantise one row to int8 by groups, in compiled code; all arguments are addresses."""
    groups = (columns + GROUP_SIZE - 1) // GROUP_SIZE
    for group in range(groups):
        begin = group * GROUP_SIZE
        place, count = row + begin * 4, min(GROUP_SIZE, columns - begin)
        scale, factor = _group_scale(_largest_magnitude(place, count), np.float32(INT8_MAX))
        float32_view(scales, groups)[group] = scale
        int32_view(sums, groups)[group] = _quantise_group(place, out + begin, count, factor)


@numba.njit
def _largest_magnitude(row: Any, count: Any) -> Any:
    """Return the bits of the largest magnitude; infinity is above numbers, NaN above infinity."""
    largest = vector_largest_magnitude(row, count // LANES)
    bits = int32_view(row, count)
    for k in range(count // LANES * LANES, count):
        largest = max(largest, bits[k] & np.int32(MAGNITUDE))
    return largest


@intrinsic
def vector_largest_magnitude(_context: Any, row: Any, vectors: Any) -> Any:
    """Do the same as `_largest_magnitude` for whole vectors at an address."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (place, count) = SimdBuilder(builder), values
        largest = lanes.create_variable(lanes.zero_ints())
        with lanes.loop(count) as vector:
            bits = lanes.load_ints(lanes.offset(place, vector, VECTOR_BYTES))
            bits = lanes.mask_ints(bits, MAGNITUDE)
            lanes.store_variable(lanes.max_int(lanes.load_variable(largest), bits), largest)
        return lanes.reduce_max_ints(lanes.load_variable(largest))

    return types.int32(types.int64, types.int64), emit


@numba.njit
def _group_scale(largest: Any, steps: Any) -> Any:
    """Return the value of a step and the steps per 1; 0 steps where that is not a number."""
    if largest >= INFINITY:
        return np.float32(np.nan), np.float32(0)
    if largest < LEAST:
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
