import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, select, text
from sqlalchemy.exc import IntegrityError

from expertctl.errors import DiskFullError, StoreError
from registry_server.database import connection as connection_module
from registry_server.database.connection import Database
from registry_server.database.tables import BLOBS, MEMBERS, USERS


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database.open(tmp_path / "registry.db")
    yield opened
    opened.close()


def add(connection: Connection, name: str) -> None:
    connection.execute(insert(USERS).values(name=name, admin=False, created=1.0))


def names(database: Database) -> list[str]:
    with database.read() as connection:
        return list(connection.execute(select(USERS.c.name).order_by(USERS.c.name)).scalars())


def pragma(connection: Connection, name: str) -> object:
    return connection.execute(text(f"PRAGMA {name}")).scalar()


def test_what_is_written_is_there_for_every_reader(database: Database) -> None:
    with database.write() as connection:
        add(connection, "alice")
    assert names(database) == ["alice"]


@pytest.mark.parametrize("way", ["write", "write_relaxed"])
def test_an_error_undoes_all_that_was_written(database: Database, way: str) -> None:
    def fail() -> None:
        with getattr(database, way)() as connection:
            add(connection, "alice")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(database) == []
    with database.write() as connection:
        add(connection, "bob")
    assert names(database) == ["bob"]


def test_what_a_reader_writes_is_undone(database: Database) -> None:
    with database.read() as connection:
        add(connection, "alice")
    assert names(database) == []


def test_a_reader_sees_one_state_while_others_write(database: Database) -> None:
    with database.read() as reading:
        query = select(USERS.c.name)
        before = list(reading.execute(query).scalars())
        with database.write() as writing:
            add(writing, "alice")
        assert list(reading.execute(query).scalars()) == before == []


def test_a_commit_waits_for_the_disk_and_what_is_jotted_down_does_not(database: Database) -> None:
    with database.write() as connection:
        assert (pragma(connection, "synchronous"), pragma(connection, "journal_mode")) == (2, "wal")
        assert pragma(connection, "foreign_keys") == 1
    with database.write_relaxed() as connection:
        assert pragma(connection, "synchronous") == 1
        add(connection, "alice")
    for _ in range(3):
        with database.write() as connection:
            assert pragma(connection, "synchronous") == 2
    assert names(database) == ["alice"]


def test_a_row_that_points_nowhere_is_refused(database: Database) -> None:
    with pytest.raises(IntegrityError), database.write() as connection:
        connection.execute(insert(MEMBERS).values(namespace_id=7, user_id=7, role="owner"))


def test_writers_come_one_after_another_and_see_what_was_committed(database: Database) -> None:
    def count() -> None:
        for _ in range(20):
            with database.write() as connection:
                size = connection.execute(text("SELECT count(*) FROM users")).scalar_one()
                add(connection, f"user-{size}")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names(database)) == 80


def test_the_version_changes_with_a_commit_alone(database: Database) -> None:
    before = database.version()
    names(database)
    assert database.version() == before
    with database.write() as connection:
        add(connection, "alice")
    assert database.version() != before


def test_a_database_that_another_process_holds_is_an_outage(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "BUSY_SECONDS", 0)
    impatient = Database.open(database.path)
    other = sqlite3.connect(database.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"), impatient.write():
        pass
    assert names(impatient) == []
    other.execute("ROLLBACK")
    other.close()
    with impatient.write() as connection:
        add(connection, "alice")
    impatient.close()


@pytest.mark.parametrize("way", ["write", "write_relaxed"])
def test_a_full_disk_undoes_the_write_and_says_so(database: Database, way: str) -> None:
    def fill() -> None:
        with getattr(database, way)() as connection:
            connection.execute(text("PRAGMA max_page_count=1"))
            for number in range(10_000):
                row = {"digest": f"{number:0135}", "size": 1, "created": 1.0}
                connection.execute(insert(BLOBS).values(row))

    with pytest.raises(DiskFullError):
        fill()
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM blobs")).scalar() == 0


def test_a_file_that_is_no_database_is_an_outage(tmp_path: Path) -> None:
    (tmp_path / "registry.db").write_bytes(b"this is no database at all" * 100)
    with pytest.raises(StoreError, match="cannot be used"):
        Database.open(tmp_path / "registry.db")


def test_a_folder_that_is_not_there_is_an_outage(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        Database.open(tmp_path / "nowhere" / "registry.db")


def test_a_sound_database_passes_and_a_row_that_points_nowhere_does_not(
    database: Database,
) -> None:
    database.check_integrity()
    other = sqlite3.connect(database.path, isolation_level=None)
    other.execute("INSERT INTO members VALUES (7, 7, 'owner')")
    other.close()
    with pytest.raises(StoreError, match="members"):
        database.check_integrity()


@pytest.mark.parametrize("way", ["write", "write_relaxed"])
def test_nothing_is_written_to_a_file_that_was_replaced(database: Database, way: str) -> None:
    """It would be acknowledged, and gone with the next start."""
    copy = database.path.with_suffix(".copy")
    with closing(sqlite3.connect(copy)) as target, closing(sqlite3.connect(database.path)) as here:
        here.backup(target)
    kept = database.path.rename(database.path.with_suffix(".kept"))
    copy.rename(database.path)
    with pytest.raises(StoreError, match="was removed or replaced"), getattr(database, way)():
        pass
    kept.rename(database.path)
    with getattr(database, way)() as connection:
        add(connection, "alice")
    assert names(database) == ["alice"]


def test_no_empty_file_takes_the_place_of_one_that_went_away(database: Database) -> None:
    with database.write() as connection:
        add(connection, "alice")
    kept = database.path.rename(database.path.with_suffix(".kept"))
    taken = pytest.raises(StoreError, match="was removed or replaced")
    with database.read(), taken:  # the one open connection is lent: the next must be a new one
        names(database)
    assert not database.path.exists()
    kept.rename(database.path)
    assert names(database) == ["alice"]
