"""A kernel: compiled code that does a range of an operation's items, called by its address.

Its three int64 are the first item, the one after the last, and the address of its arguments.
An item is always computed by one worker in one order, so results have the same bits whoever
computes them. Compiled code is kept on disk where `compiled_cache` said.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
from numba import types

from expertctl.engine.kernels.compiled import compiled

KernelFunction = Callable[[int, int, int], None]

_SIGNATURE = types.void(types.int64, types.int64, types.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """Compiled code, alive as long as this is."""

    name: str
    address: int
    _code: Any

    def __call__(self, first: int, last: int, arguments: int) -> None:
        """Do some items now, on this thread; the interpreter is free meanwhile."""
        self._code.ctypes(first, last, arguments)


def compile_kernel(name: str, function: KernelFunction) -> Kernel:
    """Compile a function, or load what an earlier process compiled."""
    code = compiled(name, lambda cache: numba.cfunc(_SIGNATURE, cache=cache)(function))
    return Kernel(name, code.address, code)
