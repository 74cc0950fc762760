"""Connections to ``registry.db``: short reads, and one write at a time; migrations with alembic.

SQLite runs in WAL mode: readers see the last commit and never wait. A writer takes the write lock
before it reads (``BEGIN IMMEDIATE``), so what it checks still holds when it commits, and a commit
is durable when it returns (``synchronous=FULL``). All methods block: async code runs writes in
threads.

A restart must find what was written. If the disk disappears, or the file is replaced, SQLite would
write to the old file and create a new one for the next connection; both are refused until the
original file is back.

The tables are migrated by the steps in ``migrations/versions``.
"""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry

from expertctl.errors import DiskFullError, StoreError
from registry_server.database.tables import HEAD, current_revision

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_SECONDS = 10
"""How long a writer waits for another process, in seconds."""

_POOL_SIZE = 48
_DISK_FULL_MESSAGES = ("disk is full", "database or disk is full")


@dataclass(frozen=True, slots=True)
class _DatabaseFile:
    """A path, and the identity of the file that was opened there."""

    path: Path
    inode: tuple[int, int] | None

    @classmethod
    def of(cls, path: Path) -> Self:
        return cls(path, _stat_inode(path))

    def check_unchanged(self) -> None:
        """Check that a restart would open the same file."""
        if _stat_inode(self.path) != self.inode:
            hint = "restore the disk or the file, or restart the server"
            raise StoreError(f"{self.path.name} was removed or replaced", hint=hint)


def _stat_inode(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of the file at a path; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


class _ChangeWatcher:
    """A connection that only detects commits of other connections, in any process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def version(self) -> int:
        with self._lock:
            if self._connection is None:
                address = f"{self._path.absolute().as_uri()}?mode=ro"
                self._connection = sqlite3.connect(address, uri=True, check_same_thread=False)
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None


@dataclass(frozen=True, slots=True)
class Database:
    """Connections to one SQLite file; any thread may use it, its owner closes it."""

    _file: _DatabaseFile
    _engine: Engine
    _watcher: _ChangeWatcher
    _write_lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or create the file, and migrate its tables.

        Raises:
            StoreError: when it is damaged, locked for too long, or from a newer version.
            DiskFullError: when there is no room.
        """
        with (
            _wrap_database_errors(path),
            closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection,
        ):
            connection.execute("PRAGMA journal_mode=WAL")
        place = _DatabaseFile.of(path)
        database = cls(place, _create_engine(place), _ChangeWatcher(path))
        database._migrate_if_needed()
        return database

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._file.path

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Provide a connection that sees one state of the database; its writes are rolled back.

        Raises:
            StoreError: when the database cannot be read.
        """
        with self._wrap_errors(), self._engine.connect() as connection:
            connection.exec_driver_sql("BEGIN")
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Provide the only connection that may write; commit at the end, roll back on any error.

        Raises:
            StoreError: when the database cannot be written.
            DiskFullError: when there is no room.
        """
        with self._wrap_errors(), self._write_lock, self._engine.connect() as connection:
            self._file.check_unchanged()
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection
            connection.exec_driver_sql("COMMIT")

    @contextmanager
    def write_relaxed(self) -> Iterator[Connection]:
        """Write as `write` does, but do not wait for the disk.

        A killed process loses nothing. A power failure may lose these commits until the next
        `write`, so this is for what can be repeated, such as starting an upload.

        Raises:
            StoreError: when the database cannot be written.
            DiskFullError: when there is no room.
        """
        with self._wrap_errors(), self._write_lock, self._engine.connect() as connection:
            self._file.check_unchanged()
            connection.exec_driver_sql("PRAGMA synchronous=NORMAL")
            try:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                yield connection
                connection.exec_driver_sql("COMMIT")
            finally:
                _restore_connection(connection)

    def version(self) -> int:
        """Return a number that changes with each commit; much cheaper than a read.

        Raises:
            StoreError: when the database cannot be read.
        """
        with self._wrap_errors():
            return self._watcher.version()

    def check_integrity(self) -> None:
        """Check the file for damage and for rows with missing references.

        Raises:
            StoreError: when there is any.
        """
        with self.read() as connection:
            found = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA quick_check")]
            found += [str(row) for row in connection.exec_driver_sql("PRAGMA foreign_key_check")]
        if found != ["ok"]:
            raise StoreError(f"{self.path} is damaged: {'; '.join(found)[:500]}")

    def close(self) -> None:
        """Close all connections; none may be in use."""
        self._watcher.close()
        self._engine.dispose()

    def _migrate_if_needed(self) -> None:
        """Run missing migrations."""
        with self.read() as connection:
            if current_revision(connection) == HEAD:
                return
        with self.write() as connection:
            migrate(connection)

    def _wrap_errors(self) -> AbstractContextManager[None]:
        return _wrap_database_errors(self.path)


@contextmanager
def _wrap_database_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise
    except PoolTimeout as error:
        raise StoreError(f"{path.name} is busy", hint="try again in a moment") from error
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise _wrap_error(error, path) from error


def _create_engine(place: _DatabaseFile) -> Engine:
    engine = create_engine(
        f"sqlite:///{place.path}",
        isolation_level="AUTOCOMMIT",
        connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False},
        pool_size=_POOL_SIZE,
        max_overflow=0,
        pool_timeout=BUSY_SECONDS,
    )
    event.listen(engine, "do_connect", lambda *_: place.check_unchanged())
    event.listen(engine, "connect", _configure_connection)
    return engine


def _configure_connection(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA trusted_schema=OFF")


def _restore_connection(connection: Connection) -> None:
    """Roll back uncommitted changes, and make later commits wait for the disk again."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    driver.rollback()
    driver.execute("PRAGMA synchronous=FULL")


def _wrap_error(error: Exception, path: Path) -> StoreError | DiskFullError:
    fact = str(getattr(error, "orig", None) or error)
    if any(words in fact for words in _DISK_FULL_MESSAGES):
        return DiskFullError(f"{path.name}: {fact}", hint="make room in the registry's data folder")
    return StoreError(f"{path.name} cannot be used: {fact[:200]}", hint="try again in a moment")


def migrate(connection: Connection, *, revision: str = "head") -> None:
    """Run the migrations up to a revision that the database lacks, in the caller's transaction.

    Raises:
        StoreError: when the database is from a newer version.
    """
    from alembic import command  # large, so it is imported only if needed
    from alembic.config import Config
    from alembic.util.exc import CommandError

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, revision)
    except CommandError as error:
        hint = "run the version of expertctl that last used this folder, or a newer one"
        raise StoreError(f"the database is from another version: {error}", hint=hint) from error
