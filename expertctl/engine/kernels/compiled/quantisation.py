"""Code that converts activations to bfloat16 or int8, and quantises weights to integers.

Weights are quantised a group of sixteen rows at once: each lane has the group of another row, so
that nothing is summed across lanes. `expertctl.engine.kernels.quantisation` describes the formats
and how a group is fitted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic, register_jitable

from expertctl.engine.arrays import VECTOR_BYTES
from expertctl.engine.kernels.compiled.compiler import KernelFunction
from expertctl.engine.kernels.compiled.gemm import require_scheme, scheme_code
from expertctl.engine.kernels.compiled.memory import (
    allocate_stack_floats,
    atomic_store,
    copy_bytes,
    float32_view,
    int8_view,
    int32_view,
    load_int64s,
    uint16_view,
)
from expertctl.engine.kernels.compiled.simd import SimdBuilder, Value
from expertctl.engine.kernels.packed_format import GROUP_SIZE, LANES, SCALES_BYTES, Scheme
from expertctl.engine.kernels.quantisation import (
    ACTIVATION_RANGES,
    INT8_MAX,
    INT8_SCALES,
    INT8_ZERO,
    LARGEST_SCALE,
    RANGE_SHRINKAGE,
    RANGE_STEPS,
    REFINEMENTS,
    SCALE_SHIFT,
    SMALLEST_SCALE,
    ZERO_BITS,
    ZERO_FRACTIONS,
)

MAGNITUDE, INFINITY, LEAST = 0x7FFFFFFF, 0x7F800000, (127 - 100) << 23
"""Bits of a float32 magnitude, which have the order of the numbers."""
_GROUP_FLOATS = GROUP_SIZE * LANES
_PART_FLOATS = 2 * GROUP_SIZE
_BFLOAT16_NAN = 0x7FC0


def round_rows(first: int, last: int, arguments: int) -> None:
    """Round rows to bfloat16."""
    rows, stride, columns, out, wide, scales, sums, _ = load_int64s(arguments, 8)
    for token in range(first, last):
        round_row(rows + token * stride * 4, columns, out + token * wide * 2, scales, sums)


@numba.njit
def round_row(row: Any, columns: Any, out: Any, _scales: Any, _sums: Any) -> None:
    """Round one row to bfloat16, in compiled code; all arguments are addresses."""
    bits, rounded = int32_view(row, columns), uint16_view(out, columns)
    for k in range(columns):
        # Round the bits of float32 to the nearest bfloat16, ties to even.
        number = np.uint32(bits[k])
        if (number & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            rounded[k] = np.uint16((number >> np.uint32(16)) | np.uint32(0x40))
        else:
            tie = (number >> np.uint32(16)) & np.uint32(1)
            rounded[k] = np.uint16((number + np.uint32(0x7FFF) + tie) >> np.uint32(16))


def quantise_rows(first: int, last: int, arguments: int) -> None:
    """Quantise rows to int8."""
    rows, stride, columns, out, wide, scales, sums, groups = load_int64s(arguments, 8)
    for token in range(first, last):
        group = token * groups * 4
        quantise_row(
            rows + token * stride * 4, columns, out + token * wide, scales + group, sums + group
        )


@numba.njit
def quantise_row(row: Any, columns: Any, out: Any, scales: Any, sums: Any) -> None:
    """Quantise one row to int8 by groups, in compiled code; all arguments are addresses."""
    groups = columns // GROUP_SIZE
    for group in range(groups):
        begin = group * GROUP_SIZE
        sum_of = _quantise_activations(row + begin * 4, out + begin, scales + group * 4)
        int32_view(sums, groups)[group] = sum_of
    if groups * GROUP_SIZE < columns:
        begin = groups * GROUP_SIZE
        sum_of = _quantise_part(
            row + begin * 4, columns - begin, out + begin, scales + groups * 4
        )  # fmt: skip
        int32_view(sums, groups + 1)[groups] = sum_of


@numba.njit
def _quantise_part(row: Any, count: Any, out: Any, scale: Any) -> Any:
    """Quantise the group at the end of a row that has fewer columns than others."""
    whole = allocate_stack_floats(_PART_FLOATS)
    steps = whole + GROUP_SIZE * 4
    float32_view(whole, GROUP_SIZE)[:] = 0
    copy_bytes(whole, row, count * 4)
    total = _quantise_activations(whole, steps, scale)
    copy_bytes(out, steps, count)
    return total


@numba.njit
def _quantise_activations(row: Any, out: Any, scale: Any) -> Any:
    """Write the steps of a whole group, and its scale, at addresses; return their sum."""
    largest = find_largest_magnitude(row)
    if largest >= INFINITY or largest < LEAST:
        float32_view(scale, 1)[0] = np.nan if largest >= INFINITY else 0
        int8_view(out, GROUP_SIZE)[:] = 0
        return np.int32(0)
    return fit_activations(row, out, scale, np.int32(largest).view(np.float32))


@intrinsic
def find_largest_magnitude(_context: Any, row: Any) -> Any:
    """Return the bits of a group's largest magnitude.

    Those of infinity are above those of numbers, those of NaN above those of infinity.
    """

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes = SimdBuilder(builder)
        sizes = [lanes.mask_ints(bits, MAGNITUDE) for bits in _load_group(lanes, values[0])]
        return lanes.reduce_max_ints(lanes.max_int(*sizes))

    return types.int32(types.int64), emit


@intrinsic
def fit_activations(_context: Any, row: Any, out: Any, scale: Any, largest: Any) -> Any:
    """Quantise a group whose largest magnitude is given; return the sum of its steps."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (row, out, scale, number) = SimdBuilder(builder), values
        step = lanes.divide_floats(lanes.splat_float(number), lanes.float_constant(INT8_MAX))
        unit = lanes.divide_floats(lanes.float_constant(INT8_MAX), lanes.splat_float(number))
        bits = _load_group(lanes, row)
        exact = [lanes.multiply_floats(lanes.bitcast_to_floats(each), unit) for each in bits]
        first, second = (_fit_steps(lanes, exact, largest) for largest in ACTIVATION_RANGES)
        # The squared error with the best scale is sum(x^2) - sum(x q)^2 / sum(q^2).
        gains = (
            lanes.multiply_floats(lanes.multiply_floats(one.products, one.products), other.squares)
            for one, other in ((first, second), (second, first))
        )
        is_second = lanes.less_than(*gains)
        products = lanes.select_lanes(is_second, second.products, first.products)
        squares = lanes.select_lanes(is_second, second.squares, first.squares)
        fitted = lanes.multiply_floats(step, lanes.divide_floats(products, squares))
        lanes.store_first_float(fitted, scale)
        total = lanes.zero_ints()
        for vector, (one, other) in enumerate(zip(first.steps, second.steps, strict=True)):
            found = lanes.truncate_to_ints(lanes.select_lanes(is_second, other, one))
            lanes.store_bytes(found, lanes.offset(out, lanes.int_constant(vector), LANES))
            total = lanes.add_int(total, found)
        return lanes.reduce_add_ints(total)

    return types.int32(*[types.int64] * 3, types.float32), emit


