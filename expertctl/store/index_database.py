"""`IndexDatabase`: the file ``index.db``: its tables, how it is opened, what counts as damage.

Every call opens the file, so processes may share it. A damaged file is moved aside, and `notes`
says so. Where nothing can be written, reading still works.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from expertctl.store.disk import FileCachedValue
from expertctl.store.locks import (
    create_private_file,
    exclusive_lock,
    is_damage,
    is_disk_full,
    open_connection,
    quick_check,
    translate_sqlite_error,
    use_write_ahead_log,
)

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
"""Table → its columns. `Catalogue` and `RunHistory` define what each table holds."""
_MAX_LOG_BYTES = 1 << 20
"""Above this size the log is checkpointed into the file, which `write_relaxed` otherwise avoids."""
_LAYOUT_VERSION = 2
"""The ``user_version`` of a file that has all tables."""


class IndexDatabase:
    """The owner of one ``index.db``.

    Methods raise `StoreError` when the file cannot be read or written, and `DiskFullError` when
    there is no space left.
    """

    def __init__(self, path: Path) -> None:
        """Store the path; nothing is read yet."""
        self.path = path
        self.notes: list[str] = []
        self._revision = FileCachedValue(path, self._query_revision)

    def read_revision(self) -> int:
        """Return the number that `advance_revision` increments; a replaced file has another one."""
        return self._revision.get()

    def write(self, action: Callable[[sqlite3.Connection], object]) -> None:
        """Run an action that changes the tables; a damaged file is replaced first."""
        try:
            self._attempt(action)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise translate_sqlite_error(error, self.path) from error
            self._move_aside(str(error))
            self._retry_on_new_file(action)

    def write_relaxed(self, action: Callable[[sqlite3.Connection], object]) -> None:
        """Write as `write` does without waiting for the disk: a power failure may undo it.

        SQLite checkpoints its log into the file, and flushes both, when the last open connection is
        closed and may write; a reader held open meanwhile avoids that.
        """
        with ExitStack() as stack:
            if self._log_size() < _MAX_LOG_BYTES:
                stack.enter_context(self._hold_reader())
            self.write(action)

    def _log_size(self) -> int:
        with suppress(OSError):
            real = self.path.resolve()
            return real.with_name(f"{real.name}-wal").stat().st_size
        return 0

    def query_rows(self, table: str, query: str, *values: object) -> list[dict[str, Any]]:
        """Return the rows of a query of one table."""
        found: list[dict[str, Any]] = []
        self.read(table, lambda db: found.extend(query_dicts(db, query, values)))
        return found

    def read(self, table: str, action: Callable[[sqlite3.Connection], object]) -> None:
        """Run a read-only action; skip it where the file or the table does not exist yet."""
        if not self.path.exists():
            return

        def ask(db: sqlite3.Connection) -> None:
            if table in list_tables(db):
                action(db)

        try:
            self._query(ask)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise translate_sqlite_error(error, self.path) from error
            self._move_aside(str(error))

    def _query(self, action: Callable[[sqlite3.Connection], None]) -> None:
        """Run a read; on a full disk without a log's shared memory, as long as there is no log."""
        try:
            with self._open_for_reading() as db:
                action(db)
        except sqlite3.DatabaseError as error:
            if not is_disk_full(error) or self._log_size():
                raise
            with open_connection(self.path, "mode=ro&immutable=1") as db:
                action(db)

    def find_problems(self) -> list[str]:
        """Return the faults of the file, without changing it."""
        if not self.path.exists():
            return []
        problems = []
        if os.name == "posix" and self.path.stat().st_mode & 0o077:
            problems.append("others may read or write it")
        try:
            with self._open_for_reading() as db:
                return [*problems, *quick_check(db), *_find_foreign_tables(db)]
        except sqlite3.DatabaseError as error:
            return [*problems, str(error)]

    def _query_revision(self) -> int:
        rows = self.query_rows("revision", "SELECT number FROM revision")
        return int(rows[0]["number"]) if rows else 0

    def _attempt(self, action: Callable[[sqlite3.Connection], object]) -> None:
        with self._open_for_writing() as db:
            action(db)

    def _retry_on_new_file(self, action: Callable[[sqlite3.Connection], object]) -> None:
        try:
            self._attempt(action)
        except sqlite3.DatabaseError as error:
            raise translate_sqlite_error(error, self.path) from error

    @contextmanager
    def _open_for_writing(self) -> Iterator[sqlite3.Connection]:
        create_private_file(self.path)
        with open_connection(self.path, "mode=rw") as db:
            db.execute("PRAGMA synchronous = NORMAL")
            if db.execute("PRAGMA user_version").fetchone()[0] != _LAYOUT_VERSION:
                _create_tables(db)
            yield db

    @contextmanager
    def _hold_reader(self) -> Iterator[None]:
        """Hold the file open for reading, where it can be read."""
        with ExitStack() as stack:
            with suppress(sqlite3.DatabaseError):
                db = stack.enter_context(open_connection(self.path, "mode=ro"))
                db.execute("PRAGMA user_version")
            yield

    @contextmanager
    def _open_for_reading(self) -> Iterator[sqlite3.Connection]:
        """Open without writing; where no log can be written, open the file as immutable."""
        log = [self.path.with_name(self.path.name + suffix) for suffix in ("-wal", "-shm")]
        can_log = os.access(self.path.parent, os.W_OK) or all(path.exists() for path in log)
        mode = "mode=ro" if can_log else "mode=ro&immutable=1"
        with open_connection(self.path, mode) as db:
            yield db

    def _move_aside(self, why: str) -> None:
        """Move a damaged file aside, unless another process repaired it meanwhile."""
        target = self.path.with_name(f"{self.path.name}.damaged")
        if not os.access(self.path.parent, os.W_OK):
            self.notes.append(f"{self.path} is damaged ({why}) and cannot be replaced here")
            return
        with exclusive_lock(self.path.with_name(f"{self.path.name}.lock")):
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
                return found != "ok" or bool(_find_foreign_tables(db))
        except sqlite3.DatabaseError as error:
            return is_damage(error)


