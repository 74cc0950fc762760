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

from expertctl.engine.kernels.kernel import Kernel, compile_kernel
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
"""Of the bits of a float32, which are in the order of the numbers."""


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
    """Return room for tokens that meet matrices of a scheme that is not a wide float."""
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
    rows: "np.ndarray[Any, Any]",
    columns: int,
    prepared: PreparedRows,
    *,
    largest_step: int = LARGEST_STEP,
) -> "np.ndarray[Any, Any]":
    """Return the arguments of either kernel below; ``rows`` is float32 [tokens, >= columns]."""
    return np.array(
        [
            rows.ctypes.data,
            rows.strides[0] // 4,
            columns,
            prepared.data.ctypes.data,
            prepared.data.shape[1],
            prepared.scales.ctypes.data,
            prepared.sums.ctypes.data,
            prepared.scales.shape[1],
            largest_step,
        ],
        np.int64,
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
    rows, stride, columns, out, wide, _, _, _, _ = words(arguments, 9)
    for token in range(first, last):
        # The bits of float32: to the nearest bfloat16, ties to even.
        bits = ints_at(rows + token * stride * 4, columns)
        rounded = halves_at(out + token * wide * 2, columns)
        for k in range(columns):
            number = np.uint32(bits[k])
            if (number & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
                rounded[k] = np.uint16((number >> np.uint32(16)) | np.uint32(0x40))
            else:
                tie = (number >> np.uint32(16)) & np.uint32(1)
                rounded[k] = np.uint16((number + np.uint32(0x7FFF) + tie) >> np.uint32(16))


def _quantise(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    rows, stride, columns, out, wide, scales, sums, groups, most = words(arguments, 9)
    for token in range(first, last):
        place = rows + token * stride * 4
        row, bits = floats_at(place, columns), ints_at(place, columns)
        steps = bytes_at(out + token * wide, columns)
        for group in range(groups):
            begin = group * GROUP
            end = min(begin + GROUP, columns)
            scale, factor = _scale(_largest(bits, begin, end), np.float32(most))
            floats_at(scales, 1 << 40)[token * groups + group] = scale
            total = _to_steps(row, steps, begin, end, factor)
            ints_at(sums, 1 << 40)[token * groups + group] = total


@numba.njit
def _largest(bits: Any, begin: int, end: int) -> Any:  # pragma: no cover - compiled
    """Return the bits of the largest magnitude; infinity is above numbers, NaN above that."""
    largest = np.int32(0)
    for k in range(begin, end):
        largest = max(largest, bits[k] & np.int32(_MAGNITUDE))
    return largest


@numba.njit
def _scale(largest: Any, most: Any) -> Any:  # pragma: no cover - compiled
    """Return what a step is worth and how many steps 1 is; no steps where that is no number."""
    if largest >= _INFINITY:
        return np.float32(np.nan), np.float32(0)
    if largest < _LEAST:
        return np.float32(0), np.float32(0)
    number = np.int32(largest).view(np.float32)
    return number / most, most / number


@numba.njit
def _to_steps(
    row: Any, steps: Any, begin: int, end: int, factor: Any
) -> Any:  # pragma: no cover - compiled
    total = np.int32(0)
    for k in range(begin, end):
        # Without a factor the product may be no number, and that has no integer.
        step = np.int32(np.rint(row[k] * factor)) if factor > 0 else np.int32(0)
        steps[k] = step
        total += step
    return total
