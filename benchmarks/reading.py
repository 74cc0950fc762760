"""What memory gives: every byte of some matrices read once, and nothing done with them."""

from collections.abc import Iterable
from functools import reduce
from operator import xor

import numpy as np

from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.kernel import compile_kernel
from expertctl.engine.kernels.memory import aligned, longs_at, words
from expertctl.engine.kernels.packed import PackedMatrix
from expertctl.engine.kernels.program import ProgramBuilder

ITEM_BYTES = 64 << 10

_PORTION = 8
_WORD_BYTES = 8


class Reading:
    """Reads the numbers of matrices, in whole items; what is left of a matrix is not read."""

    def __init__(self, matrices: Iterable[PackedMatrix]) -> None:
        """Make the program that reads them."""
        builder, kernel = ProgramBuilder(), compile_kernel("read", _read)
        self._found = []
        for matrix in matrices:
            items = matrix.data.nbytes // ITEM_BYTES
            found = aligned(items, np.int64)
            arguments = np.array([matrix.data.ctypes.data, found.ctypes.data], np.int64)
            builder.add(kernel, arguments, items, portion=_PORTION)
            builder.keep(matrix, found)
            self._found.append(found)
        self._program = builder.build()

    def run(self, crew: Crew) -> int:
        """Read everything once; return the exclusive or of all its words."""
        crew.run(self._program)
        return reduce(xor, (int(np.bitwise_xor.reduce(found)) for found in self._found))


def _read(first: int, last: int, arguments: int) -> None:
    data, out = words(arguments, 2)
    count = ITEM_BYTES // _WORD_BYTES
    found = longs_at(out, last)
    for item in range(first, last):
        numbers = longs_at(data + item * ITEM_BYTES, count)
        bits = 0
        for k in range(count):
            bits ^= numbers[k]
        found[item] = bits
