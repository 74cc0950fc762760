"""Numbers of float16 from float32 and back, by an instruction or, where there is none, by integers.

Without the instruction LLVM would call functions that compiled code does not find. Both ways give
the same bits: ties go to even, what is too large becomes infinite, and NaN stays NaN.
"""

from typing import Any, TypeAlias

from llvmlite import ir

Value: TypeAlias = Any

_EXPONENT = 23
_LESS_EXACT = 13
"""Fraction bits that float32 has more than float16."""
_NORMAL = 113 << _EXPONENT
"""float32 with the exponent of the smallest normal float16, 2⁻¹⁴."""
_SHIFT = 112 << _EXPONENT
"""The difference between the exponent biases of the two."""
_INFINITE, _INFINITE_HALF = 0x7F800000, 0x7C00
_TOO_LARGE = 0x477FF000
"""65520, the first that is nearer to infinity than to 65504."""
_ONE_HALF = 0x3F000000
"""0.5, whose last bit stands for the smallest float16."""


def emit_widened(builder: ir.IRBuilder, bits: Value, *, native: bool) -> Value:
    """Return the float32 of the int16 bits of float16, one or a vector."""
    if native:
        halves = builder.bitcast(bits, _like(bits, ir.HalfType()))
        return builder.fpext(halves, _like(bits, ir.FloatType()))
    return _Bits(builder, bits).widened(bits)


def emit_narrowed(builder: ir.IRBuilder, floats: Value, *, native: bool) -> Value:
    """Return the int16 bits of float16 that are nearest to float32, one or a vector."""
    if native:
        halves = builder.fptrunc(floats, _like(floats, ir.HalfType()))
        return builder.bitcast(halves, _like(floats, ir.IntType(16)))
    return _Bits(builder, floats).narrowed(floats)


def _like(value: Value, kind: ir.Type) -> ir.Type:
    """Return the type of as many of a kind."""
    found = value.type
    return ir.VectorType(kind, found.count) if isinstance(found, ir.VectorType) else kind


class _Bits:
    """Emits what is done with int32."""

    def __init__(self, builder: ir.IRBuilder, like: Value) -> None:
        self._b = builder
        self._short, self._int = _like(like, ir.IntType(16)), _like(like, ir.IntType(32))
        self._float = _like(like, ir.FloatType())

    def widened(self, bits: Value) -> Value:
        b, n = self._b, self._number
        whole = b.zext(bits, self._int)
        size = b.shl(b.and_(whole, n(0x7FFF)), n(_LESS_EXACT))
        normal = b.add(size, n(_SHIFT))
        small = self._less(size, 1 << _EXPONENT)
        found = b.select(small, self._of_subnormal(size), normal)
        endless = b.add(normal, n(_SHIFT))
        quiet = b.select(self._more(endless, _INFINITE), n(1 << (_EXPONENT - 1)), n(0))
        endless = b.or_(endless, quiet)
        found = b.select(self._less(size, _INFINITE_HALF << _LESS_EXACT), found, endless)
        sign = b.shl(b.and_(whole, n(0x8000)), n(16))
        return b.bitcast(b.or_(found, sign), self._float)

    def narrowed(self, floats: Value) -> Value:
        b, n = self._b, self._number
        whole = b.bitcast(floats, self._int)
        size = b.and_(whole, n(0x7FFFFFFF))
        found = b.select(self._less(size, _NORMAL), self._to_subnormal(size), self._rounded(size))
        found = b.select(self._less(size, _TOO_LARGE), found, n(_INFINITE_HALF))
        payload = b.and_(b.lshr(size, n(_LESS_EXACT)), n(0x3FF))
        found = b.select(self._more(size, _INFINITE), b.or_(payload, n(0x7E00)), found)
        sign = b.and_(b.lshr(whole, n(16)), n(0x8000))
        return b.trunc(b.or_(found, sign), self._short)

    def _of_subnormal(self, size: Value) -> Value:
        """Read its bits as the fraction of 2⁻¹⁴, whose steps are the same, and subtract 2⁻¹⁴."""
        b, least = self._b, self._number(_NORMAL)
        above = b.bitcast(b.or_(size, least), self._float)
        return b.bitcast(b.fsub(above, b.bitcast(least, self._float)), self._int)

    def _to_subnormal(self, size: Value) -> Value:
        """Add 0.5, which rounds to its last bit as the processor rounds any sum."""
        b, half = self._b, self._number(_ONE_HALF)
        total = b.fadd(b.bitcast(size, self._float), b.bitcast(half, self._float))
        return b.sub(b.bitcast(total, self._int), half)

    def _rounded(self, size: Value) -> Value:
        """Add just less than half a step, and the rest of it where the last bit kept is odd."""
        b, by = self._b, self._number(_LESS_EXACT)
        odd = b.and_(b.lshr(size, by), self._number(1))
        nearest = b.add(b.add(size, odd), self._number((1 << (_LESS_EXACT - 1)) - 1))
        return b.lshr(b.sub(nearest, self._number(_SHIFT)), by)

    def _number(self, number: int) -> Value:
        count = getattr(self._int, "count", 0)
        return ir.Constant(self._int, [number] * count if count else number)

    def _less(self, a: Value, number: int) -> Value:
        return self._b.icmp_signed("<", a, self._number(number))

    def _more(self, a: Value, number: int) -> Value:
        return self._b.icmp_signed(">", a, self._number(number))
