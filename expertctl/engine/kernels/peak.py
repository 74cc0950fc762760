"""The most arithmetic that the processor can do: what tiles are made of, on registers alone.

It is the upper bound of products that never wait for their operands. Every number is one, so the
sums say how many products were added.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic

from expertctl.engine.kernels.cpu import host_cpu
from expertctl.engine.kernels.kernel import Kernel, KernelFunction, compile_kernel
from expertctl.engine.kernels.lanes import LANES, VECTOR_BYTES, Lanes, Value
from expertctl.engine.kernels.memory import aligned, words
from expertctl.engine.kernels.program import Program, ProgramBuilder
from expertctl.engine.kernels.scheme import Scheme

Numbers = np.ndarray[Any, Any]

TURNS = 4096
"""How often each sum of an item is added to; float32 holds the result exactly."""

_ITEMS_A_WORKER = 64
_FMA, _BF16, _BYTES = range(3)
_PRODUCTS = {_FMA: 1, _BF16: 2, _BYTES: 4}
"""Products that one lane adds at once."""
_ONES: dict[int, Numbers] = {
    _FMA: np.ones(LANES, np.float32),
    _BF16: np.full(2 * LANES, 0x3F80, np.uint16),
    _BYTES: np.ones(4 * LANES, np.uint8),
}


class Arithmetic:
    """A program of nothing but arithmetic: that of products with matrices of one scheme."""

    def __init__(self, scheme: Scheme, *, workers: int) -> None:
        """Make the program; each of so many workers gets enough to do for some milliseconds."""
        way = _way(scheme)
        items = _ITEMS_A_WORKER * workers
        self.operations = 2 * _PRODUCTS[way] * LANES * _chains() * TURNS * items
        """How many a run does; a product and its addition are two."""
        self._sums = aligned((items, LANES), np.float32)
        ones = aligned(VECTOR_BYTES, np.uint8)
        ones[...] = _ONES[way].view(np.uint8)
        arguments = np.array([ones.ctypes.data, self._sums.ctypes.data, TURNS], np.int64)
        builder = ProgramBuilder()
        builder.add(_kernel(way), arguments, items)
        builder.keep(ones, self._sums)
        self.program: Program = builder.build()

    @property
    def added(self) -> int:
        """How many products the last run added, as its sums say."""
        return int(self._sums.astype(np.float64).sum())


def _way(scheme: Scheme) -> int:
    """Return how this processor multiplies numbers of a scheme fastest."""
    cpu = host_cpu()
    if scheme is Scheme.BFLOAT16 and cpu.bf16_dot:
        return _BF16
    return _BYTES if scheme.layout.is_grouped and cpu.byte_dot else _FMA


def _chains() -> int:
    """Return how many sums fit into registers; several hide the latency of an addition."""
    return 20 if host_cpu().wide else 6


@cache
def _kernel(way: int) -> Kernel:
    return compile_kernel(f"peak {way}", _function(way))


def _function(way: int) -> KernelFunction:
    def peak(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
        ones, sums, turns = words(arguments, 3)
        for item in range(first, last):
            _add_products(way, ones, turns, sums + item * VECTOR_BYTES)

    return peak


@intrinsic(prefer_literal=True)
def _add_products(_context: Any, way: Any, ones: Any, turns: Any, out: Any) -> Any:
    """Add products of ones to all sums so many times; write the total of the sums."""
    if not isinstance(way, types.IntegerLiteral):
        raise RequireLiteralValue("how products are added is a constant")
    number = way.literal_value

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        _, source, times, place = values
        lanes = Lanes(builder)
        load = lanes.floats if number == _FMA else lanes.ints
        one = load(source)
        totals = [lanes.variable(_nothing(lanes, number)) for _ in range(_chains())]
        with lanes.count(times):
            for total in totals:
                lanes.write(_added(lanes, number, lanes.read(total), one), total)
        found = [_as_floats(lanes, number, lanes.read(total)) for total in totals]
        together = found[0]
        for each in found[1:]:
            together = lanes.add(together, each)
        lanes.store(together, place)
        return context.get_dummy_value()

    return types.void(way, types.int64, types.int64, types.int64), emit


def _nothing(lanes: Lanes, way: int) -> Value:
    return lanes.no_ints() if way == _BYTES else lanes.no_floats()


def _added(lanes: Lanes, way: int, total: Value, one: Value) -> Value:
    if way == _FMA:
        return lanes.fma(one, one, total)
    return lanes.bf16_dot(total, one, one) if way == _BF16 else lanes.byte_dot(total, one, one)


def _as_floats(lanes: Lanes, way: int, total: Value) -> Value:
    return lanes.to_floats(total) if way == _BYTES else total
