"""`SuspicionStore`: ``suspicions.db``, the verdicts on installed packages and their fingerprints.

One row per content digest holds the flags found when it was installed, so that it need not be
vetted again; ``flagged.json`` repeats them for readers that must be fast
(`expertctl.store.preference`). A mark is a fingerprint: a number computed from a text or a part of
it. It belongs for good to the package that brought it first, so a copy is flagged and never the
original, whatever is updated, removed or installed again in between. The file may be deleted at any
time and is made again by `expertctl reindex`; then the package installed first counts as first.
"""

import json
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from expertctl.reference import Digest
from expertctl.store.disk import disk_errors
from expertctl.store.locks import (
    create_private_file,
    exclusive_lock,
    is_damage,
    open_connection,
    quick_check,
    translate_sqlite_error,
    use_write_ahead_log,
)
from expertctl.store.preference import FLAGS_FILE as FLAGGED_FILE
from expertctl.store.preference import Flag, decode_flags, encode_flags, read_flags, write_flags

SUSPICIONS_FILE = "suspicions.db"

_QUERY_LIMIT = 500
"""How many values one query may have; SQLite allows 999 and more."""
_TABLES = (
    "CREATE TABLE IF NOT EXISTS packages (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, "
    "short TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS packages_by_short ON packages (short)",
    "CREATE TABLE IF NOT EXISTS marks (mark INTEGER PRIMARY KEY, package INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS verdicts (content_digest TEXT PRIMARY KEY, name TEXT NOT NULL, "
    "rules INTEGER NOT NULL, flags TEXT NOT NULL) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS verdicts_by_name ON verdicts (name)",
    "CREATE INDEX IF NOT EXISTS flagged ON verdicts (content_digest) WHERE flags != '[]'",
)
_VERDICT = (
    "INSERT OR REPLACE INTO verdicts (content_digest, name, rules, flags) VALUES (?, ?, ?, ?)"
)
_FORGET = (
    "DELETE FROM verdicts WHERE content_digest NOT IN (SELECT value FROM kept)",
    "DELETE FROM packages WHERE name NOT IN (SELECT value FROM kept)",
    "DELETE FROM marks WHERE package NOT IN (SELECT id FROM packages)",
)


@dataclass(frozen=True, slots=True)
class PackageVerdict:
    """The flags of one content, and the marks that its package brings."""

    content_digest: Digest
    name: str
    flags: tuple[Flag, ...]
    rules: int
    """The version of the rules that it was vetted by."""
    marks: frozenset[int] = frozenset()


class KnownPackages(Protocol):
    """The packages and marks that are known already."""

    def find_owners(self, marks: Collection[int]) -> Mapping[int, str]:
        """Return the package that brought each mark first; new marks are left out."""

    def find_names(self, names: Collection[str]) -> Mapping[str, str]:
        """Return which of these names are packages, with or without namespace."""


