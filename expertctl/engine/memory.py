"""Anonymous memory for weights: allocated once, filled once, never backed by a file.

Huge pages, where the system grants them on request, make the first write to a large block several
times as fast: the kernel hands out one page where it would hand out 512.
"""

import mmap
import os
import sys
from pathlib import Path

HUGE = 2 << 20
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def allocate(size: int) -> memoryview:
    """Return ``size`` zero bytes that belong to this process alone, aligned to a page."""
    block = _anonymous(max(size, 1))
    if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(block)[:size]


def available() -> int:
    """Return how many bytes this process may use: the machine's, or its container's, if fewer."""
    limits = [_physical(), *(_limit(path) for path in _CGROUP_LIMITS)]
    return min(limit for limit in limits if limit)


def _anonymous(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _physical() -> int:
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 8 << 30  # no portable way without another library; `--memory-budget` says it exactly


def _limit(path: Path) -> int | None:
    text = path.read_text(encoding="ascii").strip() if path.is_file() else "max"
    return int(text) if text.isdigit() else None
