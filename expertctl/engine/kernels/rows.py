"""Tokens as a product wants them: float32 as they are, rounded to bfloat16, or int8 by groups.

int8 is symmetric, with a scale per token and group of 128 columns; a group's largest is 127 steps.
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

_NUMBERS = {Scheme.BFLOAT16: np.uint16, Scheme.INT8: np.int8, Scheme.INT4: np.int8}


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
    rows: "np.ndarray[Any, Any]", columns: int, prepared: PreparedRows
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
        ],
        np.int64,
    )


@cache
def prepare_kernel(scheme: Scheme) -> Kernel:
    """Return the kernel that prepares rows for a scheme; one item is one token."""
    function = _round if scheme is Scheme.BFLOAT16 else _quantise
    return compile_kernel(f"prepare {scheme.value}", function)


def _round(first: int, last: int, arguments: int) -> None:
    rows, stride, columns, out, wide, _, _, _ = words(arguments, 8)
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


def _quantise(first: int, last: int, arguments: int) -> None:
    rows, stride, columns, out, wide, scales, sums, groups = words(arguments, 8)
    for token in range(first, last):
        row = floats_at(rows + token * stride * 4, columns)
        steps = bytes_at(out + token * wide, columns)
        for group in range(groups):
            begin = group * GROUP
            end = min(begin + GROUP, columns)
            largest = _largest(row, begin, end)
            factor = np.float32(127) / largest if largest > 0 else np.float32(0)
            total = _to_steps(row, steps, begin, end, factor)
            floats_at(scales, 1 << 40)[token * groups + group] = largest / np.float32(127)
            ints_at(sums, 1 << 40)[token * groups + group] = total


@numba.njit(fastmath=True)  # a largest has no order
def _largest(row: Any, begin: int, end: int) -> Any:
    largest = np.float32(0)
    for k in range(begin, end):
        largest = max(largest, abs(row[k]))
    return largest


@numba.njit
def _to_steps(row: Any, steps: Any, begin: int, end: int, factor: Any) -> Any:
    total = np.int32(0)
    for k in range(begin, end):
        step = np.int32(np.rint(row[k] * factor))
        steps[k] = step
        total += step
    return total
