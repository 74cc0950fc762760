"""Tokens as a product wants them: float32 as they are, rounded to bfloat16, or int8 by groups.

int8 is symmetric, with a scale per token and group of 128 columns; a group's largest is 127 steps.
A group with a NaN or an infinity in it has NaN for its scale, so its products are NaN; one whose
largest is below 2^-100 counts as zero.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from expertctl.engine.kernels.arguments import address, rows_at, words_of
from expertctl.engine.kernels.kernel import Kernel, compile_kernel
from expertctl.engine.kernels.lanes import LANES, VECTOR_BYTES, Lanes
from expertctl.engine.kernels.memory import (
    aligned,
    bytes_at,
    floats_at,
    halves_at,
    ints_at,
    words,
)
from expertctl.engine.kernels.scheme import GROUP, Scheme

LARGEST_STEP = 127

_NUMBERS = {Scheme.BFLOAT16: np.uint16, Scheme.INT8: np.int8, Scheme.INT4: np.int8}
_MAGNITUDE, _INFINITY, _LEAST = 0x7FFFFFFF, 0x7F800000, (127 - 100) << 23
"""Bits of a float32 magnitude, which are in the order of the numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRows:
    """Room for the tokens that one product takes, [tokens, columns] in the scheme's numbers.

    ``scales`` float32 and ``sums`` int32 [tokens, groups] belong to int8; columns are filled with
    zeros to whole vectors.
    """

    data: "np.ndarray[Any, Any]"
    scales: "np.ndarray[Any, Any]"
    sums: "np.ndarray[Any, Any]"

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.data.nbytes + self.scales.nbytes + self.sums.nbytes


def room_for_rows(scheme: Scheme, tokens: int, columns: int) -> PreparedRows:
    """Return room for tokens of products with matrices in bfloat16, int8 or int4."""
    layout = scheme.layout
    wide, groups = layout.vectors(columns) * layout.columns, layout.groups(columns)
    return PreparedRows(
        aligned((tokens, wide), _NUMBERS[scheme]),
        aligned((tokens, groups), np.float32),
        aligned((tokens, groups), np.int32),
    )


def rows_as_they_are(rows: "np.ndarray[Any, Any]") -> PreparedRows:
    """Return float32 rows [tokens, columns] for a scheme that takes them as they are."""
    nothing = (len(rows), 0)
    return PreparedRows(rows, aligned(nothing, np.float32), aligned(nothing, np.int32))


def prepare_arguments(
    *,
    rows: "np.ndarray[Any, Any]",
    columns: int,
    prepared: PreparedRows,
    largest_step: int = LARGEST_STEP,
) -> "np.ndarray[Any, Any]":
    """Return the arguments of either kernel below; ``rows`` is float32 [tokens, >= columns]."""
    place, stride = rows_at(rows)
    return words_of(
        place,
        stride // 4,
        columns,
        address(prepared.data, prepared.data.dtype),
        prepared.data.shape[1],
        address(prepared.scales),
        address(prepared.sums, np.int32),
        prepared.scales.shape[1],
        largest_step,
    )


def prepare_kernel(scheme: Scheme) -> Kernel:
    """Return the kernel that prepares rows for a scheme; one item is one token."""
    return _rounding() if scheme is Scheme.BFLOAT16 else _quantising()


@cache
def _rounding() -> Kernel:
    return compile_kernel("round to bfloat16", _round)


@cache
def _quantising() -> Kernel:
    return compile_kernel("quantise to int8", _quantise)