@dataclass(frozen=True, slots=True)
class _FittedSteps:
    """Steps of a group, float32 vectors, and in every lane the sums that give their scale."""

    steps: list[Value]
    products: Value
    squares: Value


def _fit_steps(lanes: SimdBuilder, exact: list[Value], largest: int) -> _FittedSteps:
    """Round a group, given in steps of which its largest is `INT8_MAX`, to ``largest`` steps."""
    factor = lanes.float_constant(largest / INT8_MAX)
    steps = [lanes.round_floats(lanes.multiply_floats(each, factor)) for each in exact]
    products, squares = lanes.zero_floats(), lanes.zero_floats()
    for each, whole in zip(exact, steps, strict=True):
        products = lanes.fma(each, whole, products)
        squares = lanes.fma(whole, whole, squares)
    return _FittedSteps(steps, lanes.sum_lanes(products), lanes.sum_lanes(squares))


def _load_group(lanes: SimdBuilder, row: Value) -> list[Value]:
    """Load a group of float32, as bits."""
    vectors = map(lanes.int_constant, range(GROUP_SIZE // LANES))
    return [lanes.load_ints(lanes.offset(row, vector, VECTOR_BYTES)) for vector in vectors]


def make_quantise_blocks(scheme: Scheme) -> KernelFunction:
    """Return the function that quantises blocks of sixteen rows."""
    code, layout = scheme_code(scheme), scheme.layout
    each, vector_bytes = layout.columns, layout.vector_bytes

    def quantise(first: int, last: int, arguments: int) -> None:
        rows, stride, columns, data, scales, wrong = load_int64s(arguments, 6)
        numbers = allocate_stack_floats(_GROUP_FLOATS)
        vectors = (columns + each - 1) // each
        groups = (columns + GROUP_SIZE - 1) // GROUP_SIZE
        for block in range(first, last):
            for group in range(groups):
                begin = group * GROUP_SIZE
                count = min(GROUP_SIZE, columns - begin)
                _interleave_group(rows + block * LANES * stride + begin * 4, stride, count, numbers)
                found = quantise_group(
                    code, numbers, (count + each - 1) // each,
                    data + (block * vectors + begin // each) * vector_bytes,
                    scales + (block * groups + group) * SCALES_BYTES,
                )  # fmt: skip
                if found != 0:
                    atomic_store(wrong, 1)

    return quantise


@register_jitable
def _interleave_group(rows: Any, stride: Any, count: Any, numbers: Any) -> None:
    """Write the columns of sixteen rows, one vector each; those that do not exist are zeros."""
    out = float32_view(numbers, _GROUP_FLOATS)
    for k in range(count * LANES, _GROUP_FLOATS):
        out[k] = 0
    for lane in range(LANES):
        row = float32_view(rows + lane * stride, count)
        for k in range(count):
            out[k * LANES + lane] = row[k]


@intrinsic(prefer_literal=True)
def quantise_group(
    _context: Any, code: Any, numbers: Any, vectors: Any, data: Any, scales: Any
) -> Any:
    """Quantise the groups of sixteen rows; return 1 if some number cannot be stored, else 0.

    ``numbers`` are float32 [32, 16]; ``vectors`` are stored of them.
    """
    scheme = require_scheme(code)

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (_, numbers, vectors, data, scales) = SimdBuilder(builder), values
        if scheme is Scheme.INT8:
            return _emit_int8_group(lanes, numbers, vectors, data, scales)
        return _emit_fitted_group(lanes, scheme, numbers, vectors, data, scales)

    return types.int64(code, *[types.int64] * 4), emit


def _emit_int8_group(
    lanes: SimdBuilder, numbers: Value, vectors: Value, data: Value, scales: Value
) -> Value:
    largest = _emit_largest(lanes, numbers)
    best = _emit_best_int8_scale(lanes, numbers, largest)
    unit = lanes.divide_floats(lanes.float_constant(1), _decode_bfloat16(lanes, best))
    is_zero = lanes.less_than_ints(largest, lanes.int_lanes(LEAST))
    unit = lanes.select_lanes(is_zero, lanes.float_constant(0), unit)
    stored = lanes.select_lanes(is_zero, lanes.int_lanes(0), best)
    is_finite = lanes.less_than_ints(largest, lanes.int_lanes(INFINITY))
    stored = lanes.select_lanes(is_finite, stored, lanes.int_lanes(_BFLOAT16_NAN))
    lanes.store_shorts(stored, scales)
    with lanes.loop(vectors) as vector:
        word = lanes.int_lanes(0)
        for column in range(4):
            number = _load_column(lanes, numbers, vector, 4, column)
            step = lanes.truncate_to_ints(_int8_step(lanes, number, unit))
            stepped = lanes.add_int(step, lanes.int_lanes(INT8_ZERO))
            word = lanes.or_ints(word, lanes.shift_left(stepped, 8 * column))
        lanes.store_ints(word, lanes.offset(data, vector, VECTOR_BYTES))
    return lanes.any_lane(lanes.invert(is_finite))


def _emit_best_int8_scale(lanes: SimdBuilder, numbers: Value, largest: Value) -> Value:
    """Return the scale with the least squared error, as the bits of a bfloat16.

    The first one that is tried clips the largest number, if that is positive, by up to a step.
    """
    exact = lanes.divide_floats(lanes.bitcast_to_floats(largest), lanes.float_constant(INT8_MAX))
    first = lanes.shift_right(lanes.bitcast_to_ints(exact), 16)
    code = lanes.create_variable(lanes.add_int(first, lanes.int_lanes(-1)))
    best = lanes.create_variable(first)
    least = lanes.create_variable(lanes.float_constant(float("inf")))
    with lanes.loop(lanes.int_constant(INT8_SCALES)):
        tried, error = lanes.load_variable(code), lanes.create_variable(lanes.zero_floats())
        scale = _decode_bfloat16(lanes, tried)
        unit = lanes.divide_floats(lanes.float_constant(1), scale)
        with lanes.loop_floats(numbers, GROUP_SIZE) as number:
            value = lanes.multiply_floats(_int8_step(lanes, number, unit), scale)
            lost = lanes.subtract_floats(number, value)
            lanes.store_variable(lanes.fma(lost, lost, lanes.load_variable(error)), error)
        is_better = lanes.less_than(lanes.load_variable(error), lanes.load_variable(least))
        for variable, new in ((least, lanes.load_variable(error)), (best, tried)):
            old = lanes.load_variable(variable)
            lanes.store_variable(lanes.select_lanes(is_better, new, old), variable)
        lanes.store_variable(lanes.add_int(tried, lanes.int_lanes(1)), code)
    return lanes.load_variable(best)


def _decode_bfloat16(lanes: SimdBuilder, bits: Value) -> Value:
    return lanes.bitcast_to_floats(lanes.shift_left(bits, 16))


def _int8_step(lanes: SimdBuilder, number: Value, unit: Value) -> Value:
    whole = lanes.round_floats(lanes.multiply_floats(number, unit))
    return lanes.clamp_floats(
        whole, lanes.float_constant(-INT8_ZERO), lanes.float_constant(INT8_MAX)
    )


def _emit_fitted_group(
    lanes: SimdBuilder, scheme: Scheme, numbers: Value, vectors: Value, data: Value, scales: Value
) -> Value:
    """Fit int4 or int5."""
    fit = _GroupFit(lanes, scheme, numbers)
    wrong = fit.emit()
    unit, zero = fit.best_unit_and_zero()
    lanes.store_shorts(fit.stored_scale(), scales)
    layout = scheme.layout
    with lanes.loop(vectors) as vector:
        place, word = lanes.offset(data, vector, layout.vector_bytes), lanes.int_lanes(0)
        for half in range(2):
            fifth = lanes.int_lanes(0)
            for column in range(4):
                number = _load_column(lanes, numbers, vector, 8, 4 * half + column)
                step = lanes.truncate_to_ints(fit.step(number, unit, zero))
                moved = lanes.shift_left(lanes.mask_ints(step, 15), 8 * column + 4 * half)
                word = lanes.or_ints(word, moved)
                bit = lanes.shift_left(lanes.shift_right(step, 4), column)
                fifth = lanes.or_ints(fifth, bit)
            if scheme is Scheme.INT5:
                lanes.store_nibbles(fifth, lanes.add_int(place, lanes.int_constant(64 + 8 * half)))
        lanes.store_ints(word, place)
    return wrong


def _load_column(
    lanes: SimdBuilder, numbers: Value, vector: Value, columns: int, column: int
) -> Value:
    begin = lanes.offset(numbers, vector, columns * VECTOR_BYTES)
    return lanes.load_floats(lanes.add_int(begin, lanes.int_constant(column * VECTOR_BYTES)))


def _emit_largest(lanes: SimdBuilder, numbers: Value) -> Value:
    """Return the bits of the largest magnitude; infinity is above numbers, NaN above infinity."""
    largest = lanes.create_variable(lanes.zero_ints())
    with lanes.loop(lanes.int_constant(GROUP_SIZE)) as column:
        bits = lanes.load_ints(lanes.offset(numbers, column, VECTOR_BYTES))
        bits = lanes.mask_ints(bits, MAGNITUDE)
        lanes.store_variable(lanes.max_int(lanes.load_variable(largest), bits), largest)
    return lanes.load_variable(largest)


class _GroupFit:
    """Emits the least-squares fit of ``number = scale * (q - zero)`` in each lane."""

    def __init__(self, lanes: SimdBuilder, scheme: Scheme, numbers: Value) -> None:
        self._lanes, self._numbers = lanes, numbers
        self._top = lanes.float_constant((1 << scheme.layout.bits) - 1)
        self._units = ZERO_FRACTIONS[scheme]
        zero = lanes.float_constant(0)
        self._zero = zero
        self._least_error = lanes.create_variable(lanes.float_constant(float("inf")))
        self._best_scale = lanes.create_variable(lanes.int_lanes(SMALLEST_SCALE))
        self._best_zero = lanes.create_variable(zero)

    def emit(self) -> Value:
        """Emit the search; return 1 if some number cannot be stored, else 0."""
        lanes = self._lanes
        low, high, total = (lanes.create_variable(self._zero) for _ in range(3))
        with self._columns() as number:
            self._update(low, lambda old: lanes.min_floats(number, old))
            self._update(high, lambda old: lanes.max_floats(number, old))
            self._update(total, lambda old: lanes.add_floats(old, number))
        least, most, total = (lanes.load_variable(each) for each in (low, high, total))
        width = lanes.subtract_floats(most, least)
        share = lanes.create_variable(lanes.float_constant(1))
        exact = self._scale_code(lanes.divide_floats(width, self._top), clamped=False)
        with lanes.loop(lanes.int_constant(RANGE_STEPS)):
            part = lanes.load_variable(share)
            less = self._constant(RANGE_SHRINKAGE)
            lanes.store_variable(lanes.subtract_floats(part, less), share)
            clipped = lanes.multiply_floats(width, part)
            begin = lanes.multiply_floats(
                self._constant(0.5), lanes.subtract_floats(lanes.add_floats(least, most), clipped)
            )
            scale = lanes.create_variable(self._scale_code(lanes.divide_floats(clipped, self._top)))
            start = lanes.create_variable(begin)
            with lanes.loop(lanes.int_constant(REFINEMENTS + 1)):
                self._try(scale, start, total)
        largest = _emit_largest(lanes, self._numbers)
        is_finite = lanes.less_than_ints(largest, lanes.int_lanes(INFINITY))
        fits = lanes.less_than_ints(exact, lanes.int_lanes(LARGEST_SCALE + 1))
        return lanes.any_lane(lanes.invert(lanes.both(is_finite, fits)))

    def _try(self, scale: Value, start: Value, total: Value) -> None:
        """Quantise with a scale, keep it if it is the best, and fit a new one to the steps."""
        lanes = self._lanes
        code = lanes.load_variable(scale)
        size = self._decode(code)
        unit = lanes.divide_floats(self._constant(1), size)
        offset = lanes.multiply_floats(lanes.load_variable(start), unit)
        units = lanes.multiply_floats(offset, self._constant(-self._units))
        stored = lanes.clamp_floats(
            lanes.round_floats(units), self._zero, self._constant((1 << ZERO_BITS) - 1)
        )
        zero = lanes.multiply_floats(stored, self._constant(1 / self._units))
        error, steps, squares, products = (lanes.create_variable(self._zero) for _ in range(4))
        with self._columns() as number:
            step = self.step(number, unit, zero)
            value = lanes.multiply_floats(lanes.subtract_floats(step, zero), size)
            lost = lanes.subtract_floats(number, value)
            self._update(error, lambda old: lanes.fma(lost, lost, old))
            self._update(steps, lambda old: lanes.add_floats(old, step))
            self._update(squares, lambda old: lanes.fma(step, step, old))
            self._update(products, lambda old: lanes.fma(step, number, old))
        self._keep_best(lanes.load_variable(error), code, stored)
        steps, squares, products = (lanes.load_variable(v) for v in (steps, squares, products))
        count = self._constant(GROUP_SIZE)
        spread = lanes.subtract_floats(
            lanes.multiply_floats(count, squares), lanes.multiply_floats(steps, steps)
        )
        common = lanes.subtract_floats(
            lanes.multiply_floats(count, products), lanes.multiply_floats(total, steps)
        )
        refined = self._scale_code(lanes.divide_floats(common, spread))
        varies = lanes.less_than(self._zero, spread)
        refined = lanes.select_lanes(varies, refined, code)
        lanes.store_variable(refined, scale)
        rest = lanes.subtract_floats(total, lanes.multiply_floats(self._decode(refined), steps))
        lanes.store_variable(lanes.divide_floats(rest, count), start)

    def _keep_best(self, error: Value, code: Value, stored: Value) -> None:
        lanes = self._lanes
        is_better = lanes.less_than(error, lanes.load_variable(self._least_error))
        for variable, new in (
            (self._least_error, error),
            (self._best_scale, code),
            (self._best_zero, stored),
        ):
            old = lanes.load_variable(variable)
            lanes.store_variable(lanes.select_lanes(is_better, new, old), variable)

    def best_unit_and_zero(self) -> tuple[Value, Value]:
        """Return the reciprocal of the best scale, and its zero point in steps."""
        lanes = self._lanes
        scale = self._decode(lanes.load_variable(self._best_scale))
        zero = lanes.multiply_floats(
            lanes.load_variable(self._best_zero), self._constant(1 / self._units)
        )
        return lanes.divide_floats(self._constant(1), scale), zero

    def stored_scale(self) -> Value:
        """Return the best scale and zero point as they are stored."""
        lanes = self._lanes
        code = lanes.subtract_int(
            lanes.load_variable(self._best_scale), lanes.int_lanes(SMALLEST_SCALE)
        )
        zero = lanes.truncate_to_ints(lanes.load_variable(self._best_zero))
        return lanes.or_ints(lanes.shift_left(code, ZERO_BITS), zero)

    def step(self, number: Value, unit: Value, zero: Value) -> Value:
        """Return the q of a number, as float32."""
        lanes = self._lanes
        whole = lanes.round_floats(lanes.fma(number, unit, zero))
        return lanes.clamp_floats(whole, self._zero, self._top)

    def _scale_code(self, scale: Value, *, clamped: bool = True) -> Value:
        """Round a scale to four bits of fraction; return its first bits as float32."""
        lanes, half = self._lanes, self._lanes.int_lanes(1 << (SCALE_SHIFT - 1))
        bits = lanes.add_int(lanes.bitcast_to_ints(scale), half)
        code = lanes.shift_right(bits, SCALE_SHIFT, signed=True)
        return lanes.clamp_ints(code, SMALLEST_SCALE, LARGEST_SCALE) if clamped else code

    def _decode(self, code: Value) -> Value:
        lanes = self._lanes
        return lanes.bitcast_to_floats(lanes.shift_left(code, SCALE_SHIFT))

    def _constant(self, number: float) -> Value:
        return self._lanes.float_constant(number)

    def _columns(self) -> Any:
        return self._lanes.loop_floats(self._numbers, GROUP_SIZE)

    def _update(self, variable: Value, change: Callable[[Value], Value]) -> None:
        self._lanes.store_variable(change(self._lanes.load_variable(variable)), variable)
