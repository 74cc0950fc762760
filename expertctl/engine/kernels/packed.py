"""A matrix whose rows lie in blocks of sixteen, in one of the schemes.

Float schemes round to the nearest; integers have one float32 scale per row and group of 128
columns: in int8 a group's largest is 127 steps, in int4 the scale is the one that fits best
(`nibbles`). A group with a NaN or an infinity in it stands for NaN as a whole; one whose largest is
below 2^-100 stands for zeros.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from expertctl.engine.kernels.kernel import Kernel, compile_kernel
from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.memory import aligned, halves_at, words, words_at
from expertctl.engine.kernels.nibbles import nibbles_kernel
from expertctl.engine.kernels.rows import prepare_arguments, prepare_kernel, room_for_rows
from expertctl.engine.kernels.scheme import GROUP, Scheme

Shape = int | tuple[int, ...]
Take = Callable[[Shape, Any], "np.ndarray[Any, Any]"]
"""Gives memory of a shape and dtype that begins where a vector may, such as `aligned`."""
_STORED = {Scheme.FLOAT32: np.float32, Scheme.FLOAT16: np.float16, Scheme.BFLOAT16: np.uint16}
_AT_ONCE = 1 << 17
"""Numbers that are packed in one go, so that intermediate data fits a core's cache."""
_SIGNS = 0x80808080
"""Flipping the upper bit of a signed byte adds 128 and makes it unsigned."""


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


