"""Count memory allocations between two points in time; a decode step must make none.

Three sources are measured: Python and numpy (through tracemalloc), arrays created by compiled code
(numba counts them), and the heap of the C library, which torch uses. Measuring slows Python down,
so it is for tests and diagnostics.
"""

import ctypes
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from numba.core.runtime import _nrt_python, rtsys


@dataclass(slots=True)
class AllocationCounts:
    """Allocations made inside a `count_allocations` block; filled in when the block ends."""

    python_bytes: int = 0
    """Peak of the memory held by Python and numpy, above the level at the start."""
    compiled_arrays: int = 0
    """Number of arrays created by compiled code."""
    native_bytes: int = 0
    """Growth of the C library's heap; 0 where the library does not report it."""


class _Mallinfo2(ctypes.Structure):
    """The C library's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@contextmanager
def count_allocations() -> Iterator[AllocationCounts]:
    """Count the allocations of all threads of the process inside a ``with`` block."""
    found = AllocationCounts()
    already = tracemalloc.is_tracing()
    if not already:
        tracemalloc.start(1)
    _nrt_python.memsys_enable_stats()
    native, arrays = get_heap_bytes(), rtsys.get_allocation_stats().alloc
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield found
    finally:
        found.python_bytes = tracemalloc.get_traced_memory()[1] - before
        found.compiled_arrays = rtsys.get_allocation_stats().alloc - arrays
        found.native_bytes = get_heap_bytes() - native
        if not already:
            tracemalloc.stop()


def get_heap_bytes() -> int:
    """Return the bytes that the C library has allocated or mapped; 0 if it cannot report them."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo2
    heap = mallinfo2()
    return int(heap.uordblks + heap.hblkhd)