@contextmanager
def immediate_transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run the body in one transaction that waits for other writers before it reads."""
    db.execute("BEGIN IMMEDIATE")
    with db:
        yield


def query_dicts(
    db: sqlite3.Connection, query: str, values: Sequence[object] = ()
) -> Iterator[dict[str, Any]]:
    """Yield each row of a query by its columns."""
    cursor = db.execute(query, values)
    columns = [description[0] for description in cursor.description]
    for row in cursor:
        yield dict(zip(columns, row, strict=True))


def list_tables(db: sqlite3.Connection) -> list[str]:
    """Return the names of all tables."""
    return [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]


def advance_revision(db: sqlite3.Connection) -> None:
    """Increment the revision; a new file begins above every number of an older file."""
    first = time.time_ns()
    db.execute(
        "INSERT INTO revision VALUES (1, ?) ON CONFLICT (id) DO UPDATE SET number = number + 1",
        [first],
    )


def _create_tables(db: sqlite3.Connection) -> None:
    """Create the missing tables; existing ones of an older version stay."""
    use_write_ahead_log(db)
    with immediate_transaction(db):
        for name, columns in TABLES.items():
            db.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns})")
        db.execute(f"PRAGMA user_version = {_LAYOUT_VERSION}")


def _find_foreign_tables(db: sqlite3.Connection) -> list[str]:
    """Report the tables that have our names but not our columns."""
    there = {
        name: {row[1] for row in db.execute("SELECT * FROM pragma_table_info(?)", [name])}
        for name in list_tables(db)
    }
    return [
        f"the table {name} is not ours"
        for name in TABLES
        if name in there and there[name] != _column_names(name)
    ]


def _column_names(table: str) -> set[str]:
    """Return the column names of one of our tables."""
    with sqlite3.connect(":memory:") as memory:
        memory.execute(f"CREATE TABLE {table} ({TABLES[table]})")
        names = {str(row[1]) for row in memory.execute(f"PRAGMA table_info({table})")}
    memory.close()
    return names
