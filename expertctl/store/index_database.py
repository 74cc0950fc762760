"""`IndexDatabase`: the file ``index.db`` itself: its tables, how it is opened, what damage means.

Every call opens it, so processes may share it. A damaged file is moved aside, and `notes` says so.
Where nothing can be written, reading still works.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from expertctl.errors import DiskFullError, StoreError
from expertctl.store.file_mark import WhileUnchanged
from expertctl.store.lock import exclusive
from expertctl.store.sqlite_file import (
    create_private,
    error_name,
    is_busy,
    opened,
    use_write_ahead_log,
)

_FULL = {"SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE"}
_DAMAGED = {"SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR", "SQLITE_MISMATCH"}
"""SQLITE_ERROR means a missing table or column: we always ask for the same ones."""

TABLES = {
    "experts": """
        ref TEXT PRIMARY KEY, content_digest TEXT, package_digest TEXT, name TEXT, version TEXT,
        description TEXT, task TEXT, base TEXT, signer TEXT, size INTEGER""",
    "usage": """
        content_digest TEXT PRIMARY KEY, uses INTEGER, successes INTEGER, failures INTEGER,
        last_used REAL""",
    "jobs": """
        number INTEGER PRIMARY KEY AUTOINCREMENT, job_id TEXT UNIQUE, at REAL, task TEXT, base TEXT,
        finish_reason TEXT, validation TEXT, verdict TEXT, judged_at REAL,
        prompt_tokens INTEGER, generated_tokens INTEGER, blamed INTEGER, route_ms REAL,
        load_ms REAL, ttft_ms REAL, decode_ms REAL, total_ms REAL""",
    "job_experts": """
        number INTEGER, place INTEGER, content_digest TEXT, ref TEXT,
        PRIMARY KEY (number, place)""",
    "job_figures": """
        number INTEGER PRIMARY KEY, prefill_ms REAL, prefill_tokens INTEGER,
        kv_reused_tokens INTEGER, decode_steps INTEGER, threads INTEGER, ssd_bytes INTEGER,
        ram_bytes INTEGER""",
    "outcomes": """
        content_digest TEXT, task TEXT, good REAL, bad REAL, well_formed REAL, malformed REAL,
        at REAL, PRIMARY KEY (content_digest, task)""",
    "gains": """
        first TEXT, second TEXT, base TEXT, gain REAL, low REAL, high REAL, p REAL, n INTEGER,
        at REAL, PRIMARY KEY (first, second, base)""",
    "revision": "id INTEGER PRIMARY KEY, number INTEGER",
}
"""Table → its columns. The owner of a table defines what it holds: `Catalogue`, `History`."""
_LONG_LOG = 1 << 20
"""From this size on a log is folded into the file, which `jot` otherwise keeps from happening."""
_LAYOUT = 2
"""The ``user_version`` of a file that has all tables."""


class IndexDatabase:
    """The owner of one ``index.db``."""

    def __init__(self, path: Path) -> None:
        """Remember the path; nothing is read yet."""
        self.path = path
        self.notes: list[str] = []
        self._revision = WhileUnchanged(path, self._read_revision)

    def revision(self) -> int:
        """Return a number that `advance` changes, and that differs in a replacement of the file.

        Raises:
            StoreError: when the file cannot be read.
        """
        return self._revision.get()

    def write(self, action: Callable[[Database], object]) -> None:
        """Do something to the tables; on a damaged file, do it to a new one.

        Raises:
            StoreError: when the file cannot be written.
            DiskFullError: when there is no space left.
        """
        try:
            self._attempt(action)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise self._told(error) from error
            self._move_aside(str(error))
            self._attempt_anew(action)

    def jot(self, action: Callable[[Database], object]) -> None:
        """Do as `write` does, without waiting for the disk: a power failure may undo it.

        SQLite folds its log into the file, and flushes both, when the last open connection is
        closed, if it may write; a reader held open meanwhile avoids that.

        Raises:
            StoreError: when the file cannot be written.
            DiskFullError: when there is no space left.
        """
        with ExitStack() as stack:
            if self._log_size() < _LONG_LOG:
                stack.enter_context(self._reader_beside())
            self.write(action)

    def _log_size(self) -> int:
        with suppress(OSError):
            real = self.path.resolve()
            return real.with_name(f"{real.name}-wal").stat().st_size
        return 0

    def rows(self, table: str, query: str, *values: object) -> list[dict[str, Any]]:
        """Ask about a table.

        Raises:
            StoreError: when the file cannot be read.
        """
        found: list[dict[str, Any]] = []
        self.read(table, lambda db: found.extend(db.query(query, values)))
        return found

    def read(self, table: str, action: Callable[[Database], object]) -> None:
        """Read; a file without the table is one whose writer was killed before it began.

        Raises:
            StoreError: when the file cannot be read.
        """
        if not self.path.exists():
            return

        def ask(db: Database) -> None:
            if table in db.table_names():
                action(db)

        try:
            self._ask(ask)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise self._told(error) from error
            self._move_aside(str(error))

    def _ask(self, action: Callable[[Database], None]) -> None:
        """Read; on a full disk without the memory of a log, as long as there is no log."""
        try:
            with self._open_for_reading() as db:
                action(db)
        except sqlite3.DatabaseError as error:
            if error_name(error) not in _FULL or self._log_size():
                raise
            with _opened(self.path, "mode=ro&immutable=1") as db:
                action(db)

    def problems(self) -> list[str]:
        """Return what is wrong with the file, without changing it."""
        if not self.path.exists():
            return []
        problems = []
        if os.name == "posix" and self.path.stat().st_mode & 0o077:
            problems.append("others may read or write it")
        try:
            with self._open_for_reading() as db:
                found = [str(row[0]) for row in db.execute("PRAGMA quick_check").fetchall()]
                found += _foreign_tables(db)
        except sqlite3.DatabaseError as error:
            found = [str(error)]
        return problems + [line for line in found if line != "ok"]

    def _read_revision(self) -> int:
        rows = self.rows("revision", "SELECT number FROM revision")
        return int(rows[0]["number"]) if rows else 0

    def _attempt(self, action: Callable[[Database], object]) -> None:
        with self._open_for_writing() as db:
            action(db)

    def _attempt_anew(self, action: Callable[[Database], object]) -> None:
        try:
            self._attempt(action)
        except sqlite3.DatabaseError as error:
            raise self._told(error) from error

    @contextmanager
    def _open_for_writing(self) -> Iterator[Database]:
        create_private(self.path)
        with _opened(self.path, "mode=rw") as db:
            db.execute("PRAGMA synchronous = NORMAL")
            if db.execute("PRAGMA user_version").fetchone()[0] != _LAYOUT:
                _lay_out(db)
            yield db

    @contextmanager
    def _reader_beside(self) -> Iterator[None]:
        """Hold the file open, where there is one that can be read."""
        with ExitStack() as stack:
            with suppress(sqlite3.DatabaseError):
                db = stack.enter_context(_opened(self.path, "mode=ro"))
                db.execute("PRAGMA user_version")
            yield

    @contextmanager
    def _open_for_reading(self) -> Iterator[Database]:
        """Open without writing; where no log can be written, the file is opened as immutable."""
        log = [self.path.with_name(self.path.name + suffix) for suffix in ("-wal", "-shm")]
        can_log = os.access(self.path.parent, os.W_OK) or all(path.exists() for path in log)
        mode = "mode=ro" if can_log else "mode=ro&immutable=1"
        with _opened(self.path, mode) as db:
            yield db

    def _move_aside(self, why: str) -> None:
        """Move a damaged file aside; one that another process repaired meanwhile stays."""
        target = self.path.with_name(f"{self.path.name}.damaged")
        if not os.access(self.path.parent, os.W_OK):
            self.notes.append(f"{self.path} is damaged ({why}) and cannot be replaced here")
            return
        with exclusive(self.path.with_name(f"{self.path.name}.lock")):
            if not self.path.exists() or not self._is_broken():
                return
            self.path.replace(target)
            for suffix in ("-wal", "-shm"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        self.notes.append(
            f"{self.path} was damaged ({why}); it is {target.name} now, `expertctl reindex` "
            f"makes a new one"
        )

    def _is_broken(self) -> bool:
        try:
            with self._open_for_writing() as db:
                found = str(db.execute("PRAGMA integrity_check").fetchone()[0])
                return found != "ok" or bool(_foreign_tables(db))
        except sqlite3.DatabaseError as error:
            return _is_damage(error)

    def _told(self, error: sqlite3.DatabaseError) -> StoreError | DiskFullError:
        name = error_name(error)
        if self.path.exists() and not self.path.is_file():
            return StoreError(f"{self.path} is not a regular file", hint="move it away")
        if name in _FULL:
            return DiskFullError(f"{self.path}: no space left", hint="free some space, then repeat")
        if is_busy(error):
            return StoreError(f"{self.path} is in use by another process", hint="try again later")
        hint = "look whether the disk is full or fails, then repeat"
        return StoreError(f"{self.path}: {error}", hint=hint)


@contextmanager
def immediately(db: Database) -> Iterator[None]:
    """Run the body in one transaction that waits for other writers before it reads."""
    db.execute("BEGIN IMMEDIATE")
    with db.conn:
        yield


def advance(db: Database) -> None:
    """Count up the revision; a new file begins at a number that no older file had."""
    first = time.time_ns()
    db.execute(
        "INSERT INTO revision VALUES (1, ?) ON CONFLICT (id) DO UPDATE SET number = number + 1",
        [first],
    )


@contextmanager
def _opened(path: Path, parameters: str) -> Iterator[Database]:
    with opened(path, parameters) as connection:
        yield Database(connection, execute_plugins=False)


def _lay_out(db: Database) -> None:
    """Make the tables that are missing; those of an older version stay as they are."""
    use_write_ahead_log(db.conn)
    with immediately(db):
        for name, columns in TABLES.items():
            db.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns})")
        db.execute(f"PRAGMA user_version = {_LAYOUT}")


def _foreign_tables(db: Database) -> list[str]:
    """Return which of our tables do not have our columns."""
    there = {name: set(db.table(name).columns_dict) for name in db.table_names()}
    return [
        f"the table {name} is not ours"
        for name in TABLES
        if name in there and there[name] != _columns(name)
    ]


def _columns(table: str) -> set[str]:
    """Return the names of the columns of one of our tables."""
    with sqlite3.connect(":memory:") as memory:
        memory.execute(f"CREATE TABLE {table} ({TABLES[table]})")
        names = {str(row[1]) for row in memory.execute(f"PRAGMA table_info({table})")}
    memory.close()
    return names


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return error_name(error).startswith(tuple(_DAMAGED))
