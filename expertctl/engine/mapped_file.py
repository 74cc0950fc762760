"""A file in the addresses of this process, read only; parts of it are lent while they are cached.

Reading a part that the system has dropped waits for the disk; reading one that was cut off from the
file ends the process (SIGBUS). So only parts are lent that the system holds now; of what was cut
off it holds nothing.
"""

import ctypes
import mmap
import os
from functools import cache
from typing import Any

import numpy as np

_PRESENT = 1
"""What ``mincore`` says of a page that is there; other bits say other things."""


class MappedFile:
    """The mapping of an open file; it stays when the file is closed or unlinked."""

    def __init__(self, mapping: mmap.mmap) -> None:
        """Own a mapping."""
        self._mapping = mapping
        self._octets: np.ndarray[Any, Any] | None = np.frombuffer(mapping, np.uint8)
        self._address = int(self._octets.ctypes.data)

    @classmethod
    def of(cls, handle: int) -> "MappedFile | None":
        """Map a whole file; None on a system that does not tell what it holds of it.

        Raises:
            OSError: when there are no addresses left for it.
        """
        if _mincore() is None or not hasattr(mmap, "MAP_SHARED"):
            return None
        size = os.fstat(handle).st_size
        return cls(mmap.mmap(handle, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))

    def is_cached(self, begin: int, size: int) -> bool:
        """Tell whether the system holds all of a part now."""
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        found = np.zeros(-(-(begin + size - first) // mmap.PAGESIZE), np.uint8)
        ask = _mincore()
        assert ask is not None
        failed = ask(self._address + first, begin + size - first, found.ctypes.data)
        return not failed and bool((found & _PRESENT).all())

    def part(self, begin: int, size: int) -> memoryview:
        """Return the bytes of a part; let go of them before `close`."""
        assert self._octets is not None, "it is open"
        return self._octets[begin : begin + size].data

    def address(self, begin: int) -> int:
        """Return where a byte of the file lies."""
        return self._address + begin

    def close(self) -> None:
        """Give the addresses back; they must not be used any more."""
        self._octets = None
        self._mapping.close()


@cache
def _mincore() -> Any:
    """Return the system's call of that name; None where there is none."""
    try:
        found = ctypes.CDLL(None).mincore
    except (AttributeError, OSError, TypeError):  # TypeError: Windows names its libraries
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    found.restype = ctypes.c_int
    return found
