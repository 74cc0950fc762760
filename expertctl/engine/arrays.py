"""Arrays of stored numbers: float32, float16, and bfloat16 as its bits in uint16.

numpy has no bfloat16. Everywhere in the engine an array of dtype uint16 that holds numbers of a
model holds the bits of bfloat16 numbers; `widen` converts all three to float32, exactly. This
module imports neither numba nor torch.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

AnyArray = np.ndarray[Any, Any]
FloatArray = np.ndarray[Any, Any]
"""Numbers of a model: float32, float16, or the bits of bfloat16 in uint16."""
VECTOR_BYTES = 64
"""Bytes of a vector of sixteen float32; memory for kernels begins at multiples of it."""
STORED_DTYPES: dict[str, "np.dtype[Any]"] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
"""The dtype of an array for each float type of safetensors."""


def widen(numbers: FloatArray) -> AnyArray:
    """Convert stored numbers to float32; float32 is returned as it is."""
    if numbers.dtype == np.uint16:
        wide = numbers.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return numbers.astype(np.float32, copy=False)


def split_rows(array: AnyArray, heights: Sequence[int]) -> list[AnyArray]:
    """Return views of the first ``heights[0]`` rows, of the next ``heights[1]``, and so on."""
    ends = accumulate(heights)
    return [array[end - height : end] for height, end in zip(heights, ends, strict=True)]


_HALVES_AT_ONCE = 1 << 16
_INDEX_BYTES = 8


def join_rows(target: AnyArray, parts: Sequence[FloatArray]) -> None:
    """Write the rows of ``parts`` one after the other to contiguous float32 rows, exactly."""
    kinds = {part.dtype for part in parts}
    if kinds == {STORED_DTYPES["BF16"]}:
        bits = target.view(np.uint32)
        np.concatenate(parts, out=bits)
        np.left_shift(bits, 16, out=bits)
    elif STORED_DTYPES["F16"] in kinds or len(kinds) > 1:
        for part, rows in zip(parts, split_rows(target, list(map(len, parts))), strict=True):
            if part.dtype == np.float16:
                _widen_halves(rows, part)
            elif part.dtype == np.uint16:
                bits = rows.view(np.uint32)
                bits[...] = part
                np.left_shift(bits, 16, out=bits)
            else:
                rows[...] = part
    else:
        np.concatenate(parts, out=target)


def joining_scratch_bytes(part: FloatArray) -> int:
    """Return the maximum bytes that `join_rows` needs for one part, in either order of its axes.

    A table of 256 KiB for float16 is made once and stays.
    """
    if part.dtype == np.float16:
        return int(_INDEX_BYTES * min(int(part.size), max(_HALVES_AT_ONCE, *part.shape)))
    return 0


def _widen_halves(target: AnyArray, halves: FloatArray) -> None:
    """Look each number up, a few rows at a time: numpy's own conversion takes twice as long."""
    numbers, codes = _list_halves(), halves.view(np.uint16)
    height = max(1, _HALVES_AT_ONCE // max(1, halves.shape[1]))
    for begin in range(0, len(halves), height):
        rows = slice(begin, begin + height)
        numbers.take(codes[rows], out=target[rows], mode="wrap")


@cache
def _list_halves() -> AnyArray:
    """Return the float32 number of each float16, by its bits."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def round_to_bfloat16(numbers: AnyArray) -> FloatArray:
    """Round float32 to the nearest bfloat16, ties to even; NaN stays NaN. Returns its bits."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet_nan = (bits >> 16) | 0x40
    found: AnyArray = np.where(np.isnan(numbers), quiet_nan, rounded).astype(np.uint16)
    return found


def aligned_zeros(shape: int | tuple[int, ...], dtype: Any) -> AnyArray:
    """Return zeros whose first byte is at a multiple of `VECTOR_BYTES`."""
    numbers = shape if isinstance(shape, int) else math.prod(shape)
    count = int(numbers) * np.dtype(dtype).itemsize
    raw = np.zeros(count + VECTOR_BYTES, np.uint8)
    start = -raw.ctypes.data % VECTOR_BYTES
    found: AnyArray = raw[start : start + count].view(dtype).reshape(shape)
    return found
