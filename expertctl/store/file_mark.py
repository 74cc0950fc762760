"""`WhileUnchanged`: what was read from an SQLite file, read again only once the file changed.

A check costs two calls of ``stat``. A file that was written a moment ago may be written again with
the same time stamp, so what is read from it is not kept.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")
Stamp = tuple[int, int, int]
"""Inode, size and time."""
_Mark = tuple[Stamp | None, Stamp | None]
"""The stamps of the file and of its log."""

_TICK_NS, _COARSE_TICK_NS = 100_000_000, 2_000_000_000
"""More than one step of a file system's time stamps; the second, where they are whole seconds."""
_SECOND_NS = 1_000_000_000


class WhileUnchanged(Generic[T]):
    """Keeps the last answer to one question about a file."""

    def __init__(self, path: Path, read: Callable[[], T]) -> None:
        """Remember the file and the question; nothing is read yet."""
        self._paths, self._read = (str(path), f"{path}-wal"), read
        self._kept: tuple[_Mark, T] | None = None

    def get(self) -> T:
        """Return the current answer."""
        mark, kept = (stamp_of(self._paths[0]), stamp_of(self._paths[1])), self._kept
        if kept is not None and kept[0] == mark:
            return kept[1]
        value = self._read()
        self._kept = (mark, value) if _is_settled(mark) else None
        return value


def stamp_of(path: str) -> Stamp | None:
    """Return what changes with a file; None for an empty one (readers make empty logs) or none."""
    try:
        found = os.stat(path)  # noqa: PTH116  # called for each prompt: a `Path` takes twice as long
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if found.st_size else None


def _is_settled(mark: _Mark) -> bool:
    newest = max((stamp[2] for stamp in mark if stamp), default=0)
    tick = _TICK_NS if newest % _SECOND_NS else _COARSE_TICK_NS
    return abs(time.time_ns() - newest) > tick
