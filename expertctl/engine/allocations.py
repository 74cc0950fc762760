"""How much memory was allocated between two moments: a decode step allocates none.

Three sources are looked at: Python and numpy (as tracemalloc sees them), arrays made by compiled
code (numba counts them), and the C library's heap, where torch allocates. Measuring slows Python
down, so it is for tests and on request.
"""

import ctypes
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from numba.core.runtime import _nrt_python, rtsys


@dataclass(slots=True)
class AllocationCounts:
    """What was allocated, once the measuring is over."""

    python_bytes: int = 0
    """The most that Python and numpy held at once beyond what they held at the beginning."""
    compiled_arrays: int = 0
    """How many arrays compiled code made."""
    native_bytes: int = 0
    """By how much the C library's heap grew; 0 where it does not say."""


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
    """Measure what is allocated in a ``with`` block, in all threads of the process."""
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
    """Return how much the C library has given out, mapped blocks included; 0 if it is silent."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo2
    heap = mallinfo2()
    return int(heap.uordblks + heap.hblkhd)
