"""Lossless packing of bfloat16 weights into about eleven bits each.

The sign and fraction of a weight look like noise, but its exponent has an entropy of 2.6 of its 8
bits (Zhang et al. 2025, "70% Size, 100% Accuracy", section 2). Here the exponent is stored in three
bits: its index among eight consecutive exponents, the *window* of a chunk; the few numbers outside
the window are stored completely. That takes a twelfth more space than the best prefix code, but
needs no bit-by-bit decoding: sixty-four numbers are unpacked at a time.

A panel (four blocks of sixteen rows, or the rest of a matrix) is a sequence of chunks of 128
columns. Each part of a chunk is padded to a multiple of 64 bytes::

    head      uint16 number of outliers, uint8 first exponent of the window
    groups    of 512 numbers each: three bit planes, where bit s of byte j belongs to number
              64 s + j, then a uint8 for each number: its sign and its fraction
    outliers  uint16 index within the chunk, uint16 bits

If packing would not shorten a chunk, or its numbers do not fill whole groups, they follow the head
unchanged. An unpacked chunk fits into the first-level cache of a core.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from expertctl.engine.arrays import VECTOR_BYTES
from expertctl.engine.kernels.compiled.memory import (
    allocate_stack_floats,
    copy_bytes,
    int32_view,
    int64_view,
    load_int64s,
    uint8_view,
    uint16_view,
    uint32_view,
)
from expertctl.engine.kernels.compiled.simd import INT, Value
from expertctl.engine.kernels.packed_format import PANEL_BLOCKS
from expertctl.engine.kernels.packed_matrix import (
    CHUNK_HEADER_BYTES,
    CHUNK_VECTORS,
    MIN_COMPACT_BITS,
)

GROUP = 512
"""Numbers per group."""
CHUNK_BYTES = PANEL_BLOCKS * CHUNK_VECTORS * VECTOR_BYTES
CHUNK_FLOATS = CHUNK_BYTES // 4
UNPACKED = 0xFFFF
"""Stored instead of the number of outliers if the numbers of a chunk are not packed."""
_WINDOW, _EXPONENTS = 8, 256
_STRIPS, _PLANES, _AT_ONCE = 8, 3, 64
_GROUP_BYTES = GROUP * MIN_COMPACT_BITS // 8
_FRACTION_BITS = 7
_BYTES, _SHORTS = ir.VectorType(ir.IntType(8), _AT_ONCE), ir.VectorType(ir.IntType(16), _AT_ONCE)


def pack_chunks(_first: int, _last: int, arguments: int) -> None:
    """Pack the panels of an expert."""
    numbers, sizes_at, stretches, out = load_int64s(arguments, 4)
    begins, chunk = uint32_view(out, stretches + 1), allocate_stack_floats(CHUNK_FLOATS)
    seen = allocate_exponent_counts()
    at = align_to_vector_bytes(4 * (stretches + 1))
    for stretch in range(stretches):
        begins[stretch] = at
        blocks, vectors = load_int64s(sizes_at + 16 * stretch, 2)
        for first in range(0, vectors, CHUNK_VECTORS):
            wide = min(CHUNK_VECTORS, vectors - first) * VECTOR_BYTES
            for block in range(blocks):
                source = numbers + (block * vectors + first) * VECTOR_BYTES
                copy_bytes(chunk + block * wide, source, wide)
            at += _pack_chunk(chunk, blocks * wide // 2, out + at, seen)
        numbers += blocks * vectors * VECTOR_BYTES
    begins[stretches] = at


@register_jitable
def align_to_vector_bytes(count: Any) -> Any:
    """Round a number of bytes up to whole cache lines."""
    return (count + _AT_ONCE - 1) // _AT_ONCE * _AT_ONCE


@register_jitable
def _pack_chunk(numbers: Any, size: Any, out: Any, seen: Any) -> Any:
    """Pack a chunk; return its size in bytes."""
    head, window, beyond = uint8_view(out, CHUNK_HEADER_BYTES), 0, UNPACKED
    if size % GROUP == 0:
        window, beyond = _find_window(numbers, size, seen)
    length = size * MIN_COMPACT_BITS // 8 + align_to_vector_bytes(4 * beyond)
    if length >= 2 * size:
        head[0], head[1] = UNPACKED & 255, UNPACKED >> 8
        copy_bytes(out + CHUNK_HEADER_BYTES, numbers, 2 * size)
        return CHUNK_HEADER_BYTES + align_to_vector_bytes(2 * size)
    head[0], head[1], head[2] = beyond & 255, beyond >> 8, window
    group = out + CHUNK_HEADER_BYTES
    for begin in range(0, size, GROUP):
        pack_group(numbers + 2 * begin, window, group)
        group += _GROUP_BYTES
    whole, kept, at = uint16_view(numbers, size), uint16_view(group, 2 * beyond), 0
    for k in range(size):
        exponent = (whole[k] >> _FRACTION_BITS) & 255
        if exponent < window or exponent >= window + _WINDOW:
            kept[at], kept[at + 1] = k, whole[k]
            at += 2
    return CHUNK_HEADER_BYTES + length


@register_jitable
def _find_window(numbers: Any, size: Any, seen_at: Any) -> Any:
    """Return the first exponent of the window that covers most numbers, and the outliers."""
    whole, seen = uint16_view(numbers, size), int32_view(seen_at, _EXPONENTS)
    for k in range(_EXPONENTS):
        seen[k] = 0
    for k in range(size):
        seen[(whole[k] >> _FRACTION_BITS) & 255] += 1
    inside = 0
    for k in range(_WINDOW):
        inside += seen[k]
    most, window = inside, 0
    for k in range(_WINDOW, _EXPONENTS):
        inside += seen[k] - seen[k - _WINDOW]
        if inside > most:
            most, window = inside, k - _WINDOW + 1
    return window, size - most


def check_chunks(_first: int, _last: int, arguments: int) -> None:
    """Check whether packed panels can be unpacked."""
    place, most, sizes_at, stretches, found = load_int64s(arguments, 5)
    ends, sound = uint32_view(place, stretches + 1), 1
    for stretch in range(stretches):
        packed, end = place + ends[stretch], place + min(ends[stretch + 1], most)
        blocks, vectors = load_int64s(sizes_at + 16 * stretch, 2)
        for first in range(0, vectors, CHUNK_VECTORS):
            wide = min(CHUNK_VECTORS, vectors - first)
            length = read_chunk_bytes(packed, end, blocks * wide * (VECTOR_BYTES // 2))
            if length == 0:
                sound = 0
                break
            packed += length
    int64_view(found, 1)[0] = sound


@register_jitable
def read_chunk_bytes(packed: Any, end: Any, size: Any) -> Any:
    """Return the size in bytes of a chunk of ``size`` numbers, or 0 if it is malformed.

    Nothing at or after ``end`` is read.
    """
    if end - packed < CHUNK_HEADER_BYTES:
        return 0
    beyond = _count_outliers(packed)
    length = 2 * size
    if beyond != UNPACKED:
        length = (
            size * MIN_COMPACT_BITS // 8 + align_to_vector_bytes(4 * beyond)
            if size % GROUP == 0
            else end - packed
        )
    return (
        CHUNK_HEADER_BYTES + align_to_vector_bytes(length)
        if end - packed - CHUNK_HEADER_BYTES >= length
        else 0
    )


@register_jitable
def _count_outliers(packed: Any) -> Any:
    """Return how many numbers of a chunk are outside its window."""
    head = uint8_view(packed, CHUNK_HEADER_BYTES)
    return widen_byte(head[0]) | widen_byte(head[1]) << 8


@register_jitable
def unpack_chunk(packed: Any, end: Any, size: Any, out: Any) -> Any:
    """Unpack a chunk of ``size`` numbers; return its length in bytes, or 0 if it is malformed.

    Whatever the data, nothing at or after ``end`` is read, and only the numbers are written.
    """
    length = read_chunk_bytes(packed, end, size)
    if length == 0:
        return 0
    beyond, window = _count_outliers(packed), widen_byte(uint8_view(packed, CHUNK_HEADER_BYTES)[2])
    packed += CHUNK_HEADER_BYTES
    if beyond == UNPACKED:
        copy_bytes(out, packed, 2 * size)
        return length
    for begin in range(0, size, GROUP):
        unpack_group(packed, window, out + 2 * begin)
        packed += _GROUP_BYTES
    kept, numbers = uint16_view(packed, 2 * beyond), uint16_view(out, size)
    for k in range(beyond):
        if kept[2 * k] < size:
            numbers[kept[2 * k]] = kept[2 * k + 1]
    return length


@register_jitable
def widen_byte(number: Any) -> Any:
    """Return a byte as int64, because shifting a byte would not widen it."""
    return number + 0


@intrinsic
def allocate_exponent_counts(_context: Any) -> Any:
    """Return the address of a counter per exponent, on the stack of the calling kernel."""

    def emit(_context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        with builder.goto_entry_block():
            room = builder.alloca(ir.ArrayType(ir.IntType(32), _EXPONENTS))
        return builder.ptrtoint(room, INT)

    return types.int64(), emit


@intrinsic
def pack_group(_context: Any, numbers: Any, window: Any, group: Any) -> Any:
    """Pack one group of 512 numbers."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        numbers, window, group = values
        vectors = _ByteVectorBuilder(builder)
        begins = vectors.splat_byte(window)
        planes: list[Value] = [vectors.zeros()] * _PLANES
        for strip in range(_STRIPS):
            shorts = vectors.load(numbers, 2 * strip, _SHORTS)
            low, high = vectors.split_shorts(shorts)
            fraction = builder.or_(vectors.mask_bytes(high, 0x80), vectors.mask_bytes(low, 0x7F))
            vectors.store(fraction, group, _PLANES + strip)
            exponent = builder.or_(
                vectors.shift_bytes(high, 1), vectors.shift_bytes(low, -_FRACTION_BITS)
            )
            place = builder.sub(exponent, begins)
            for plane in range(_PLANES):
                bit = vectors.mask_bytes(vectors.shift_bytes(place, strip - plane), 1 << strip)
                planes[plane] = builder.or_(planes[plane], bit)
        for number, plane_bits in enumerate(planes):
            vectors.store(plane_bits, group, number)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def unpack_group(_context: Any, group: Any, window: Any, numbers: Any) -> Any:
    """Unpack one group of 512 numbers."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        group, window, numbers = values
        vectors = _ByteVectorBuilder(builder)
        begins = vectors.splat_byte(window)
        planes = [vectors.load(group, number, _BYTES) for number in range(_PLANES)]
        for strip in range(_STRIPS):
            fraction = vectors.load(group, _PLANES + strip, _BYTES)
            place = vectors.zeros()
            for plane, bits in enumerate(planes):
                bit = vectors.mask_bytes(vectors.shift_bytes(bits, plane - strip), 1 << plane)
                place = builder.or_(place, bit)
            exponent = builder.add(begins, place)
            below = vectors.mask_bytes(fraction, 0x7F)
            low = builder.or_(below, vectors.shift_bytes(exponent, _FRACTION_BITS))
            high = builder.or_(
                vectors.mask_bytes(fraction, 0x80), vectors.shift_bytes(exponent, -1)
            )
            vectors.store(vectors.join_shorts(low, high), numbers, 2 * strip)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


class _ByteVectorBuilder:
    """Emits operations on vectors of sixty-four bytes, which LLVM splits where necessary."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self._b = builder

    def zeros(self) -> Value:
        return _constant(_BYTES, 0)

    def splat_byte(self, number: Value) -> Value:
        """Return the lowest byte of an int64 in every lane."""
        nothing, first = ir.Constant(_BYTES, ir.Undefined), ir.Constant(ir.IntType(32), 0)
        one = self._b.insert_element(nothing, self._b.trunc(number, ir.IntType(8)), first)
        order = ir.Constant(ir.VectorType(ir.IntType(32), _AT_ONCE), [0] * _AT_ONCE)
        return self._b.shuffle_vector(one, nothing, order)

    def load(self, address: Value, index: int, kind: Any) -> Value:
        loaded = self._b.load(self._pointer(address, index, kind))
        loaded.align = 1
        return loaded

    def store(self, vector: Value, address: Value, index: int) -> None:
        self._b.store(vector, self._pointer(address, index, vector.type), align=1)

    def mask_bytes(self, vector: Value, mask: int) -> Value:
        return self._b.and_(vector, _constant(_BYTES, mask))

    def shift_bytes(self, vector: Value, left: int) -> Value:
        """Shift each byte to the left, or to the right if ``left`` is negative."""
        if left == 0:
            return vector
        shift = self._b.shl if left > 0 else self._b.lshr
        return shift(vector, _constant(_BYTES, abs(left)))

    def split_shorts(self, shorts: Value) -> tuple[Value, Value]:
        """Return the lower and the upper bytes of int16."""
        high = self._b.lshr(shorts, _constant(_SHORTS, 8))
        return self._b.trunc(shorts, _BYTES), self._b.trunc(high, _BYTES)

    def join_shorts(self, low: Value, high: Value) -> Value:
        """Return int16 from their lower and upper bytes."""
        upper = self._b.shl(self._b.zext(high, _SHORTS), _constant(_SHORTS, 8))
        return self._b.or_(self._b.zext(low, _SHORTS), upper)

    def _pointer(self, address: Value, index: int, kind: Any) -> Value:
        """Return a pointer to the vector at ``address + 64 * index``."""
        place = self._b.add(address, ir.Constant(INT, index * _AT_ONCE))
        return self._b.inttoptr(place, kind.as_pointer())


def _constant(kind: ir.VectorType, number: int) -> Value:
    return ir.Constant(kind, [number] * _AT_ONCE)
