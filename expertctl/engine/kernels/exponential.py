"""The exponential function of float32, for one number or for a vector of them.

Both are the same operations in the same order, so they agree bit by bit.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LEAST, MOST = -87.3, 88.37
"""Beyond them, the value at the limit is returned: no infinity, no denormal."""
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
    """Emit the same for a value of LLVM: a float or a vector of sixteen."""
    emitter = _Emitter(builder, x.type)
    x = emitter.between(x)
    shifted = emitter.fma(x, emitter.number(_PER_OCTAVE), emitter.number(_MAGIC))
    whole = builder.fsub(shifted, emitter.number(_MAGIC))
    rest = emitter.fma(whole, emitter.number(-_LN2_HIGH), x)
    rest = emitter.fma(whole, emitter.number(-_LN2_LOW), rest)
    series = emitter.number(_SERIES[0])
    for coefficient in _SERIES[1:]:
        series = emitter.fma(series, rest, emitter.number(coefficient))
    series = emitter.fma(builder.fmul(series, rest), rest, rest)
    series = builder.fadd(series, emitter.number(1))
    return builder.fmul(series, emitter.power_of_two(shifted))


class _Emitter:
    """The operations that differ between a float and a vector of them."""

    def __init__(self, builder: ir.IRBuilder, kind: ir.Type) -> None:
        self._b, self._kind = builder, kind
        self._lanes = kind.count if isinstance(kind, ir.VectorType) else 0

    def number(self, value: float) -> Any:
        return ir.Constant(self._kind, [float(value)] * self._lanes if self._lanes else value)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        name = f"llvm.fma.v{self._lanes}f32" if self._lanes else "llvm.fma.f32"
        kind = ir.FunctionType(self._kind, [self._kind] * 3)
        return self._b.call(cgutils.get_or_insert_function(self._b.module, kind, name), (a, b, c))

    def between(self, x: Any) -> Any:
        """Keep to the limits; NaN is neither below nor above."""
        for limit, beyond in ((self.number(LEAST), "<"), (self.number(MOST), ">")):
            x = self._b.select(self._b.fcmp_ordered(beyond, x, limit), limit, x)
        return x

    def power_of_two(self, shifted: Any) -> Any:
        """Return 2^n where the lowest nine bits of ``shifted`` are n."""
        whole = ir.IntType(32)
        kind = ir.VectorType(whole, self._lanes) if self._lanes else whole
        shift, one = (
            ir.Constant(kind, [value] * self._lanes if self._lanes else value)
            for value in (23, 127 << 23)
        )
        bits = self._b.shl(self._b.bitcast(shifted, kind), shift)
        return self._b.bitcast(self._b.add(bits, one), self._kind)
