"""int4 of a group of columns, with the scale that fits it best.

Steps go from -8 to 7. A group's largest is stretched to -7, ..., -10, and what is beyond -8 or 7 is
clipped: a finer step for most may be worth a larger error of a few. Of these choices, each with its
best scale, ``sum(x q) / sum(q q)``, the one with the smallest sum of squared errors is taken. So a
scale may be negative. The error is a sixth smaller than with the largest at 7.
"""

from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from expertctl.engine.kernels.kernel import Kernel, compile_kernel
from expertctl.engine.kernels.lanes import LANES, VECTOR_BYTES, Lanes, Value
from expertctl.engine.kernels.memory import bytes_at, floats_at, stack_floats, words
from expertctl.engine.kernels.rows import largest_lanes
from expertctl.engine.kernels.scheme import GROUP

STRETCHES = (7.0, 7.6, 8.0, 8.6, 9.2, 10.0)
"""Where the largest of a group may be put, never half-way between two steps."""
_LOWEST, _HIGHEST = -8, 7
_VECTORS, _STEP_FLOATS = GROUP // LANES, GROUP // 4
_INFINITY, _LEAST = 0x7F800000, (127 - 100) << 23


@cache
def nibbles_kernel() -> Kernel:
    """Return the kernel that quantises rows; arguments as for `rows`, one item is one row."""
    return compile_kernel("quantise to int4", _quantise)


def _quantise(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    rows, stride, columns, out, wide, scales, _, groups, _ = words(arguments, 9)
    numbers, steps = stack_floats(GROUP), stack_floats(_STEP_FLOATS)
    for row in range(first, last):
        found = floats_at(scales + row * groups * 4, groups)
        for group in range(groups):
            begin = group * GROUP
            place, target = rows + (row * stride + begin) * 4, out + row * wide + begin
            if begin + GROUP <= columns:
                found[group] = _fitted(place, target)
            else:
                _fill(place, columns - begin, numbers)
                found[group] = _fitted(numbers, steps)
                _copy(steps, target, wide - begin)


@numba.njit
def _fill(place: Any, count: Any, room: Any) -> None:  # pragma: no cover - compiled
    """Copy the columns that there are, and fill the group with zeros."""
    numbers, filled = floats_at(place, count), floats_at(room, GROUP)
    for k in range(GROUP):
        filled[k] = numbers[k] if k < count else np.float32(0)


@numba.njit
def _copy(steps: Any, target: Any, count: Any) -> None:  # pragma: no cover - compiled
    source, out = bytes_at(steps, GROUP), bytes_at(target, count)
    for k in range(count):
        out[k] = source[k]


@numba.njit
def _fitted(place: Any, out: Any) -> Any:  # pragma: no cover - compiled
    """Write the steps of a group; return what a step is worth."""
    bits = largest_lanes(place, _VECTORS)
    if bits >= _INFINITY or bits < _LEAST:
        steps = bytes_at(out, GROUP)
        for k in range(GROUP):
            steps[k] = 0
        return np.float32(np.nan) if bits >= _INFINITY else np.float32(0)
    largest = np.int32(bits).view(np.float32)
    if most_lanes(place) < largest:
        largest = -largest
    unit = np.float32(-1) / largest
    best, worth, chosen = np.float32(0), np.float32(0), np.float32(0)
    for stretch in STRETCHES:
        product, squares = fit_lanes(place, unit, np.float32(stretch))
        if product * product > best * squares:
            best, worth = product * product / squares, product / squares
            chosen = np.float32(stretch)
    steps_lanes(place, out, unit, chosen)
    return -largest * worth


@intrinsic
def most_lanes(_context: Any, place: Any) -> Any:
    """Return the largest number of a group, with its sign."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes = Lanes(builder)
        most = lanes.floats(values[0])
        for vector in range(1, _VECTORS):
            other = lanes.floats(lanes.at(values[0], lanes.constant(vector), VECTOR_BYTES))
            most = lanes.where(lanes.less(most, other), other, most)
        return lanes.across_largest(most)

    return types.float32(types.int64), emit


@intrinsic
def fit_lanes(_context: Any, place: Any, unit: Any, stretch: Any) -> Any:
    """Return ``sum(u q)`` and ``sum(q q)`` of a group, u its numbers in units, q their steps."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes = Lanes(builder)
        product = squares = lanes.no_floats()
        for vector in range(_VECTORS):
            number, step = _step(lanes, values, vector)
            step = lanes.to_floats(step)
            product, squares = lanes.fma(number, step, product), lanes.fma(step, step, squares)
        sums = [lanes.across_halves(product), lanes.across_halves(squares)]
        return cgutils.pack_array(builder, sums, ir.FloatType())

    return types.UniTuple(types.float32, 2)(types.int64, types.float32, types.float32), emit


@intrinsic
def steps_lanes(_context: Any, place: Any, out: Any, unit: Any, stretch: Any) -> Any:
    """Write the steps of a group as bytes."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (place, out, *factors) = Lanes(builder), values
        for vector in range(_VECTORS):
            _, step = _step(lanes, (place, *factors), vector)
            lanes.store_bytes(step, lanes.at(out, lanes.constant(vector), LANES))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.float32), emit


def _step(lanes: Lanes, values: Any, vector: int) -> tuple[Value, Value]:
    """Return sixteen numbers in units, and their steps."""
    place, unit, stretch = values
    numbers = lanes.floats(lanes.at(place, lanes.constant(vector), VECTOR_BYTES))
    units = lanes.multiply(numbers, lanes.splat(unit))
    steps = lanes.nearest(lanes.multiply(units, lanes.splat(stretch)))
    return units, lanes.clipped(steps, _LOWEST, _HIGHEST)