def _round(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    rows, stride, columns, out, wide, scales, sums, _, _ = words(arguments, 9)
    for token in range(first, last):
        round_row(rows + token * stride * 4, columns, out + token * wide * 2, scales, sums)


@numba.njit
def round_row(
    row: Any, columns: Any, out: Any, _scales: Any, _sums: Any
) -> None:  # pragma: no cover - compiled
    """Round one row to bfloat16, in compiled code; all are addresses."""
    bits, rounded = ints_at(row, columns), halves_at(out, columns)
    for k in range(columns):
        # The bits of float32: to the nearest bfloat16, ties to even.
        number = np.uint32(bits[k])
        if (number & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            rounded[k] = np.uint16((number >> np.uint32(16)) | np.uint32(0x40))
        else:
            tie = (number >> np.uint32(16)) & np.uint32(1)
            rounded[k] = np.uint16((number + np.uint32(0x7FFF) + tie) >> np.uint32(16))


def _quantise(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    rows, stride, columns, out, wide, scales, sums, groups, most = words(arguments, 9)
    for token in range(first, last):
        group = token * groups * 4
        _quantise_row(
            rows + token * stride * 4, columns, out + token * wide,
            scales + group, sums + group, np.float32(most),
        )  # fmt: skip


@numba.njit
def quantise_row(
    row: Any, columns: Any, out: Any, scales: Any, sums: Any
) -> None:  # pragma: no cover - compiled
    """Quantise one row to int8 by groups, in compiled code; all are addresses."""
    _quantise_row(row, columns, out, scales, sums, np.float32(LARGEST_STEP))


@numba.njit
def _quantise_row(
    place: Any, columns: Any, out: Any, scales: Any, sums: Any, most: Any
) -> None:  # pragma: no cover - compiled
    groups = (columns + GROUP - 1) // GROUP
    for group in range(groups):
        begin = group * GROUP
        row, count = place + begin * 4, min(GROUP, columns - begin)
        scale, factor = _scale(_largest(row, count), most)
        floats_at(scales, groups)[group] = scale
        ints_at(sums, groups)[group] = _to_steps(row, out + begin, count, factor)


@numba.njit
def _largest(row: Any, count: Any) -> Any:  # pragma: no cover - compiled
    """Return the bits of the largest magnitude; infinity is above numbers, NaN above that."""
    largest = largest_lanes(row, count // LANES)
    bits = ints_at(row, count)
    for k in range(count // LANES * LANES, count):
        largest = max(largest, bits[k] & np.int32(_MAGNITUDE))
    return largest


@intrinsic
def largest_lanes(_context: Any, row: Any, vectors: Any) -> Any:
    """Do the same for so many vectors at an address."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (place, count) = Lanes(builder), values
        largest = lanes.variable(lanes.no_ints())
        with lanes.count(count) as vector:
            bits = lanes.masked(lanes.ints(lanes.at(place, vector, VECTOR_BYTES)), _MAGNITUDE)
            lanes.write(lanes.larger(lanes.read(largest), bits), largest)
        return lanes.across_larger(lanes.read(largest))

    return types.int32(types.int64, types.int64), emit


@numba.njit
def _scale(largest: Any, most: Any) -> Any:  # pragma: no cover - compiled
    """Return what a step is worth and how many steps 1 is; 0 steps where that is no number."""
    if largest >= _INFINITY:
        return np.float32(np.nan), np.float32(0)
    if largest < _LEAST:
        return np.float32(0), np.float32(0)
    number = np.int32(largest).view(np.float32)
    return number / most, most / number


@numba.njit
def _to_steps(row: Any, steps: Any, count: Any, factor: Any) -> Any:  # pragma: no cover - compiled
    """Write the steps of a group at an address; return their sum."""
    numbers, stored, total = floats_at(row, count), bytes_at(steps, count), np.int32(0)
    if not factor > 0:  # the products may be NaN, which has no integer
        for k in range(count):
            stored[k] = 0
        return total
    total += steps_lanes(row, steps, count // LANES, factor)
    for k in range(count // LANES * LANES, count):
        step = np.int32(np.rint(numbers[k] * factor))
        stored[k] = step
        total += step
    return total


@intrinsic
def steps_lanes(_context: Any, row: Any, steps: Any, vectors: Any, factor: Any) -> Any:
    """Do the same for so many vectors, where there is a factor."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (place, out, count, number) = Lanes(builder), values
        total, every = lanes.variable(lanes.no_ints()), lanes.splat(number)
        with lanes.count(count) as vector:
            floats = lanes.floats(lanes.at(place, vector, VECTOR_BYTES))
            found = lanes.nearest(lanes.multiply(floats, every))
            lanes.store_bytes(found, lanes.at(out, vector, LANES))
            lanes.write(lanes.plus(lanes.read(total), found), total)
        return lanes.across_total(lanes.read(total))

    return types.int32(*[types.int64] * 3, types.float32), emit
