"""`Catalogue`: ``index.db``, what is installed and how often it was used, in SQLite.

It may be deleted at any time: `rebuild` makes the table of experts again from the store, and the
history starts anew. A damaged file is moved aside, said in `notes`. Where nothing can be written,
reading still works and uses are not recorded.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from expertctl.digest import Digest
from expertctl.durable import make_folders
from expertctl.errors import DiskFullError, StoreError
from expertctl.schema.manifest import Manifest
from expertctl.store.lock import exclusive
from expertctl.store.ref import StoredExpert

BUSY_SECONDS = 30.0
MODE = 0o600
_FULL = {"SQLITE_FULL", "SQLITE_IOERR_WRITE"}
_BUSY = {"SQLITE_BUSY", "SQLITE_LOCKED"}
_DAMAGED = {"SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR", "SQLITE_MISMATCH"}
"""SQLITE_ERROR is a table or column that is not there: we always ask for the same ones."""

_EXPERTS = {
    "ref": str,
    "content_digest": str,
    "package_digest": str,
    "name": str,
    "version": str,
    "description": str,
    "task": str,
    "base": str,
    "signer": str,
    "size": int,
}
_USAGE = {
    "content_digest": str,
    "uses": int,
    "successes": int,
    "failures": int,
    "last_used": float,
}
_COUNT = """
INSERT INTO usage (content_digest, uses, successes, failures, last_used) VALUES (?, 1, ?, ?, ?)
ON CONFLICT (content_digest) DO UPDATE SET uses = uses + 1, successes = successes + ?2,
failures = failures + ?3, last_used = max(coalesce(last_used, 0), ?4)
"""


@dataclass(frozen=True, slots=True)
class Usage:
    """How often an expert was used, and how often that was said to be good or bad."""

    uses: int
    successes: int
    failures: int
    last_used: float | None
    """Seconds since the epoch."""

    @property
    def success_rate(self) -> float | None:
        """The share of successes; None when nobody has said anything."""
        judged = self.successes + self.failures
        return self.successes / judged if judged else None


class Catalogue:
    """The owner of one ``index.db``; every call opens it, so processes may share it."""

    def __init__(self, path: Path) -> None:
        """Remember where; nothing is read yet."""
        self.path = path
        self.notes: list[str] = []

    def add(self, expert: StoredExpert, manifest: Manifest) -> None:
        """Remember an expert.

        Raises:
            StoreError: when the file cannot be written.
            DiskFullError: when there is no space left.
        """
        self.add_all([(expert, manifest)])

    def add_all(self, experts: Iterable[tuple[StoredExpert, Manifest]]) -> None:
        """Remember several experts by one write.

        Raises:
            StoreError: when the file cannot be written.
            DiskFullError: when there is no space left.
        """
        rows = [_row(expert, manifest) for expert, manifest in experts]
        self._write(lambda db: db.table("experts").upsert_all(rows, pk="ref"))

    def remove(self, expert: StoredExpert) -> None:
        """Forget an expert; its history stays, should it come back.

        Raises:
            StoreError: when the file cannot be written.
        """
        self._write(lambda db: db.table("experts").delete_where("ref = ?", [expert.ref]))

    def rebuild(self, experts: Iterable[tuple[StoredExpert, Manifest]]) -> None:
        """Replace all experts; the history stays.

        Raises:
            StoreError: when the file cannot be written.
            DiskFullError: when there is no space left.
        """
        rows = [_row(expert, manifest) for expert, manifest in experts]

        def replace(db: Database) -> None:
            with db.atomic():
                db.table("experts").delete_where()
                db.table("experts").insert_all(rows, pk="ref")

        self._write(replace)

    def refs(self) -> list[str]:
        """Return the refs that are remembered, sorted."""
        rows = self._rows("experts", "SELECT ref FROM experts")
        return sorted(str(row["ref"]) for row in rows)

    def record_use(self, content_digest: Digest, *, success: bool | None = None) -> bool:
        """Count one use; return False where the history cannot be written."""
        counts = [str(content_digest), int(success is True), int(success is False), time.time()]
        try:
            self._write(lambda db: _execute(db, _COUNT, counts))
        except (StoreError, DiskFullError) as error:
            self.notes.append(f"this use was not recorded: {error.message}")
            return False
        return True

    def usage(self, content_digest: Digest) -> Usage | None:
        """Return how often an expert was used; None when never."""
        query = "SELECT uses, successes, failures, last_used FROM usage WHERE content_digest = ?"
        rows = self._rows("usage", query, str(content_digest))
        return Usage(**rows[0]) if rows else None

    def success_rate(self, content_digest: Digest) -> float | None:
        """Return the share of uses that were good; None when nobody has said anything."""
        usage = self.usage(content_digest)
        return usage.success_rate if usage else None

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

    def check_integrity(self) -> None:
        """Raise unless the file is whole and says what it must."""
        assert self.problems() == []

    def _write(self, action: Callable[[Database], object]) -> None:
        try:
            self._attempt(action)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise self._told(error) from error
            self._move_aside(str(error))
            self._attempt_anew(action)

    def _attempt(self, action: Callable[[Database], object]) -> None:
        with self._open_for_writing() as db:
            action(db)

    def _attempt_anew(self, action: Callable[[Database], object]) -> None:
        try:
            self._attempt(action)
        except sqlite3.DatabaseError as error:
            raise self._told(error) from error

    def _rows(self, table: str, query: str, *values: str) -> list[dict[str, Any]]:
        """Ask; a file without the table is one whose writer was killed before it began."""
        if not self.path.exists():
            return []
        try:
            with self._open_for_reading() as db:
                return list(db.query(query, values)) if table in db.table_names() else []
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise self._told(error) from error
            self._move_aside(str(error))
            return []

    @contextmanager
    def _open_for_writing(self) -> Iterator[Database]:
        try:
            make_folders(self.path.parent, mode=0o700)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, MODE))
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror}") from error
        with _opened(f"file:{_quoted(self.path)}?mode=rw") as db:
            db.enable_wal()
            db.create_table("experts", _EXPERTS, pk="ref", if_not_exists=True)
            db.create_table("usage", _USAGE, pk="content_digest", if_not_exists=True)
            yield db

    @contextmanager
    def _open_for_reading(self) -> Iterator[Database]:
        """Open without writing; a WAL needs a folder to write to, so say when there is none."""
        writable = os.access(self.path.parent, os.W_OK)
        mode = "mode=ro" if writable else "mode=ro&immutable=1"
        with _opened(f"file:{_quoted(self.path)}?{mode}") as db:
            yield db

    def _move_aside(self, why: str) -> None:
        """Keep a damaged file beside; what others have repaired meanwhile stays."""
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
        name = _error_name(error)
        if name in _FULL:
            return DiskFullError(f"{self.path}: no space left", hint="free some space, then repeat")
        if name in _BUSY:
            return StoreError(f"{self.path} is in use by another process", hint="try again later")
        return StoreError(f"{self.path}: {error}")


@contextmanager
def _opened(uri: str) -> Iterator[Database]:
    connection = sqlite3.connect(uri, timeout=BUSY_SECONDS, uri=True)
    try:
        yield Database(connection, execute_plugins=False)
    finally:
        connection.close()


def _quoted(path: Path) -> str:
    return str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _foreign_tables(db: Database) -> list[str]:
    """Return which of our tables have other columns than ours."""
    wanted = {"experts": set(_EXPERTS), "usage": set(_USAGE)}
    there = {name: set(db.table(name).columns_dict) for name in db.table_names()}
    return [
        f"the table {name} is not ours"
        for name, columns in wanted.items()
        if name in there and there[name] != columns
    ]


def _execute(db: Database, sql: str, values: list[object]) -> None:
    with db.atomic():
        db.execute(sql, values)


def _error_name(error: sqlite3.DatabaseError) -> str:
    return getattr(error, "sqlite_errorname", "")


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return _error_name(error).startswith(tuple(_DAMAGED))


def _row(expert: StoredExpert, manifest: Manifest) -> dict[str, object]:
    return {
        "ref": expert.ref,
        "content_digest": str(expert.content_digest),
        "package_digest": str(expert.package_digest),
        "name": str(expert.package),
        "version": str(expert.version),
        "description": manifest.description,
        "task": manifest.routing.task,
        "base": expert.base.name,
        "signer": expert.signer,
        "size": expert.size,
    }
