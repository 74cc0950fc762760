"""How the C library keeps what a server's threads let go of.

glibc gives every thread an arena of its own, up to eight for each processor, and what is free in
one is not used by another. A server has dozens of threads that each compute now and then, so it
would hold many times what it needs. Two arenas are hardly slower: large arrays have none at all.

Of an arena only the end goes back to the system by itself. What is free in its middle, after many
jobs at once, stays with the process until it is asked for.
"""

import ctypes
import sys

ARENAS = 2
_M_ARENA_MAX = -8
"""Of `mallopt`; see mallopt(3)."""


def bound_arenas() -> bool:
    """Let the threads of this process, and those to come, share `ARENAS`; False without glibc."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, ARENAS) == 1


def return_free_pages() -> bool:
    """Give pages in which nothing is left back to the system; False where none was, or no glibc.

    Takes some milliseconds, in which other threads may wait for memory.
    """
    if sys.platform != "linux":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # it lets the interpreter go on
    return trim is not None and trim(0) == 1
