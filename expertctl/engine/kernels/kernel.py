"""A kernel: compiled code that does a range of an operation's items, called by its address.

Its three int64 are the first item, the one after the last, and the address of its arguments.
An item is always computed by one worker in one order, so which worker that is changes no bit of a
result. Compiled code is kept on disk where `compiled_cache` said.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

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
    """Compile a function, or load what an earlier process compiled.

    The name is that of this code alone: two kernels that differ have different names.
    """
    code = compiled(name, lambda cache: _code(name, function, cache=cache))
    return Kernel(name, code.address, code)


def _code(name: str, function: KernelFunction, *, cache: bool) -> Any:
    """Do what `numba.cfunc` does, but find kept code by the name of the kernel."""
    code: Any = CFunc(function, normalize_signature(_SIGNATURE), locals={}, options={})
    if cache:
        code._cache = _KeptByName(function, name)
    code.compile()
    return code


class _KeptByName(FunctionCache):
    """Kept code of one kernel.

    numba looks for a function by a hash of all that it closes over. Functions and intrinsics among
    that have a random number in each process, so a kernel made of others would never be found. The
    folder already stands for all sources (`compiled`).
    """

    def __init__(self, function: KernelFunction, name: str) -> None:
        super().__init__(function)
        self._name_of_kernel = name

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return sig, codegen.magic_tuple(), self._name_of_kernel
