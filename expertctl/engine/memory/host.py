"""The host: its memory and cores, anonymous blocks for weights, and mapped files.

Weights are in anonymous memory, allocated and written once, never backed by a file. Huge pages,
where the system grants them on request, make the first write to a large block several times as
fast: the kernel hands out one page instead of 512.

A mapped file is read-only. Reading a part that is not in the page cache waits for the disk; reading
one that was truncated ends the process (SIGBUS). So only parts in the page cache are lent; of a
truncated part nothing is in it.
"""

import ctypes
import mmap
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

HUGE_PAGE_BYTES = 2 << 20
MACHINE_SHARE = 0.8
"""Default budget as a share of the machine's memory."""
_CGROUPS = Path("/sys/fs/cgroup")
_OLD_LIMIT = _CGROUPS / "memory" / "memory.limit_in_bytes"
_OWN_CGROUP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_NO_LIMIT = 1 << 60
"""In control groups version 1, larger numbers mean that there is no limit."""


def allocate(size: int) -> memoryview:
    """Return ``size`` zero bytes private to this process, page-aligned."""
    block = _map_anonymous(max(size, 1))
    if size >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(block)[:size]


def find_available_bytes() -> int:
    """Return the bytes that this process may use: the machine's, or its container's, if fewer."""
    return min(limit for limit in (get_machine_bytes(), find_container_limit()) if limit)


def find_default_budget() -> int:
    """Return the default budget of an engine."""
    return int(find_available_bytes() * MACHINE_SHARE)


def count_usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def get_machine_bytes() -> int:
    """Return the bytes of the machine's memory."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 8 << 30  # no portable way without another library; use `--memory-budget`


def find_container_limit() -> int | None:
    """Return the smallest limit of this process's control groups; None without one."""
    files = (*(group / "memory.max" for group in _list_own_cgroups()), _OLD_LIMIT)
    limits = [_read_limit(path) for path in files]
    return min((limit for limit in limits if limit is not None), default=None)


def find_resident_bytes() -> int | None:
    """Return the resident memory of this process in bytes; None where it is unknown."""
    pages = _read_text(_STATM).split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else None


def find_unused_bytes() -> int | None:
    """Return how many bytes this process could allocate now; None where it is unknown.

    In a container this is at most what its tightest control group has left; reclaimable file pages
    do not count as used.
    """
    found = _read_text(_MEMINFO).partition("MemAvailable:")[2].split()
    if not found:
        return None
    left = (_find_cgroup_free(group) for group in _list_own_cgroups())
    return min([int(found[0]) * 1024, *(each for each in left if each is not None)])


def _list_own_cgroups() -> list[Path]:
    """Return the folders of this process's control groups, the outermost first."""
    names = _read_text(_OWN_CGROUP).partition("0::")[2].partition("\n")[0].strip("/").split("/")
    return [_CGROUPS.joinpath(*names[:depth]) for depth in range(len(names) + 1)]


def _find_cgroup_free(group: Path) -> int | None:
    """Return the bytes that a group has left; None where nothing limits it."""
    limit, used = _read_limit(group / "memory.max"), _read_limit(group / "memory.current")
    if limit is None or used is None:
        return None
    files = _read_text(group / "memory.stat").partition("inactive_file ")[2].split()
    return max(limit - used + (int(files[0]) if files else 0), 0)


def _map_anonymous(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _read_limit(path: Path) -> int | None:
    text = _read_text(path).strip()
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # the file does not exist on this system
        return ""


_PRESENT = 1
"""Bit of a resident page in the result of ``mincore``; the other bits are reserved."""


class MappedFile:
    """The mapping of an open file; it stays when the file is closed or unlinked."""

    def __init__(self, mapping: mmap.mmap) -> None:
        """Take ownership of a mapping."""
        self._mapping = mapping
        self._octets: np.ndarray[Any, Any] | None = np.frombuffer(mapping, np.uint8)
        self._address = int(self._octets.ctypes.data)

    @classmethod
    def map_file(cls, handle: int) -> "MappedFile | None":
        """Map a whole file; None on a system that cannot report which pages are cached.

        Raises:
            OSError: when the address space is exhausted.
        """
        if _find_mincore() is None or not hasattr(mmap, "MAP_SHARED"):
            return None
        size = os.fstat(handle).st_size
        return cls(mmap.mmap(handle, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))

    def is_cached(self, begin: int, size: int) -> bool:
        """Return whether a part is completely in the page cache now."""
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        found = np.zeros(-(-(begin + size - first) // mmap.PAGESIZE), np.uint8)
        ask = _find_mincore()
        assert ask is not None
        failed = ask(self._address + first, begin + size - first, found.ctypes.data)
        return not failed and bool((found & _PRESENT).all())

    def view(self, begin: int, size: int) -> memoryview:
        """Return the bytes of a part; release them before `close`."""
        assert self._octets is not None, "it is open"
        return self._octets[begin : begin + size].data

    def address_at(self, begin: int) -> int:
        """Return the address of a byte of the file."""
        return self._address + begin

    def close(self) -> None:
        """Unmap the file; its addresses must not be used any more."""
        self._octets = None
        self._mapping.close()


@cache
def _find_mincore() -> Any:
    """Return the C function ``mincore``; None where there is none."""
    try:
        found = ctypes.CDLL(None).mincore
    except (AttributeError, OSError, TypeError):  # TypeError: Windows requires library names
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    found.restype = ctypes.c_int
    return found
