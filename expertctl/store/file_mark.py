"""`WhileUnchanged`: what was read from an SQLite file, read again only once the file changed.

A look costs two calls of ``stat``. A file that was written a moment ago may be written again
without another time stamp, so what is read then is not kept.
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
"""Of the file and of its log."""

_TICK_NS, _COARSE_TICK_NS = 100_000_000, 2_000_000_000
"""More than the time stamps of a file system jump by; the second, where they are whole seconds."""
_SECOND_NS = 1_000_000_000


class WhileUnchanged(Generic[T]):
    """The owner of the last answer to one question that is asked of a file."""

    def __init__(self, path: Path, read: Callable[[], T]) -> None:
        """Remember what to ask; nothing is read yet."""
        self._paths, self._read = (str(path), f"{path}-wal"), read
        self._kept: tuple[_Mark, T] | None = None

    def get(self) -> T:
        """Return the answer, of now."""
        mark, kept = (stamp_of(self._paths[0]), stamp_of(self._paths[1])), self._kept
        if kept is not None and kept[0] == mark:
            return kept[1]
        value = self._read()
        self._kept = (mark, value) if _is_settled(mark) else None
        return value


def stamp_of(path: str) -> Stamp | None:
    """Return what changes with a file; an empty log is none, as readers make one."""
    try:
        found = os.stat(path)  # noqa: PTH116  # called for each prompt: a `Path` takes twice as long
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if found.st_size else None


def _is_settled(mark: _Mark) -> bool:
    newest = max((stamp[2] for stamp in mark if stamp), default=0)
    tick = _TICK_NS if newest % _SECOND_NS else _COARSE_TICK_NS
    return abs(time.time_ns() - newest) > tick
