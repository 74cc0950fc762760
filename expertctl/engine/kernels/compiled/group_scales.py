"""Decoding the scales of a group of columns, for sixteen rows at once.

Each scheme of integers has a scale, and some have a second number: a zero point in units of a
fraction of a step, or a minimum; see `quantisation` for what is stored.
"""

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
_BYTE = 0xFF
_SUPER_BYTES = (SUPER_GROUPS + 2) * SCALES_BYTES
"""Bytes of a super-block: a word a group, then two float16, of sixteen rows."""


def row_sum_factor(scheme: Scheme) -> float | None:
    """Return the factor on the sums of the activations, which the second number multiplies."""
    if scheme in ZERO_FRACTIONS:
        return -1 / ZERO_FRACTIONS[scheme]
    return float(MINIMA[scheme]) if scheme in MINIMA else None


def emit_group_scales(
    lanes: SimdBuilder, scheme: Scheme, scales: Value, group: Value
) -> tuple[Value, Value | None]:
    """Return the scales of a group, and the second numbers, if the scheme has them.

    ``scales`` is the address of those of a block of sixteen rows.
    """
    match scheme:
        case Scheme.INT8:
            stored = lanes.load_shorts(lanes.offset(scales, group, SCALES_BYTES))
            return lanes.bitcast_to_floats(lanes.shift_left(stored, 16)), None
        case Scheme.INT5 | Scheme.INT4:
            return _emit_small_scales(lanes, lanes.offset(scales, group, SCALES_BYTES))
        case Scheme.Q8_0 | Scheme.Q4_0:
            return lanes.load_halves(lanes.offset(scales, group, SCALES_BYTES)), None
        case Scheme.Q4_1:
            place = lanes.offset(scales, group, 2 * SCALES_BYTES)
            second = lanes.add_int(place, lanes.int_constant(LANES * SCALE_BYTES))
            return lanes.load_halves(place), lanes.load_halves(second)
        case Scheme.Q4_K:
            return _emit_super_scales(lanes, scales, group)
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
    several = lanes.int_constant(SUPER_GROUPS)
    number = lanes.divide_int(group, several)
    inner = lanes.subtract_int(group, lanes.multiply_int(number, several))
    block = lanes.offset(scales, number, _SUPER_BYTES)
    small = lanes.load_shorts(lanes.offset(block, inner, SCALES_BYTES))
    shared = lanes.add_int(block, lanes.int_constant(SUPER_GROUPS * SCALES_BYTES))
    lower = lanes.add_int(shared, lanes.int_constant(SCALES_BYTES))
    scale = lanes.convert_to_floats(lanes.mask_ints(small, _BYTE))
    least = lanes.convert_to_floats(lanes.shift_right(small, 8))
    return (
        lanes.multiply_floats(lanes.load_halves(shared), scale),
        lanes.multiply_floats(lanes.load_halves(lower), least),
    )
