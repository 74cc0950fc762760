"""Matrices packed in blocks of sixteen rows, routed experts made of them, and embedding lookup.

Float schemes round to nearest. Integers have a scale per row and group of 32 columns, see
`quantisation`.

A routed expert is one block of memory: gate and up as one matrix, then down. For each matrix the
data come first, then the scales; both begin at multiples of 64 bytes. So an expert is one read and
has one address.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from expertctl.engine.arrays import VECTOR_BYTES, AnyArray, aligned_zeros, widen
from expertctl.engine.kernels.jit import Kernel, load_kernel
from expertctl.engine.kernels.packed_format import (
    BLOCK_SCHEMES,
    GROUP_SIZE,
    LANES,
    Scheme,
    rows_per_portion,
)
from expertctl.engine.kernels.program import array_address, encode_operands, row_address
from expertctl.engine.kernels.quantisation import (
    MINIMA,
    activation_arguments,
    activation_kernel,
    allocate_activations,
    decode_scales,
    weight_arguments,
    weight_kernel,
)

_CODE = "expertctl.engine.kernels.compiled.packed_matrix"
_BLOCK_CODE = "expertctl.engine.kernels.compiled.gguf_blocks"
_COMPACT_CODE = "expertctl.engine.kernels.compiled.exponent_packing"
"""The modules with the code, which are imported only to compile it."""
ArrayShape = int | tuple[int, ...]
AllocateArray = Callable[[ArrayShape, Any], AnyArray]
"""Allocates vector-aligned memory of a shape and dtype, as `aligned_zeros` does."""
_STORED = {Scheme.FLOAT32: np.float32, Scheme.FLOAT16: np.float16, Scheme.BFLOAT16: np.uint16}


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """``data`` uint8, ``scales`` uint16 [blocks, groups, words] (no groups in float schemes).

    There are sixteen words, except in some schemes of GGUF blocks.
    """

    scheme: Scheme
    rows: int
    columns: int
    data: AnyArray
    scales: AnyArray

    @property
    def blocks(self) -> int:
        """Blocks of sixteen rows; the last is padded with zeros."""
        return -(-self.rows // LANES)

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + self.scales.nbytes

    def row_slice(self, first: int, rows: int) -> "PackedMatrix":
        """Return a view of some rows; ``first`` must begin a block."""
        assert first % LANES == 0, f"row {first} does not begin a block"
        begin, end = first // LANES, -(-(first + rows) // LANES)
        data = self.data.reshape(self.blocks, -1)[begin:end].reshape(-1)
        return PackedMatrix(self.scheme, rows, self.columns, data, self.scales[begin:end])


@dataclass(frozen=True, slots=True, eq=False)
class MatrixStack:
    """Matrices that read the same input, one below the other, each in its own scheme."""

    parts: tuple[PackedMatrix, ...]

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        """Columns of each part."""
        return self.parts[0].columns

    def row_slice(self, first: int, rows: int) -> PackedMatrix:
        """Return a view of some rows of one part; ``first`` must begin a block."""
        for part in self.parts:
            if first < part.rows:
                assert first + rows <= part.rows, "rows of one part"
                return part.row_slice(first, rows)
            first -= part.rows
        raise AssertionError("rows beyond the last part")


def allocate_matrix(
    scheme: Scheme, rows: int, columns: int, *, allocate: AllocateArray = aligned_zeros
) -> PackedMatrix:
    """Return an empty matrix into which all or some rows can be packed."""
    high, layout = -(-rows // LANES), scheme.layout
    data = allocate(high * layout.count_vectors(columns) * layout.vector_bytes, np.uint8)
    scales = allocate((high, layout.count_groups(columns), layout.scale_words), np.uint16)
    return PackedMatrix(scheme, rows, columns, data, scales)


def pack_matrix(numbers: AnyArray, scheme: Scheme) -> PackedMatrix:
    """Pack ``[rows, columns]`` of float32, float16 or bfloat16 (given as uint16).

    It needs a few megabytes on top of the result.
    """
    matrix = allocate_matrix(scheme, *numbers.shape)
    pack_rows(matrix, numbers)
    return matrix


def pack_rows(matrix: PackedMatrix, numbers: AnyArray) -> bool:
    """Pack numbers into an existing matrix, or a slice of one.

    Returns whether the scheme can store all numbers. Integers cannot store NaN or infinity; groups
    must not range over more than about 59,000 in int4 and 123,000 in int5. What becomes of a group
    that cannot be stored is undefined, except that it is NaN in int8.
    """
    assert numbers.shape == (matrix.rows, matrix.columns)
    fits = True
    for first, some in _iter_portions(numbers):
        part = matrix.row_slice(first, len(some))
        if matrix.scheme.layout.is_grouped:
            fits &= _pack_quantised_rows(widen(some), part)
        else:
            _pack_float_rows(_convert_floats(some, matrix.scheme), part)
    return fits


def _iter_portions(
    numbers: AnyArray,
) -> Iterator[tuple[int, AnyArray]]:
    """Yield portions of whole blocks with their first row; the last is padded with zeros."""
    rows, columns = numbers.shape
    height = rows_per_portion(columns)
    for first in range(0, rows, height):
        some = numbers[first : first + height]
        missing = -len(some) % LANES
        yield first, np.pad(some, ((0, missing), (0, 0))) if missing else some


def _convert_floats(numbers: AnyArray, scheme: Scheme) -> AnyArray:
    """Convert rows to the dtype of a float scheme; float16 overflows at 65504."""
    if scheme is Scheme.BFLOAT16:
        is_stored = numbers.dtype == np.uint16
        return numbers if is_stored else float32_to_bfloat16(widen(numbers))
    if numbers.dtype == _STORED[scheme]:
        return numbers
    with np.errstate(over="ignore", invalid="ignore"):
        return widen(numbers).astype(_STORED[scheme], copy=False)


def _pack_float_rows(stored: AnyArray, part: PackedMatrix) -> None:
    layout = part.scheme.layout
    missing = -part.columns % layout.columns
    filled = np.pad(stored, ((0, 0), (0, missing))) if missing else np.ascontiguousarray(stored)
    _interleave_rows(interleave_kernel(part.scheme), filled, part)


def _pack_quantised_rows(numbers: AnyArray, part: PackedMatrix) -> bool:
    rows, wrong = np.ascontiguousarray(numbers), np.zeros(1, np.int64)
    arguments = weight_arguments(
        rows=rows, columns=part.columns, data=part.data, scales=part.scales, wrong=wrong
    )
    weight_kernel(part.scheme)(0, part.blocks, arguments.ctypes.data)
    return not wrong[0]


def _interleave_rows(kernel: Kernel, rows: AnyArray, part: PackedMatrix) -> None:
    vectors = part.scheme.layout.count_vectors(part.columns)
    where = (rows.ctypes.data, rows.strides[0], vectors, part.data.ctypes.data)
    arguments = np.array(where, np.int64)
    kernel(0, part.blocks, arguments.ctypes.data)


@cache
def interleave_kernel(scheme: Scheme) -> Kernel:
    """Return the kernel that interleaves rows of floats; one item is a block of sixteen."""
    if scheme is Scheme.FLOAT16:
        return load_kernel("interleave halves", _CODE, "interleave_halves")
    return _interleave_words_kernel()


def packing_kernel(scheme: Scheme) -> Kernel:
    """Return the kernel that packs rows in a scheme."""
    return weight_kernel(scheme) if scheme.layout.is_grouped else interleave_kernel(scheme)


@cache
def _interleave_words_kernel() -> Kernel:
    return load_kernel("interleave words", _CODE, "interleave_words")


def unpack_matrix(matrix: PackedMatrix) -> AnyArray:
    """Return the values of a packed matrix, float32 [rows, columns].

    It needs a few megabytes on top of the result.
    """
    numbers = np.empty((matrix.rows, matrix.columns), np.float32)
    height = rows_per_portion(matrix.columns)
    for first in range(0, matrix.rows, height):
        some = numbers[first : first + height]
        some[...] = _unpack_rows(matrix.row_slice(first, len(some)))
    return numbers


def _unpack_rows(matrix: PackedMatrix) -> AnyArray:
    layout = matrix.scheme.layout
    vectors, high = layout.count_vectors(matrix.columns), matrix.blocks
    if layout.is_grouped:
        return _unpack_integers(matrix)
    apart = matrix.data.view(_STORED[matrix.scheme]).reshape(high, vectors, LANES, -1)
    flat = apart.transpose(0, 2, 1, 3).reshape(high * LANES, -1)
    return widen(flat[: matrix.rows, : matrix.columns])


def _unpack_integers(matrix: PackedMatrix) -> AnyArray:
    layout, rows, columns = matrix.scheme.layout, matrix.rows, matrix.columns
    apart = matrix.data.reshape(matrix.blocks, -1, layout.vector_bytes)
    stored = apart[..., :VECTOR_BYTES].reshape(*apart.shape[:2], LANES, 4)
    if layout.bits != 8:
        halves = [stored & 15, stored >> 4]
        if layout.bit_planes:
            bits = np.unpackbits(apart[..., VECTOR_BYTES:], axis=-1, bitorder="little")
            planes = bits.reshape(*apart.shape[:2], layout.bit_planes, 2, LANES, 4)
            for plane in range(layout.bit_planes):
                halves = [h | planes[:, :, plane, k] << 4 + plane for k, h in enumerate(halves)]
        stored = np.concatenate(halves, axis=3)
    flat = stored.transpose(0, 2, 1, 3).reshape(matrix.blocks * LANES, -1)[:rows, :columns]
    count = layout.count_groups(columns) * layout.halves
    groups = np.zeros((rows, count, GROUP_SIZE // layout.halves), np.float32)
    numbers = groups.reshape(rows, -1)[:, :columns]
    numbers[...] = flat
    scales, zeros = np.broadcast_arrays(*decode_scales(matrix.scheme, matrix.scales))
    if matrix.scheme in MINIMA:
        groups *= _per_row(scales, rows)
        groups += _per_row(zeros, rows)
        return numbers
    groups -= _per_row(zeros, rows)
    groups *= _per_row(scales, rows)
    return numbers


def _per_row(values: AnyArray, rows: int) -> AnyArray:
    """Return values of blocks, [blocks, groups, 16], as [rows, groups, 1]."""
    return values.transpose(0, 2, 1).reshape(len(values) * LANES, -1, 1)[:rows]


def float32_to_bfloat16(numbers: AnyArray) -> AnyArray:
    """Round float32 rows to the nearest bfloat16, ties to even, as uint16."""
    rows = np.ascontiguousarray(numbers, np.float32)
    rounded = allocate_activations(Scheme.BFLOAT16, *rows.shape)
    arguments = activation_arguments(rows=rows, columns=rows.shape[1], prepared=rounded)
    activation_kernel(Scheme.BFLOAT16)(0, len(rows), arguments.ctypes.data)
    return rounded.data[:, : rows.shape[1]]


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One matrix of a routed expert: its shape and its offset in the block, in bytes."""

    scheme: Scheme
    rows: int
    columns: int
    offset: int

    @property
    def blocks(self) -> int:
        """Blocks of sixteen rows."""
        return -(-self.rows // LANES)

    @property
    def scales_offset(self) -> int:
        """Offset of its scales in the block, in bytes."""
        return self.offset + align_to_vector(self._data_bytes)

    @property
    def end_offset(self) -> int:
        """Offset of the end of the matrix in the block, in bytes."""
        return self.scales_offset + align_to_vector(self._scales_bytes)

    def view(self, memory: AnyArray | memoryview) -> PackedMatrix:
        """Return the matrix in the memory of a block; it is writable if the memory is."""
        octets = np.frombuffer(memory, np.uint8)
        data = octets[self.offset : self.offset + self._data_bytes]
        stored = octets[self.scales_offset : self.scales_offset + self._scales_bytes]
        layout = self.scheme.layout
        shape = (self.blocks, layout.count_groups(self.columns), layout.scale_words)
        scales = stored.view(np.uint16).reshape(shape)
        return PackedMatrix(self.scheme, self.rows, self.columns, data, scales)

    @property
    def _data_bytes(self) -> int:
        layout = self.scheme.layout
        return self.blocks * layout.count_vectors(self.columns) * layout.vector_bytes

    @property
    def _scales_bytes(self) -> int:
        layout = self.scheme.layout
        return self.blocks * layout.count_groups(self.columns) * layout.scales_bytes


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The shape of every routed expert of a base."""

    scheme: Scheme
    hidden: int
    intermediate: int
    compact_bytes: int = 0
    """Bytes of the block of a compact expert; 0 if experts are stored uncompacted."""

    @property
    def gate_up_matrix(self) -> ExpertMatrix:
        """The first matrix: the rows of gate, then those of up."""
        return ExpertMatrix(self.scheme, 2 * self.intermediate, self.hidden, 0)

    @property
    def down_matrix(self) -> ExpertMatrix:
        """The second matrix."""
        offset = self.gate_up_matrix.end_offset
        return ExpertMatrix(self.scheme, self.hidden, self.intermediate, offset)

    @property
    def nbytes(self) -> int:
        """Bytes of an uncompacted expert."""
        return self.down_matrix.end_offset

    @property
    def block_bytes(self) -> int:
        """Bytes of a stored block."""
        return self.compact_bytes or self.nbytes

    def view_gate_up(self, memory: AnyArray | memoryview) -> PackedMatrix:
        """Return the gate and up matrix in the memory of a block."""
        return self.gate_up_matrix.view(memory)

    def view_down(self, memory: AnyArray | memoryview) -> PackedMatrix:
        """Return the down matrix in the memory of a block."""
        return self.down_matrix.view(memory)


class BlockAllocator:
    """Allocates from one block of memory, each piece at a multiple of 64 bytes."""

    def __init__(self, memory: memoryview) -> None:
        """Start at the beginning of the block."""
        self._memory, self._taken = memory, 0

    def allocate(self, shape: ArrayShape, dtype: Any) -> AnyArray:
        """Return the next array."""
        begin, size = self._taken, int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._taken += align_to_vector(size)
        return np.frombuffer(self._memory[begin : begin + size], dtype).reshape(shape)


def align_to_vector(count: int) -> int:
    """Round a number of bytes up to whole vectors."""
    return -(-count // VECTOR_BYTES) * VECTOR_BYTES


CHUNK_VECTORS, CHUNK_HEADER_BYTES = 64, 64
"""Vectors of each block in a chunk of a compact expert, and bytes before its numbers."""
MIN_COMPACT_BITS = 11
"""Bits per number without outliers: three planes, and a byte."""


def max_packed_bytes(blocks: int, vectors: int) -> int:
    """Return the maximum size of a packed panel, in bytes."""
    return blocks * vectors * VECTOR_BYTES + CHUNK_HEADER_BYTES * -(-vectors // CHUNK_VECTORS)


@cache
def exponent_pack_kernel() -> Kernel:
    """Return the kernel that packs consecutive panels; it has one item.

    Its arguments are the address of the numbers; that of int64 [panels, 2], the blocks of each
    panel and the vectors of each block; the number of panels; and the output address. It writes
    uint32 [panels + 1] there, the offset from the output address at which each panel begins and the
    last one ends, followed by the panels.
    """
    return load_kernel("pack compact", _COMPACT_CODE, "pack_chunks")


@cache
def exponent_check_kernel() -> Kernel:
    """Return the kernel that checks whether panels can be unpacked; it has one item.

    Its arguments are the address of the packed data, its size in bytes, the address of int64
    [panels, 2] and the number of panels as for `exponent_pack_kernel`, and the address of an int64
    that is set to 1 if all can be unpacked, else to 0.
    """
    return load_kernel("check compact", _COMPACT_CODE, "check_chunks")


@cache
def embedding_kernel(scheme: Scheme) -> Kernel:
    """Return the kernel that looks up float32 rows of an embedding; one item is one token."""
    code = _BLOCK_CODE if scheme in BLOCK_SCHEMES else _CODE
    return load_kernel(f"embed {scheme.value}", code, f"embed_{scheme.value}")


def embedding_arguments(*, matrix: PackedMatrix, tokens: AnyArray, out: AnyArray) -> AnyArray:
    """Return its arguments: ``tokens`` int64 [n], ``out`` float32 [n, at least columns]."""
    layout = matrix.scheme.layout
    return encode_operands(
        array_address(matrix.data, matrix.data.dtype),
        array_address(matrix.scales, np.uint16),
        matrix.columns,
        layout.count_vectors(matrix.columns),
        layout.count_groups(matrix.columns),
        array_address(tokens, np.int64),
        *row_address(out),
    )
