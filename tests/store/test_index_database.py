"""The file itself: what is refused, what is damage, what is told."""

import sqlite3
from pathlib import Path

import pytest

from expertctl.errors import StoreError
from expertctl.store.index_database import IndexDatabase, advance_revision, immediate_transaction


@pytest.fixture
def database(tmp_path: Path) -> IndexDatabase:
    return IndexDatabase(tmp_path / "index.db")


def step(db: sqlite3.Connection) -> None:
    with immediate_transaction(db):
        advance_revision(db)


def test_a_folder_in_its_place_is_told(database: IndexDatabase) -> None:
    database.path.mkdir()
    with pytest.raises(StoreError, match=r"index\.db is not a regular file"):
        database.read_revision()
    with pytest.raises(StoreError, match=r"index\.db is not a regular file"):
        database.write(step)
    with pytest.raises(StoreError, match=r"index\.db is not a regular file"):
        database.write_relaxed(step)
    assert database.notes == []


def test_what_is_damaged_again_and_again_is_told_once(database: IndexDatabase) -> None:
    database.write(step)
    asked: list[int] = []

    def fail(_: sqlite3.Connection) -> None:
        asked.append(1)
        error = sqlite3.DatabaseError("malformed")
        error.sqlite_errorname = "SQLITE_CORRUPT"
        raise error

    with pytest.raises(StoreError, match="malformed"):
        database.write(fail)
    assert asked == [1, 1]
    assert database.notes == []
    assert database.read_revision() > 0


def test_what_fails_in_the_middle_leaves_nothing(database: IndexDatabase) -> None:
    database.write(step)
    before = database.read_revision()

    def fail(db: sqlite3.Connection) -> None:
        with immediate_transaction(db):
            advance_revision(db)
            raise KeyboardInterrupt

    for way in (database.write, database.write_relaxed):
        with pytest.raises(KeyboardInterrupt):
            way(fail)
    assert database.read_revision() == before


def test_what_is_jotted_down_is_read_at_once_and_by_others(database: IndexDatabase) -> None:
    database.write_relaxed(step)
    first = database.read_revision()
    database.write_relaxed(step)
    assert database.read_revision() == first + 1
    assert IndexDatabase(database.path).read_revision() == first + 1
    database.write(step)
    assert IndexDatabase(database.path).read_revision() == first + 2
    assert database.find_problems() == []


def test_a_file_that_takes_the_place_of_another_has_a_revision_of_its_own(
    database: IndexDatabase,
) -> None:
    database.write(step)
    first = database.read_revision()
    for path in database.path.parent.iterdir():
        path.unlink()
    assert database.read_revision() == 0
    database.write(step)
    assert database.read_revision() not in {0, first, first + 1}


def test_the_log_of_what_is_jotted_down_stays_short(database: IndexDatabase) -> None:
    log = database.path.with_name("index.db-wal")

    def long(db: sqlite3.Connection) -> None:
        with immediate_transaction(db):
            db.execute(
                "INSERT INTO gains (first, second, base) VALUES (hex(randomblob(20)), '', ?)",
                ["x" * 90_000],
            )

    sizes = []
    for _ in range(40):
        database.write_relaxed(long)
        sizes.append(log.stat().st_size if log.exists() else 0)
    assert max(sizes) < 2 << 20
    assert sizes.count(0) >= 2
    assert database.query_rows("gains", "SELECT count(*) AS n FROM gains") == [{"n": 40}]
