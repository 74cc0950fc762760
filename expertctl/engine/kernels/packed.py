"""A matrix whose rows lie in blocks of sixteen, in one of the schemes.

Float schemes keep every number; integers are symmetric, with one float32 scale per row and group
of 128 columns, chosen so that the largest of the group is exact.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.memory import aligned
from expertctl.engine.kernels.scheme import GROUP, Scheme

Array = "np.ndarray[Any, np.dtype[Any]]"

_LARGEST = {Scheme.INT8: 127, Scheme.INT4: 7}
_STORED = {Scheme.FLOAT32: np.float32, Scheme.FLOAT16: np.float16, Scheme.BFLOAT16: np.uint16}


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """``data`` uint8, ``scales`` float32 [blocks, groups, 16] (no groups in float schemes)."""

    scheme: Scheme
    rows: int
    columns: int
    data: "np.ndarray[Any, Any]"
    scales: "np.ndarray[Any, Any]"

    @property
    def blocks(self) -> int:
        """Blocks of sixteen rows; the last is filled with zeros."""
        return -(-self.rows // LANES)

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales."""
        return self.data.nbytes + self.scales.nbytes

    def part(self, first: int, rows: int) -> "PackedMatrix":
        """Return some of its rows, in the same memory; ``first`` begins a block."""
        assert first % LANES == 0, f"row {first} is within a block"
        begin, end = first // LANES, -(-(first + rows) // LANES)
        data = self.data.reshape(self.blocks, -1)[begin:end].reshape(-1)
        return PackedMatrix(self.scheme, rows, self.columns, data, self.scales[begin:end])


def pack(numbers: "np.ndarray[Any, Any]", scheme: Scheme) -> PackedMatrix:
    """Pack ``[rows, columns]``: float32, or the scheme's own numbers (bfloat16 as uint16)."""
    rows, columns = numbers.shape
    stored, scales = (
        _quantised(numbers, scheme) if scheme in _LARGEST else (_floats(numbers, scheme), None)
    )
    layout = scheme.layout
    high, wide = -(-rows // LANES), layout.vectors(columns) * layout.columns
    filled = np.full((high * LANES, wide), layout.zero, stored.dtype)
    filled[:rows, :columns] = stored
    apart = filled.reshape(high, LANES, wide // layout.columns, layout.columns)
    if scheme is Scheme.INT4:
        apart = apart[..., :4] | apart[..., 4:] << 4
    vectors = apart.transpose(0, 2, 1, 3)
    data = aligned(vectors.nbytes, np.uint8)
    data.view(stored.dtype).reshape(vectors.shape)[...] = vectors
    return PackedMatrix(scheme, rows, columns, data, _packed_scales(scales, high))


def _floats(numbers: "np.ndarray[Any, Any]", scheme: Scheme) -> "np.ndarray[Any, Any]":
    if scheme is Scheme.BFLOAT16 and numbers.dtype != np.uint16:
        return to_bfloat16(numbers)
    return numbers.astype(_STORED[scheme], copy=False)


def _quantised(
    numbers: "np.ndarray[Any, Any]", scheme: Scheme
) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
    """Return uint8 [rows, columns] and scales [rows, groups]."""
    rows, columns = numbers.shape
    groups = scheme.layout.groups(columns)
    filled = np.zeros((rows, groups * GROUP), np.float32)
    filled[:, :columns] = numbers
    apart = filled.reshape(rows, groups, GROUP)
    scales = np.abs(apart).max(axis=2) / _LARGEST[scheme]
    steps = np.divide(
        apart, scales[..., None], out=np.zeros_like(apart), where=scales[..., None] > 0
    )
    stored = (np.rint(steps) + scheme.layout.zero).astype(np.uint8)
    return stored.reshape(rows, -1)[:, :columns], scales


def _packed_scales(scales: "np.ndarray[Any, Any] | None", high: int) -> "np.ndarray[Any, Any]":
    if scales is None:
        return aligned((high, 0, LANES), np.float32)
    packed = aligned((high, scales.shape[1], LANES), np.float32)
    filled = np.zeros((high * LANES, scales.shape[1]), np.float32)
    filled[: len(scales)] = scales
    packed[...] = filled.reshape(high, LANES, -1).transpose(0, 2, 1)
    return packed


def unpack(matrix: PackedMatrix) -> "np.ndarray[Any, Any]":
    """Return what a packed matrix stands for, float32 [rows, columns]."""
    layout = matrix.scheme.layout
    vectors, high = layout.vectors(matrix.columns), matrix.blocks
    apart = matrix.data.view(_STORED.get(matrix.scheme, np.uint8)).reshape(high, vectors, LANES, -1)
    if matrix.scheme is Scheme.INT4:
        apart = np.concatenate((apart & 15, apart >> 4), axis=3)
    flat = apart.transpose(0, 2, 1, 3).reshape(high * LANES, -1)[: matrix.rows, : matrix.columns]
    if matrix.scheme is Scheme.BFLOAT16:
        return from_bfloat16(flat)
    if not layout.is_grouped:
        return flat.astype(np.float32)
    scales = matrix.scales.transpose(0, 2, 1).reshape(high * LANES, -1)[: matrix.rows]
    each = np.repeat(scales, GROUP, axis=1)[:, : matrix.columns]
    return (flat.astype(np.float32) - layout.zero) * each


def to_bfloat16(numbers: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Round float32 to the nearest bfloat16, ties to even, as uint16."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(numbers), quiet, rounded).astype(np.uint16)


def from_bfloat16(numbers: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Widen bfloat16, given as uint16, to float32."""
    return (numbers.astype(np.uint32) << 16).view(np.float32)
