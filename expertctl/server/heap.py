"""How the C library keeps memory that the server's threads have freed.

glibc gives every thread an arena of its own, up to eight for each processor, and memory that is
free in one arena is not used by another. A server has dozens of threads that each compute now and
then, so it would hold many times what it needs. Two arenas are hardly slower: large arrays are
allocated outside of them.

By itself an arena returns only its end to the system. Memory that is free in its middle, after many
jobs at once, stays with the process until `return_free_pages` is called.
"""

import ctypes
import sys

ARENAS = 2
_M_ARENA_MAX = -8
"""A parameter of `mallopt`; see mallopt(3)."""


def bound_arenas() -> bool:
    """Let the threads of this process, and those to come, share `ARENAS`; False without glibc."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, ARENAS) == 1


def return_free_pages() -> bool:
    """Return empty pages to the system; False if there were none, or without glibc.

    Takes some milliseconds, in which other threads may wait for memory.
    """
    if sys.platform != "linux":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the call releases the GIL
    return trim is not None and trim(0) == 1
