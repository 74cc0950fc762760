"""What memory gives: every byte of some matrices is read once, and nothing else is done with it.

This has to be as fast as reading can be, for other speeds are told as shares of it. So all matrices
are one operation, whose workers claim long stretches and wait for each other once.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.kernel import compile_kernel
from expertctl.engine.kernels.lanes import VECTOR_BYTES, Lanes
from expertctl.engine.kernels.memory import aligned, longs_at, words
from expertctl.engine.kernels.packed import PackedMatrix
from expertctl.engine.kernels.program import ProgramBuilder

Numbers = np.ndarray[Any, Any]

ITEM_BYTES = 64 << 10

_AT_ONCE = 8
"""Vectors that are read without waiting for each other."""


class Reading:
    """Reads numbers and scales of matrices, in whole items; what is left of either is not read."""

    def __init__(self, matrices: Iterable[PackedMatrix]) -> None:
        """Make the program that reads them."""
        parts = tuple(matrices)
        arrays = (array for matrix in parts for array in (matrix.data, matrix.scales))
        places = np.concatenate([_places(array) for array in arrays])
        self._found = aligned((len(places), VECTOR_BYTES // 8), np.int64)
        arguments = np.array([places.ctypes.data, self._found.ctypes.data], np.int64)
        builder = ProgramBuilder()
        builder.add(compile_kernel("read", _read), arguments, len(places))
        builder.keep(parts, places, self._found)
        self._program = builder.build()

    @property
    def nbytes(self) -> int:
        """How many bytes it reads."""
        return len(self._found) * ITEM_BYTES

    def run(self, crew: Crew) -> int:
        """Read everything once; return the exclusive or of all its words."""
        crew.run(self._program)
        return int(np.bitwise_xor.reduce(self._found, axis=None))


def _places(array: Numbers) -> Numbers:
    """Return the addresses of its items."""
    offsets = np.arange(array.nbytes // ITEM_BYTES, dtype=np.int64) * ITEM_BYTES
    return array.ctypes.data + offsets


def _read(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    places, out = words(arguments, 2)
    for item in range(first, last):
        read_item(longs_at(places, last)[item], out + item * VECTOR_BYTES)


@intrinsic
def read_item(_context: Any, place: Any, out: Any) -> Any:
    """Write the exclusive or of an item's vectors."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (place, out) = Lanes(builder), values
        found = [lanes.variable(lanes.no_ints()) for _ in range(_AT_ONCE)]
        step = _AT_ONCE * VECTOR_BYTES
        with lanes.count(lanes.constant(ITEM_BYTES // step)) as turn:
            begin = lanes.at(place, turn, step)
            for number, bits in enumerate(found):
                vector = lanes.ints(lanes.sum(begin, lanes.constant(number * VECTOR_BYTES)))
                lanes.write(lanes.exclusive(lanes.read(bits), vector), bits)
        every = lanes.no_ints()
        for bits in found:
            every = lanes.exclusive(every, lanes.read(bits))
        lanes.store(lanes.as_floats(every), out)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit
