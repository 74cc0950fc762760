"""Locks between processes: one for changing the store, one per folder in use.

The operating system drops a lock with the process that holds it, so a killed process leaves
nothing to repair.
"""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from expertctl.durable import remove_tree
from expertctl.errors import StoreError
from expertctl.store.disk import READ_ONLY

LOCK_SECONDS = 120.0
_LOCK_NAME = "lock"
_REMOVED = {errno.ENOENT, errno.EEXIST}
"""How opening a lock fails when its folder is removed meanwhile: `FileLock` makes a missing one."""


@contextmanager
def exclusive(path: Path, *, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold a lock file; its folder must exist.

    Raises:
        StoreError: when another process holds it for too long.
    """
    try:
        with FileLock(path, timeout=seconds, thread_local=False):
            yield
    except Timeout as error:
        message = f"{path.parent} is being changed by another process"
        raise StoreError(message, hint="try again when that has ended") from error


@contextmanager
def claim(folder: Path, *, prefix: str = "") -> Iterator[Path]:
    """Make a folder in ``folder`` that is held until the end, then removed.

    Create it while the store's lock is held: until its own lock is taken it looks abandoned. A
    process that checks whether the folder is held takes its lock for a moment, so there is a wait.
    A process that was forked meanwhile has a copy of this, and removes nothing.
    """
    maker = os.getpid()
    own = folder / f"{prefix}{secrets.token_hex(8)}"
    own.mkdir(mode=0o700, parents=True)
    try:
        with exclusive(own / _LOCK_NAME):
            yield own
    finally:
        if os.getpid() == maker:
            remove_tree(own)


def is_held(folder: Path) -> bool:
    """Tell whether a living process holds a folder; one that we may not write counts as held."""
    path = folder / _LOCK_NAME
    if not path.exists():
        return False
    try:
        with FileLock(path, timeout=0, thread_local=False):
            return False
    except Timeout:
        return True
    except OSError as error:
        if error.errno in READ_ONLY:
            return True
        if error.errno in _REMOVED:
            return False
        raise


def claimed_folders(folder: Path) -> list[Path]:
    """Return the folders that were made by `claim` and still exist."""
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
