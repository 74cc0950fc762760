"""Arrays of stored numbers: float32, float16, and bfloat16 as its bits in uint16.

numpy has no bfloat16. Everywhere in the engine an array of dtype uint16 that holds numbers of a
model holds the bits of bfloat16 numbers; `widen` converts all three to float32, exactly. This
module imports neither numba nor torch.
"""

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


def round_to_bfloat16(numbers: AnyArray) -> FloatArray:
    """Round float32 to the nearest bfloat16, ties to even; NaN stays NaN. Returns its bits."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    quiet_nan = (bits >> 16) | 0x40
    found: AnyArray = np.where(np.isnan(numbers), quiet_nan, rounded).astype(np.uint16)
    return found


def aligned_zeros(shape: int | tuple[int, ...], dtype: Any) -> AnyArray:
    """Return zeros whose first byte is at a multiple of `VECTOR_BYTES`."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(count + VECTOR_BYTES, np.uint8)
    start = -raw.ctypes.data % VECTOR_BYTES
    found: AnyArray = raw[start : start + count].view(dtype).reshape(shape)
    return found
