"""SQLite files that threads and processes share: made, opened, and switched to a write-ahead log.

Any number of them may do so at the same moment, a new file included. SQLite waits for other users
of a file almost everywhere, but not where a transaction that has read wants to write: writers
begin with ``BEGIN IMMEDIATE``, and the switch to a log, which is such a transaction, is repeated.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from expertctl.durable import make_folders
from expertctl.errors import StoreError

BUSY_SECONDS = 30.0
"""How long a statement waits for other users of a file."""
_MODE = 0o600
_RETRY_SECONDS = 0.01


def create_private(path: Path) -> None:
    """Make the file where there is none; an existing one is not touched.

    Closing a second handle of it would drop all locks that SQLite has on it in this process.

    Raises:
        StoreError: when it cannot be made.
    """
    try:
        make_folders(path.parent, mode=0o700)
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _MODE))
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error


@contextmanager
def opened(path: Path, parameters: str) -> Iterator[sqlite3.Connection]:
    """Lend a connection, closed at the end; ``parameters`` are those of its URI: ``mode=ro``."""
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

    Where two switch at once, SQLite refuses one of them at once, whatever its timeout; soon
    afterwards there is nothing left to do.

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


def error_name(error: sqlite3.DatabaseError) -> str:
    """Return the name of SQLite's (extended) result code, or nothing."""
    return getattr(error, "sqlite_errorname", "")


def is_busy(error: sqlite3.DatabaseError) -> bool:
    """Tell whether others used the file for longer than was waited."""
    return error_name(error).startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))
