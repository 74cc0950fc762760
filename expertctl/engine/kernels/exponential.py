"""The exponential function of float32, written so that LLVM computes many at once."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

_LEAST, _MOST = np.float32(-87.3), np.float32(88.7)
_PER_OCTAVE = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_MAGIC = np.float32(12582912)  # 1.5 * 2^23: adding it rounds to an integer


@intrinsic
def _power_of_two(_context: Any, whole: Any) -> Any:
    """Return 2^whole of a whole float32 in the normal range."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        number = ir.IntType(32)
        exponent = builder.fptosi(values[0], number)
        bits = builder.shl(builder.add(exponent, ir.Constant(number, 127)), ir.Constant(number, 23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.float32), emit


@register_jitable
def exponential(x: Any) -> Any:
    """Return e^x within 2 units in the last place (Cephes' polynomial); 0 stays above -87.3."""
    x = min(max(x, _LEAST), _MOST)
    whole = (x * _PER_OCTAVE + _MAGIC) - _MAGIC
    rest = x - whole * _LN2_HIGH - whole * _LN2_LOW
    series = np.float32(1.9875691500e-4)
    series = series * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    return (series * rest * rest + rest + np.float32(1)) * _power_of_two(whole)
