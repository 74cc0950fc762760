"""Locks between processes, leases of blobs, and connections to shared SQLite files.

One lock guards changes of the store; each folder in use has its own. The operating system drops a
lock with the process that holds it, so a killed process leaves nothing to repair. A lease keeps the
blobs that a running process uses until it ends, even when they are removed meanwhile.

SQLite files may be created, opened and switched to a write-ahead log by any number of threads and
processes at the same moment. SQLite waits for other users of a file, except where a transaction
that has read wants to write: writers begin with ``BEGIN IMMEDIATE``, and the switch to a log, which
is such a transaction, is retried.
"""

import errno
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from expertctl.digest import Digest
from expertctl.errors import DiskFullError, StoreError
from expertctl.files import hold_lock, make_folders, remove_tree
from expertctl.store.disk import READ_ONLY_ERRORS
from expertctl.store.refs import StorePaths

LOCK_SECONDS = 120.0
_LOCK_NAME = "lock"
_REMOVED_ERRORS = {errno.ENOENT, errno.EEXIST}
"""Errors of opening a lock whose folder is removed meanwhile: `FileLock` creates a missing one."""


def exclusive_lock(path: Path, *, seconds: float = LOCK_SECONDS) -> AbstractContextManager[None]:
    """Hold a lock file; its folder must exist.

    Raises:
        StoreError: when another process holds it for too long.
    """
    return hold_lock(path, guarded=path.parent, seconds=seconds, mode=0o644)


@contextmanager
def claim_folder(folder: Path, *, prefix: str = "") -> Iterator[Path]:
    """Create a folder in ``folder`` that is locked until the end and then removed.

    Create it while the store's lock is held: until its own lock is taken it looks abandoned. A
    process that checks whether the folder is claimed takes its lock for a moment, so taking it may
    wait. A process forked meanwhile holds a copy of this generator and removes nothing.
    """
    maker = os.getpid()
    own = folder / f"{prefix}{secrets.token_hex(8)}"
    own.mkdir(mode=0o700, parents=True)
    try:
        with exclusive_lock(own / _LOCK_NAME):
            yield own
    finally:
        if os.getpid() == maker:
            remove_tree(own)


def is_claimed(folder: Path) -> bool:
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
        if error.errno in READ_ONLY_ERRORS:
            return True
        if error.errno in _REMOVED_ERRORS:
            return False
        raise


def list_claimed_folders(folder: Path) -> list[Path]:
    """Return the existing folders that were made by `claim_folder`."""
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


BUSY_SECONDS = 30.0
"""How long a statement waits for other users of a file."""
_FILE_MODE = 0o600
_RETRY_SECONDS = 0.01
_FULL_CODES = {"SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE"}
_DAMAGED_CODES = ("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR", "SQLITE_MISMATCH")
"""SQLITE_ERROR means a missing table or column: we always ask for the same ones."""


def create_private_file(path: Path) -> None:
    """Create the file, readable by its owner alone, where there is none.

    An existing one is not opened: closing a second handle would drop all locks that SQLite holds on
    the file in this process.

    Raises:
        StoreError: when it cannot be made.
    """
    try:
        make_folders(path.parent, mode=0o700)
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _FILE_MODE))
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error


@contextmanager
def open_connection(path: Path, parameters: str) -> Iterator[sqlite3.Connection]:
    """Open a connection, closed at the end; ``parameters`` are those of its URI: ``mode=ro``."""
    quoted = str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    uri = f"file:{quoted}?{parameters}"
    connection = sqlite3.connect(uri, timeout=BUSY_SECONDS, uri=True)
    try:
        yield connection
    finally:
        connection.close()


def use_write_ahead_log(
    connection: sqlite3.Connection, *, pause: Callable[[float], None] = time.sleep
) -> None:
    """Switch the file to a write-ahead log, unless it has one.

    Where two processes switch at the same time, SQLite refuses one at once, whatever its timeout; a
    moment later there is nothing left to do.

    Raises:
        sqlite3.OperationalError: when others use the file for too long.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise
            pause(_RETRY_SECONDS)
        else:
            return


def sqlite_error_name(error: sqlite3.DatabaseError) -> str:
    """Return the name of SQLite's (extended) result code, or an empty text."""
    return getattr(error, "sqlite_errorname", "")


def is_busy(error: sqlite3.DatabaseError) -> bool:
    """Tell whether other users kept the file locked for longer than the timeout."""
    return sqlite_error_name(error).startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def is_disk_full(error: sqlite3.DatabaseError) -> bool:
    """Tell whether there was no space left."""
    return sqlite_error_name(error) in _FULL_CODES


def is_damage(error: sqlite3.DatabaseError) -> bool:
    """Tell whether the file is damaged or not ours; a missing table or column counts too."""
    return sqlite_error_name(error).startswith(_DAMAGED_CODES)


def quick_check(connection: sqlite3.Connection) -> list[str]:
    """Return the faults that SQLite finds in a file."""
    rows = connection.execute("PRAGMA quick_check").fetchall()
    return [str(row[0]) for row in rows if row[0] != "ok"]


def translate_sqlite_error(error: sqlite3.DatabaseError, path: Path) -> StoreError | DiskFullError:
    """Return the error of ours for a file that could not be used."""
    if path.exists() and not path.is_file():
        return StoreError(f"{path} is not a regular file", hint="move it away")
    if is_disk_full(error):
        return DiskFullError(f"{path}: no space left", hint="free some space, then retry")
    if is_busy(error):
        return StoreError(f"{path} is in use by another process", hint="try again later")
    hint = "check whether the disk is full or failing, then retry"
    return StoreError(f"{path}: {error}", hint=hint)


_LIST_NAME = "blobs"


@contextmanager
def lease_blobs(paths: StorePaths, digests: Iterable[Digest]) -> Iterator[Path]:
    """Keep blobs until the end; begin while the store's lock is held."""
    with claim_folder(paths.leases) as folder:
        lines = "".join(f"{digest.hex}\n" for digest in sorted(set(digests)))
        (folder / _LIST_NAME).write_text(lines, encoding="ascii")
        yield folder


def list_leased_blobs(paths: StorePaths) -> set[Digest]:
    """Return the blobs leased by living processes; call it while the store's lock is held."""
    held = [folder for folder in list_claimed_folders(paths.leases) if is_claimed(folder)]
    return {digest for folder in held for digest in _read_leased(folder)}


def _read_leased(folder: Path) -> list[Digest]:
    try:
        lines = (folder / _LIST_NAME).read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return []
    return [Digest.parse(f"sha256:{line}") for line in lines]
