"""LLVM code for the float32 exponential and for conversion between float32 and float16.

The exponential of a number and of a vector are the same operations in the same order, so they agree
bit by bit.

float16 conversion uses the processor's instruction or, without one, integers; LLVM would otherwise
call functions that compiled code does not find. Both give the same bits: ties to even, overflow to
infinity, and NaN stays NaN.
"""

from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

MIN_EXP_ARGUMENT, MAX_EXP_ARGUMENT = -87.3, 88.37
"""Arguments are clamped to these limits: no infinity, no denormal."""
_PER_OCTAVE, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, which the lowest bits then hold
_SERIES = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


@intrinsic
def exponential(_context: Any, x: Any) -> Any:
    """Return e^x within 2 units in the last place (Cephes' polynomial); NaN stays NaN."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return emit_exponential(builder, values[0])

    return types.float32(types.float32), emit


def emit_exponential(builder: ir.IRBuilder, x: Any) -> Any:
    """Emit the same for an LLVM value: a float or a vector of sixteen."""
    emitter = _ExpEmitter(builder, x.type)
    x = emitter.clamp(x)
    shifted = emitter.fma(x, emitter.constant(_PER_OCTAVE), emitter.constant(_MAGIC))
    whole = builder.fsub(shifted, emitter.constant(_MAGIC))
    rest = emitter.fma(whole, emitter.constant(-_LN2_HIGH), x)
    rest = emitter.fma(whole, emitter.constant(-_LN2_LOW), rest)
    series = emitter.constant(_SERIES[0])
    for coefficient in _SERIES[1:]:
        series = emitter.fma(series, rest, emitter.constant(coefficient))
    series = emitter.fma(builder.fmul(series, rest), rest, rest)
    series = builder.fadd(series, emitter.constant(1))
    return builder.fmul(series, emitter.power_of_two(shifted))


class _ExpEmitter:
    """The operations that differ between a float and a vector."""

    def __init__(self, builder: ir.IRBuilder, kind: ir.Type) -> None:
        self._b, self._kind = builder, kind
        self._lanes = kind.count if isinstance(kind, ir.VectorType) else 0

    def constant(self, value: float) -> Any:
        return ir.Constant(self._kind, [float(value)] * self._lanes if self._lanes else value)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        name = f"llvm.fma.v{self._lanes}f32" if self._lanes else "llvm.fma.f32"
        kind = ir.FunctionType(self._kind, [self._kind] * 3)
        return self._b.call(cgutils.get_or_insert_function(self._b.module, kind, name), (a, b, c))

    def clamp(self, x: Any) -> Any:
        """Clamp to the limits; NaN is neither below nor above."""
        for limit, beyond in (
            (self.constant(MIN_EXP_ARGUMENT), "<"),
            (self.constant(MAX_EXP_ARGUMENT), ">"),
        ):
            x = self._b.select(self._b.fcmp_ordered(beyond, x, limit), limit, x)
        return x

    def power_of_two(self, shifted: Any) -> Any:
        """Return 2^n, where n is in the lowest nine bits of ``shifted``."""
        whole = ir.IntType(32)
        kind = ir.VectorType(whole, self._lanes) if self._lanes else whole
        shift, one = (
            ir.Constant(kind, [value] * self._lanes if self._lanes else value)
            for value in (23, 127 << 23)
        )
        bits = self._b.shl(self._b.bitcast(shifted, kind), shift)
        return self._b.bitcast(self._b.add(bits, one), self._kind)


Value: TypeAlias = Any

_EXPONENT = 23
_LESS_EXACT = 13
"""Fraction bits that float32 has and float16 has not."""
_NORMAL = 113 << _EXPONENT
"""float32 with the exponent of the smallest normal float16, 2⁻¹⁴."""
_SHIFT = 112 << _EXPONENT
"""The difference between the two exponent biases."""
_INFINITE, _INFINITE_HALF = 0x7F800000, 0x7C00
_TOO_LARGE = 0x477FF000
"""65520, the smallest value that rounds to infinity and not to 65504."""
_ONE_HALF = 0x3F000000
"""0.5, whose last bit has the value of the smallest float16."""


def emit_half_to_float(builder: ir.IRBuilder, bits: Value, *, native: bool) -> Value:
    """Return the float32 value of float16 bits (int16), for one or a vector."""
    if native:
        halves = builder.bitcast(bits, _vector_type_like(bits, ir.HalfType()))
        return builder.fpext(halves, _vector_type_like(bits, ir.FloatType()))
    return _HalfConverter(builder, bits).widen(bits)


def emit_float_to_half(builder: ir.IRBuilder, floats: Value, *, native: bool) -> Value:
    """Return the float16 bits (int16) nearest to float32, for one or a vector."""
    if native:
        halves = builder.fptrunc(floats, _vector_type_like(floats, ir.HalfType()))
        return builder.bitcast(halves, _vector_type_like(floats, ir.IntType(16)))
    return _HalfConverter(builder, floats).narrow(floats)


def _vector_type_like(value: Value, kind: ir.Type) -> ir.Type:
    """Return the vector or scalar type of the same length with another element type."""
    found = value.type
    return ir.VectorType(kind, found.count) if isinstance(found, ir.VectorType) else kind


class _HalfConverter:
    """Emits the conversion with int32 operations."""

    def __init__(self, builder: ir.IRBuilder, like: Value) -> None:
        self._b = builder
        self._short, self._int = (
            _vector_type_like(like, ir.IntType(16)),
            _vector_type_like(like, ir.IntType(32)),
        )
        self._float = _vector_type_like(like, ir.FloatType())

    def widen(self, bits: Value) -> Value:
        b, n = self._b, self._int_constant
        whole = b.zext(bits, self._int)
        size = b.shl(b.and_(whole, n(0x7FFF)), n(_LESS_EXACT))
        normal = b.add(size, n(_SHIFT))
        small = self._is_less(size, 1 << _EXPONENT)
        found = b.select(small, self._widen_subnormal(size), normal)
        endless = b.add(normal, n(_SHIFT))
        quiet = b.select(self._is_greater(endless, _INFINITE), n(1 << (_EXPONENT - 1)), n(0))
        endless = b.or_(endless, quiet)
        found = b.select(self._is_less(size, _INFINITE_HALF << _LESS_EXACT), found, endless)
        sign = b.shl(b.and_(whole, n(0x8000)), n(16))
        return b.bitcast(b.or_(found, sign), self._float)

    def narrow(self, floats: Value) -> Value:
        b, n = self._b, self._int_constant
        whole = b.bitcast(floats, self._int)
        size = b.and_(whole, n(0x7FFFFFFF))
        found = b.select(
            self._is_less(size, _NORMAL), self._narrow_subnormal(size), self._round(size)
        )
        found = b.select(self._is_less(size, _TOO_LARGE), found, n(_INFINITE_HALF))
        payload = b.and_(b.lshr(size, n(_LESS_EXACT)), n(0x3FF))
        found = b.select(self._is_greater(size, _INFINITE), b.or_(payload, n(0x7E00)), found)
        sign = b.and_(b.lshr(whole, n(16)), n(0x8000))
        return b.trunc(b.or_(found, sign), self._short)

    def _widen_subnormal(self, size: Value) -> Value:
        """Read the bits as the fraction of 2⁻¹⁴, which has the same steps, and subtract 2⁻¹⁴."""
        b, least = self._b, self._int_constant(_NORMAL)
        above = b.bitcast(b.or_(size, least), self._float)
        return b.bitcast(b.fsub(above, b.bitcast(least, self._float)), self._int)

    def _narrow_subnormal(self, size: Value) -> Value:
        """Add 0.5, so that the processor rounds to its last bit as in any sum."""
        b, half = self._b, self._int_constant(_ONE_HALF)
        total = b.fadd(b.bitcast(size, self._float), b.bitcast(half, self._float))
        return b.sub(b.bitcast(total, self._int), half)

    def _round(self, size: Value) -> Value:
        """Add just less than half a step, and the rest of it if the last remaining bit is odd."""
        b, by = self._b, self._int_constant(_LESS_EXACT)
        odd = b.and_(b.lshr(size, by), self._int_constant(1))
        nearest = b.add(b.add(size, odd), self._int_constant((1 << (_LESS_EXACT - 1)) - 1))
        return b.lshr(b.sub(nearest, self._int_constant(_SHIFT)), by)

    def _int_constant(self, number: int) -> Value:
        count = getattr(self._int, "count", 0)
        return ir.Constant(self._int, [number] * count if count else number)

    def _is_less(self, a: Value, number: int) -> Value:
        return self._b.icmp_signed("<", a, self._int_constant(number))

    def _is_greater(self, a: Value, number: int) -> Value:
        return self._b.icmp_signed(">", a, self._int_constant(number))
