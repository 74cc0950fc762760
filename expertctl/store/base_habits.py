"""Habits: how a base's routed experts are used, in a small private file beside its record.

::

    bases/<name>/habits.jsonl    mode 0600

Losing it costs time, nothing else, so no run fails because of it. It is believed only when it
belongs to this user and no other user may write it. It is replaced as a whole while the bases are
locked: no change of another process is lost, and a killed process leaves the old file.
"""

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from expertctl.durable import write_atomic
from expertctl.errors import StoreError
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.copies_folder import demand_own
from expertctl.store.disk import disk_errors

MAX_BYTES = 32 << 20
LOCK_SECONDS = 5.0
"""How long to wait for the lock at most; habits are not worth a longer wait."""
_OPEN = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@dataclass(frozen=True, slots=True)
class HabitsFile:
    """The habits of one base, as bytes."""

    bases: BaseStore
    base: StoredBase

    @property
    def path(self) -> Path:
        """The path of the file, whether it exists or not."""
        return self.bases.habits_of(self.base)

    def read(self) -> bytes | None:
        """Return the content of the file; None where there is none.

        Raises:
            StoreError: when others may write it, or it is too large or cannot be read.
        """
        path = self.path
        with disk_errors(path):
            try:
                handle = os.open(path, _OPEN)
            except FileNotFoundError:
                return None
            try:
                _demand_private(os.fstat(handle))
                with os.fdopen(handle, "rb", closefd=False) as stream:
                    data = stream.read(MAX_BYTES + 1)
            finally:
                os.close(handle)
        if len(data) > MAX_BYTES:
            raise StoreError(f"{path} is larger than {MAX_BYTES} bytes", hint=f"remove {path}")
        return data

    def change(self, change: Callable[[bytes | None], bytes]) -> None:
        """Replace the content by ``change(content)``; an unreadable or absent one is None there.

        Raises:
            ConflictError: when the base was removed or replaced meanwhile.
            StoreError: when nothing can be written there.
        """
        with self.bases.holding(self.base, seconds=LOCK_SECONDS):
            self._clear()
            data: bytes | None = None
            with suppress(StoreError):
                data = self.read()
            with disk_errors(self.path):
                write_atomic(self.path, change(data), mode=0o600)

    def remove(self) -> bool:
        """Remove the file; return whether there was one.

        Raises:
            ConflictError: when the base was removed or replaced meanwhile.
            StoreError: when it cannot be removed.
        """
        with self.bases.holding(self.base, seconds=LOCK_SECONDS), disk_errors(self.path):
            self._clear()
            was_there = self.path.is_symlink() or self.path.exists()
            self.path.unlink(missing_ok=True)
            return was_there

    def _clear(self) -> None:
        """Remove what killed processes left half written; the lock is held."""
        for left in self.path.parent.glob(f".{self.path.name}.*.tmp"):
            left.unlink(missing_ok=True)


def _demand_private(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no regular file")
    if hasattr(os, "geteuid"):
        demand_own(found)