def empty_matrix(scheme: Scheme, rows: int, columns: int, *, take: Take = aligned) -> PackedMatrix:
    """Return room into which a matrix, or some of its rows, can be packed."""
    high, layout = -(-rows // LANES), scheme.layout
    data = take(high * layout.vectors(columns) * layout.vector_bytes, np.uint8)
    scales = take((high, layout.groups(columns), LANES), np.float32)
    return PackedMatrix(scheme, rows, columns, data, scales)


def pack(numbers: "np.ndarray[Any, Any]", scheme: Scheme) -> PackedMatrix:
    """Pack ``[rows, columns]`` of float32, float16 or bfloat16, which is given as uint16.

    Beside the result it takes a few megabytes.
    """
    matrix = empty_matrix(scheme, *numbers.shape)
    pack_into(matrix, numbers)
    return matrix


def pack_into(matrix: PackedMatrix, numbers: "np.ndarray[Any, Any]") -> None:
    """Pack numbers into existing room: that of a matrix, or of a part of one."""
    assert numbers.shape == (matrix.rows, matrix.columns)
    for first, some in _portions(numbers):
        part = matrix.part(first, len(some))
        if matrix.scheme.layout.is_grouped:
            _pack_steps(widened(some), part)
        else:
            _pack_floats(_stored(some, matrix.scheme), part)


def portion_rows(columns: int) -> int:
    """Return how many rows of so many columns are packed in one go, whole blocks."""
    return max(1, _AT_ONCE // max(1, columns) // LANES) * LANES


def _portions(
    numbers: "np.ndarray[Any, Any]",
) -> "Iterator[tuple[int, np.ndarray[Any, Any]]]":
    """Return parts of whole blocks with their first row; the last is filled with zeros."""
    rows, columns = numbers.shape
    height = portion_rows(columns)
    for first in range(0, rows, height):
        some = numbers[first : first + height]
        missing = -len(some) % LANES
        yield first, np.pad(some, ((0, missing), (0, 0))) if missing else some


def _stored(numbers: "np.ndarray[Any, Any]", scheme: Scheme) -> "np.ndarray[Any, Any]":
    """Return rows as a float scheme keeps them; float16 ends at 65504."""
    if scheme is Scheme.BFLOAT16:
        return numbers if numbers.dtype == np.uint16 else to_bfloat16(widened(numbers))
    if numbers.dtype == _STORED[scheme]:
        return numbers
    with np.errstate(over="ignore", invalid="ignore"):
        return widened(numbers).astype(_STORED[scheme], copy=False)


def widened(numbers: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return float32 of what can be packed."""
    if numbers.dtype == np.uint16:
        return from_bfloat16(numbers)
    return numbers.astype(np.float32, copy=False)


def _pack_floats(stored: "np.ndarray[Any, Any]", part: PackedMatrix) -> None:
    layout = part.scheme.layout
    missing = -part.columns % layout.columns
    filled = np.pad(stored, ((0, 0), (0, missing))) if missing else np.ascontiguousarray(stored)
    _interleave(_interleaving(part.scheme), filled, part, turned=0)


def _pack_steps(numbers: "np.ndarray[Any, Any]", part: PackedMatrix) -> None:
    rows = np.ascontiguousarray(numbers)
    steps = room_for_rows(part.scheme, len(rows), part.columns)
    arguments = prepare_arguments(rows=rows, columns=part.columns, prepared=steps)
    kernel = nibbles_kernel() if part.scheme is Scheme.INT4 else prepare_kernel(part.scheme)
    kernel(0, len(rows), arguments.ctypes.data)
    part.scales[...] = steps.scales.reshape(part.blocks, LANES, -1).transpose(0, 2, 1)
    _interleave(_interleaving(part.scheme), steps.data, part, turned=_SIGNS)


def _interleave(
    kernel: Kernel, rows: "np.ndarray[Any, Any]", part: PackedMatrix, *, turned: int
) -> None:
    vectors = part.scheme.layout.vectors(part.columns)
    where = (rows.ctypes.data, rows.strides[0], vectors, part.data.ctypes.data, turned)
    arguments = np.array(where, np.int64)
    kernel(0, part.blocks, arguments.ctypes.data)


@cache
def _interleaving(scheme: Scheme) -> Kernel:
    """Return the kernel that lays rows beside each other; one item is a block of sixteen."""
    match scheme:
        case Scheme.FLOAT16:
            return compile_kernel("interleave halves", _interleave_halves)
        case Scheme.INT4:
            return compile_kernel("interleave nibbles", _interleave_nibbles)
        case Scheme.FLOAT32 | Scheme.BFLOAT16 | Scheme.INT8:
            return _interleaving_words()


@cache
def _interleaving_words() -> Kernel:
    return compile_kernel("interleave words", _interleave_words)


def _interleave_words(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    rows, stride, vectors, out, turned = words(arguments, 5)
    source, target = words_at(rows, 1 << 40), words_at(out, 1 << 40)
    for block in range(first, last):
        for lane in range(LANES):
            begin = (block * LANES + lane) * (stride // 4)
            end = block * vectors * LANES + lane
            for vector in range(vectors):
                target[end + vector * LANES] = source[begin + vector] ^ np.uint32(turned)


def _interleave_halves(
    first: int, last: int, arguments: int
) -> None:  # pragma: no cover - compiled
    rows, stride, vectors, out, _ = words(arguments, 5)
    source, target = halves_at(rows, 1 << 40), halves_at(out, 1 << 40)
    for block in range(first, last):
        for lane in range(LANES):
            begin = (block * LANES + lane) * (stride // 2)
            end = block * vectors * LANES + lane
            for vector in range(vectors):
                target[end + vector * LANES] = source[begin + vector]


def _interleave_nibbles(
    first: int, last: int, arguments: int
) -> None:  # pragma: no cover - compiled
    rows, stride, vectors, out, _ = words(arguments, 5)
    source, target = words_at(rows, 1 << 40), words_at(out, 1 << 40)
    nibbles, zeros = np.uint32(0x0F0F0F0F), np.uint32(0x08080808)
    for block in range(first, last):
        for lane in range(LANES):
            begin = (block * LANES + lane) * (stride // 4)
            end = block * vectors * LANES + lane
            for vector in range(vectors):
                # Flipping the upper one of a step's lower four bits adds 8.
                low = (source[begin + 2 * vector] & nibbles) ^ zeros
                high = (source[begin + 2 * vector + 1] & nibbles) ^ zeros
                target[end + vector * LANES] = low | (high << np.uint32(4))


def unpack(matrix: PackedMatrix) -> "np.ndarray[Any, Any]":
    """Return what a packed matrix stands for, float32 [rows, columns].

    Beside the result it takes a few megabytes.
    """
    numbers = np.empty((matrix.rows, matrix.columns), np.float32)
    height = portion_rows(matrix.columns)
    for first in range(0, matrix.rows, height):
        some = numbers[first : first + height]
        some[...] = _unpacked(matrix.part(first, len(some)))
    return numbers


def _unpacked(matrix: PackedMatrix) -> "np.ndarray[Any, Any]":
    layout = matrix.scheme.layout
    vectors, high = layout.vectors(matrix.columns), matrix.blocks
    apart = matrix.data.view(_STORED.get(matrix.scheme, np.uint8)).reshape(high, vectors, LANES, -1)
    if matrix.scheme is Scheme.INT4:
        apart = np.concatenate((apart & 15, apart >> 4), axis=3)
    flat = apart.transpose(0, 2, 1, 3).reshape(high * LANES, -1)[: matrix.rows, : matrix.columns]
    if not layout.is_grouped:
        return widened(flat)
    scales = matrix.scales.transpose(0, 2, 1).reshape(high * LANES, -1)[: matrix.rows]
    each = np.repeat(scales, GROUP, axis=1)[:, : matrix.columns]
    return (flat.astype(np.float32) - layout.zero) * each


def to_bfloat16(numbers: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Round float32 rows to the nearest bfloat16, ties to even, as uint16 of whole vectors."""
    rows = np.ascontiguousarray(numbers, np.float32)
    rounded = room_for_rows(Scheme.BFLOAT16, *rows.shape)
    arguments = prepare_arguments(rows=rows, columns=rows.shape[1], prepared=rounded)
    prepare_kernel(Scheme.BFLOAT16)(0, len(rows), arguments.ctypes.data)
    return rounded.data[:, : rows.shape[1]]


def from_bfloat16(numbers: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Widen bfloat16, given as uint16, to float32."""
    wide = numbers.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)
