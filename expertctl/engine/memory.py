"""Anonymous memory for weights: allocated once, filled once, never backed by a file.

Huge pages, where the system grants them on request, make the first write to a large block several
times as fast: the kernel hands out one page where it would hand out 512.
"""

import mmap
import os
import sys
from pathlib import Path

from expertctl.routing.request import DeviceName

HUGE = 2 << 20
MACHINE_SHARE = 0.8
"""The share of the machine's memory that is the budget where none is set."""
_CGROUPS = Path("/sys/fs/cgroup")
_OLD_LIMIT = _CGROUPS / "memory" / "memory.limit_in_bytes"
_OWN_CGROUP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_NO_LIMIT = 1 << 60
"""From here on a number of version 1 of control groups means that there is no limit."""


def allocate(size: int) -> memoryview:
    """Return ``size`` zero bytes that belong to this process alone, aligned to a page."""
    block = _anonymous(max(size, 1))
    if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(block)[:size]


def available() -> int:
    """Return how many bytes this process may use: the machine's, or its container's, if fewer."""
    return min(limit for limit in (machine(), container()) if limit)


def usual_budget() -> int:
    """Return the budget of an engine that is given none."""
    return int(available() * MACHINE_SHARE)


def budget_limit(wanted: int | None, device: DeviceName) -> int:
    """Return how many bytes an engine may take of the memory that it computes in.

    Raises:
        NotFoundError: when there is no such device.
        BudgetError: when others have taken nearly all memory of a device.
    """
    if device == "cpu":
        return usual_budget() if wanted is None else wanted
    from expertctl.engine.accelerator import device_budget

    return device_budget(wanted)


def machine() -> int:
    """Return the bytes of the machine's memory."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 8 << 30  # no portable way without another library; `--memory-budget` says it exactly


def container() -> int | None:
    """Return the least limit of the control groups that this process is in; None without one."""
    files = (*(group / "memory.max" for group in _own_groups()), _OLD_LIMIT)
    limits = [_limit(path) for path in files]
    return min((limit for limit in limits if limit is not None), default=None)


def resident() -> int | None:
    """Return how many bytes of memory this process has now; None where the system does not tell."""
    pages = _read(_STATM).split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else None


def unused() -> int | None:
    """Return how many bytes this process could be given at once, where the system tells.

    In a container it is at most what the control group with the least left may still take; files
    that it could let go of do not count as taken.
    """
    found = _read(_MEMINFO).partition("MemAvailable:")[2].split()
    if not found:
        return None
    left = (_left(group) for group in _own_groups())
    return min([int(found[0]) * 1024, *(each for each in left if each is not None)])


def _own_groups() -> list[Path]:
    """Return the folders of the control groups that this process is in, the outermost first."""
    names = _read(_OWN_CGROUP).partition("0::")[2].partition("\n")[0].strip("/").split("/")
    return [_CGROUPS.joinpath(*names[:depth]) for depth in range(len(names) + 1)]


def _left(group: Path) -> int | None:
    """Return what a group may still take; None where nothing limits it."""
    limit, used = _limit(group / "memory.max"), _limit(group / "memory.current")
    if limit is None or used is None:
        return None
    files = _read(group / "memory.stat").partition("inactive_file ")[2].split()
    return max(limit - used + (int(files[0]) if files else 0), 0)


def _anonymous(size: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _limit(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # no such system
        return ""
