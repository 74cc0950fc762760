"""Products of bytes, and decoding the scales of a group of columns, for sixteen rows at once.

Each scheme of integers has a scale, and some have a second number: a zero point in units of a
fraction of a step, or a minimum; see `quantisation` for what is stored.
"""

from collections.abc import Callable

from expertctl.engine.kernels.compiled.compiler import CpuFeatures
from expertctl.engine.kernels.compiled.simd import SimdBuilder, Value
from expertctl.engine.kernels.packed_format import LANES, SCALE_BYTES, SCALES_BYTES, Scheme
from expertctl.engine.kernels.quantisation import (
    MINIMA,
    SCALE_SHIFT,
    SMALLEST_SCALE,
    SUPER_GROUPS,
    ZERO_BITS,
    ZERO_FRACTIONS,
)

_ZERO_MASK = (1 << ZERO_BITS) - 1
_SCALE_MASK = 0xFFFF - _ZERO_MASK
_BYTE, _EVEN_BYTES = 0xFF, 0x00FF00FF
_SUPER_BYTES = (SUPER_GROUPS + 2) * SCALES_BYTES
"""Bytes of a super-block: a word a group, then two float16, of sixteen rows."""
_HALVES_BYTES = (SUPER_GROUPS + 1) * SCALES_BYTES
"""The same in Q6_K, with one float16."""


def row_sum_factor(scheme: Scheme) -> float | None:
    """Return the factor on the sums of the activations, which the second number multiplies."""
    if scheme in ZERO_FRACTIONS:
        return -1 / ZERO_FRACTIONS[scheme]
    return float(MINIMA[scheme]) if scheme in MINIMA else None


def emit_group_scales(
    lanes: SimdBuilder, scheme: Scheme, scales: Value, group: Value, *, half: int = 0
) -> tuple[Value, Value | None]:
    """Return the scales of a group, and the second numbers, if the scheme has them.

    ``scales`` is the address of those of a block of sixteen rows; ``half`` is 0 or 1 in Q6_K.
    """
    match scheme:
        case Scheme.INT8:
            stored = lanes.load_shorts(lanes.offset(scales, group, SCALES_BYTES))
            return lanes.bitcast_to_floats(lanes.shift_left(stored, 16)), None
        case Scheme.INT5 | Scheme.INT4:
            return _emit_small_scales(lanes, lanes.offset(scales, group, SCALES_BYTES))
        case Scheme.Q8_0 | Scheme.Q4_0 | Scheme.Q5_0:
            return lanes.load_halves(lanes.offset(scales, group, SCALES_BYTES)), None
        case Scheme.Q4_1 | Scheme.Q5_1:
            place = lanes.offset(scales, group, 2 * SCALES_BYTES)
            second = lanes.add_int(place, lanes.int_constant(LANES * SCALE_BYTES))
            return lanes.load_halves(place), lanes.load_halves(second)
        case Scheme.Q4_K | Scheme.Q5_K:
            return _emit_super_scales(lanes, scales, group)
        case Scheme.Q6_K:
            return _emit_half_scales(lanes, scales, group, half), None
    raise AssertionError(f"{scheme} has no scales")


def _emit_small_scales(lanes: SimdBuilder, place: Value) -> tuple[Value, Value]:
    """Return a scale of nine bits, see `decode_scales`, and a zero point in its units."""
    stored = lanes.load_shorts(place)
    code = lanes.shift_left(lanes.mask_ints(stored, _SCALE_MASK), SCALE_SHIFT - ZERO_BITS)
    least = lanes.int_lanes(SMALLEST_SCALE << SCALE_SHIFT)
    scale = lanes.bitcast_to_floats(lanes.add_int(code, least))
    return scale, lanes.convert_to_floats(lanes.mask_ints(stored, _ZERO_MASK))


def _emit_super_scales(lanes: SimdBuilder, scales: Value, group: Value) -> tuple[Value, Value]:
    """Return the products of the two numbers of a group with those of its super-block."""
    small, shared = _find_super_group(lanes, scales, group, _SUPER_BYTES)
    lower = lanes.add_int(shared, lanes.int_constant(SCALES_BYTES))
    scale = lanes.convert_to_floats(lanes.mask_ints(small, _BYTE))
    least = lanes.convert_to_floats(lanes.shift_right(small, 8))
    return (
        lanes.multiply_floats(lanes.load_halves(shared), scale),
        lanes.multiply_floats(lanes.load_halves(lower), least),
    )


def _emit_half_scales(lanes: SimdBuilder, scales: Value, group: Value, half: int) -> Value:
    """Return the product of the signed byte of half a group with the scale of its super-block."""
    small, shared = _find_super_group(lanes, scales, group, _HALVES_BYTES)
    byte = lanes.shift_right(lanes.shift_left(small, 16 if half else 24), 24, signed=True)
    return lanes.multiply_floats(lanes.load_halves(shared), lanes.convert_to_floats(byte))


def _find_super_group(
    lanes: SimdBuilder, scales: Value, group: Value, size: int
) -> tuple[Value, Value]:
    """Return the word of a group, and the address of the float16 after those of a super-block."""
    several = lanes.int_constant(SUPER_GROUPS)
    number = lanes.divide_int(group, several)
    inner = lanes.subtract_int(group, lanes.multiply_int(number, several))
    block = lanes.offset(scales, number, size)
    small = lanes.load_shorts(lanes.offset(block, inner, SCALES_BYTES))
    return small, lanes.add_int(block, lanes.int_constant(SUPER_GROUPS * SCALES_BYTES))


ByteProduct = Callable[[Value, Value, Value], Value]
"""Adds to a total, in each lane, four products of an unsigned and a signed byte."""


def select_byte_product(lanes: SimdBuilder, cpu: CpuFeatures, *, is_byte: bool) -> ByteProduct:
    """Return what adds four byte products per lane: in int32, or exactly in float32.

    ``is_byte``: weights have eight bits, so the sum of two products may not fit into int16.
    """

    def add_int16_products(total: Value, unsigned: Value, signed: Value) -> Value:
        """Add the products of even bytes, then of odd bytes."""
        even = lanes.shift_right_shorts(lanes.shift_left_shorts(signed, 8), 8, signed=True)
        odd = lanes.shift_right_shorts(signed, 8, signed=True)
        total = lanes.short_dot(total, lanes.mask_ints(unsigned, _EVEN_BYTES), even)
        return lanes.short_dot(total, lanes.shift_right_shorts(unsigned, 8), odd)

    def add_byte_products(total: Value, unsigned: Value, signed: Value) -> Value:
        """Add the products byte by byte, in float32, which holds a group's sum exactly."""
        for byte in range(4):
            weight = lanes.mask_ints(lanes.shift_right(unsigned, 8 * byte), _BYTE)
            row = lanes.shift_right(lanes.shift_left(signed, 24 - 8 * byte), 24, signed=True)
            total = lanes.fma(lanes.convert_to_floats(weight), lanes.convert_to_floats(row), total)
        return total

    if cpu.byte_dot:
        return lanes.byte_dot
    if not cpu.short_dot:
        return add_byte_products
    return add_int16_products if is_byte else lanes.small_byte_dot