class SuspicionStore:
    """The owner of one ``suspicions.db``; every call opens it, so processes may share it.

    Methods that write raise `StoreError`, or `DiskFullError` when there is no space left.
    """

    def __init__(self, path: Path) -> None:
        """Store the path; nothing is read yet."""
        self.path = path
        self.notes: list[str] = []

    def read_flagged(self) -> dict[Digest, tuple[Flag, ...]]:
        """Return the flags of all contents that have any."""
        return read_flags(self.path.with_name(FLAGGED_FILE))

    def find_verdicts(self, content_digests: Collection[Digest]) -> dict[Digest, PackageVerdict]:
        """Return the verdicts on those of these contents that were vetted."""
        query = (
            "SELECT content_digest, name, flags, rules FROM verdicts WHERE content_digest IN ({})"
        )
        rows = self._query_many(query, sorted(map(str, content_digests)))
        return {verdict.content_digest: verdict for verdict in map(_parse_verdict, rows)}

    def list_namespace_contents(self, namespace: str) -> list[Digest]:
        """Return the vetted contents of one publisher."""
        query = "SELECT content_digest FROM verdicts WHERE name > ? AND name < ?"
        rows = self._query(query, [f"{namespace}/", f"{namespace}0"])
        return [Digest.parse(str(row[0])) for row in rows]

    def find_owners(self, marks: Collection[int]) -> dict[int, str]:
        """Return the package that brought each mark first; new marks are left out."""
        query = (
            "SELECT mark, name FROM marks JOIN packages ON packages.id = package WHERE mark IN ({})"
        )
        return {int(str(mark)): str(name) for mark, name in self._query_many(query, sorted(marks))}

    def find_names(self, names: Collection[str]) -> dict[str, str]:
        """Return which of these names are packages, with or without namespace."""
        wanted = sorted(names)
        full = self._query_many("SELECT name, name FROM packages WHERE name IN ({})", wanted)
        short = self._query_many("SELECT short, name FROM packages WHERE short IN ({})", wanted)
        return {str(name): str(package) for name, package in [*short, *full]}

    def add(self, verdicts: Iterable[PackageVerdict]) -> None:
        """Store verdicts; marks of a flagged package do not count against later ones."""
        new = list(verdicts)

        def add_all(db: sqlite3.Connection) -> None:
            for verdict in new:
                _insert_verdict(db, verdict)

        self._write(add_all)

    def retain(self, content_digests: Collection[Digest], names: Collection[str]) -> None:
        """Remove the verdicts on all other contents, and the marks of all other packages."""
        kept = [(value,) for value in {*map(str, content_digests), *names}]

        def forget(db: sqlite3.Connection) -> None:
            db.execute("CREATE TEMP TABLE kept (value TEXT PRIMARY KEY)")
            db.executemany("INSERT INTO kept VALUES (?)", kept)
            for statement in _FORGET:
                db.execute(statement)

        self._write(forget)

    def find_problems(self) -> list[str]:
        """Return the faults of the file, without changing it."""
        if not self.path.exists():
            return []
        try:
            with _open_database(self.path, "ro") as db:
                return quick_check(db)
        except sqlite3.DatabaseError as error:
            return [str(error)]

    def check_integrity(self) -> None:
        """Raise unless the file is whole and every mark belongs to a package."""
        assert self.find_problems() == []
        orphans = "SELECT count(*) FROM marks WHERE package NOT IN (SELECT id FROM packages)"
        assert [tuple(row) for row in self._query(orphans)] in ([], [(0,)])

    def _query_many(self, query: str, values: Sequence[object]) -> list[tuple[object, ...]]:
        parts = [values[i : i + _QUERY_LIMIT] for i in range(0, len(values), _QUERY_LIMIT)]
        return [row for p in parts for row in self._query(query.format(",".join("?" * len(p))), p)]

    def _query(self, query: str, values: Sequence[object] = ()) -> list[tuple[object, ...]]:
        """Query the file; a missing or damaged one gives no rows, and `doctor` reports it."""
        if not self.path.exists():
            return []
        try:
            with _open_database(self.path, "ro") as db:
                return list(db.execute(query, values))
        except sqlite3.DatabaseError as error:
            self.notes.append(f"{self.path}: {error}; `expertctl reindex` makes it again")
            return []

    def _write(self, action: Callable[[sqlite3.Connection], None]) -> None:
        """Change the file in one transaction; a damaged one is replaced by a new one."""
        try:
            self._attempt(action)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise translate_sqlite_error(error, self.path) from error
            self._retry_on_new_file(action)
        self._write_flags_file()

    def _write_flags_file(self) -> None:
        """Write ``flagged.json`` where its content would change.

        One process at a time, so that the last one to write has seen every commit.
        """
        query = "SELECT content_digest, name, flags, rules FROM verdicts WHERE flags != '[]'"
        path = self.path.with_name(FLAGGED_FILE)
        with self._hold_lock(), disk_errors(path):
            verdicts = [_parse_verdict(row) for row in self._query(query)]
            flagged = {verdict.content_digest: verdict.flags for verdict in verdicts}
            if flagged != self.read_flagged():
                write_flags(path, flagged)

    def _attempt(self, action: Callable[[sqlite3.Connection], None]) -> None:
        create_private_file(self.path)
        with _open_database(self.path, "rw") as db:
            use_write_ahead_log(db)
            db.execute("BEGIN IMMEDIATE")
            with db:
                for table in _TABLES:
                    db.execute(table)
                action(db)

    def _retry_on_new_file(self, action: Callable[[sqlite3.Connection], None]) -> None:
        """Repeat a change that found damage, on a new file unless another process made one."""
        try:
            with self._hold_lock():
                try:
                    self._attempt(action)
                except sqlite3.DatabaseError as error:
                    if not is_damage(error):
                        raise
                    self._remove_damaged(error)
                    self._attempt(action)
        except sqlite3.DatabaseError as error:
            raise translate_sqlite_error(error, self.path) from error

    def _remove_damaged(self, why: sqlite3.DatabaseError) -> None:
        for suffix in ("", "-wal", "-shm", "-journal"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        self.notes.append(
            f"{self.path} was damaged ({why}) and begins anew; `expertctl reindex` judges "
            "again what is installed"
        )

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        path = self.path.with_name(f"{self.path.name}.lock")
        with disk_errors(path), exclusive_lock(path):
            yield


@contextmanager
def _open_database(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    immutable = "" if os.access(path.parent, os.W_OK) else "&immutable=1"
    with open_connection(path, f"mode={mode}{immutable}") as connection:
        yield connection


def _insert_verdict(db: sqlite3.Connection, verdict: PackageVerdict) -> None:
    short = verdict.name.partition("/")[2]
    db.execute("INSERT OR IGNORE INTO packages (name, short) VALUES (?, ?)", [verdict.name, short])
    (row,) = db.execute("SELECT id FROM packages WHERE name = ?", [verdict.name]).fetchall()
    if not verdict.flags:
        pairs = [(mark, row[0]) for mark in sorted(verdict.marks)]
        db.executemany("INSERT OR IGNORE INTO marks (mark, package) VALUES (?, ?)", pairs)
    flags = json.dumps(encode_flags(verdict.flags))
    values = [str(verdict.content_digest), verdict.name, verdict.rules, flags]
    db.execute(_VERDICT, values)


def _parse_verdict(row: tuple[object, ...]) -> PackageVerdict:
    digest, name, flags, rules = row
    return PackageVerdict(
        Digest.parse(str(digest)), str(name), decode_flags(json.loads(str(flags))), int(str(rules))
    )
