"""What a base's routed experts are asked for: a small private file beside its record.

::

    bases/<name>/habits.jsonl    mode 0600

Losing it costs time, nothing else, so it is never worth a run. It is believed only as a file of
this user that nobody else may write, and changed as a whole while the bases are locked: no change
of another process is lost, and a killed one leaves what was there.
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
"""Nobody waits longer for others, only to keep habits."""
_OPEN = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@dataclass(frozen=True, slots=True)
class HabitsFile:
    """The habits of one base, as bytes."""

    bases: BaseStore
    base: StoredBase

    @property
    def path(self) -> Path:
        """Where they are, if there are any."""
        return self.bases.habits_of(self.base)

    def read(self) -> bytes | None:
        """Return what is there; None where nothing is.

        Raises:
            StoreError: when it is no file of this user alone, too large, or cannot be read.
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
        """Replace what is there by what is made of it; of what cannot be read None is made.

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
        """Forget what is there; return whether anything was.

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
        """Remove what killed processes left half written; nobody writes now."""
        for left in self.path.parent.glob(f".{self.path.name}.*.tmp"):
            left.unlink(missing_ok=True)


def _demand_private(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no regular file")
    if hasattr(os, "geteuid"):
        demand_own(found)
