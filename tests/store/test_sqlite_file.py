"""Several may make and switch a file at the same moment; SQLite itself refuses that at once."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertctl.errors import StoreError
from expertctl.store import locks
from expertctl.store.locks import create_private_file, open_connection, use_write_ahead_log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "home" / "a ?#%.db"
    create_private_file(made)
    return made


@pytest.fixture
def other(path: Path) -> Iterator[sqlite3.Connection]:
    """Another user of the file, in the middle of a write."""
    with open_connection(path, "mode=rw") as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection


def journal_mode(connection: sqlite3.Connection) -> object:
    return connection.execute("PRAGMA journal_mode").fetchone()[0]


def test_sqlite_itself_does_not_wait_for_who_switches_at_the_same_moment(
    path: Path, other: sqlite3.Connection
) -> None:
    """Why the switch is repeated: the timeout of 30 s counts for nothing here."""
    with open_connection(path, "mode=rw") as connection:
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            connection.execute("PRAGMA journal_mode = WAL")
        assert journal_mode(connection) == "delete"


def test_the_switch_waits_for_another_writer(path: Path, other: sqlite3.Connection) -> None:
    waited: list[float] = []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        other.rollback()

    with open_connection(path, "mode=rw") as connection:
        use_write_ahead_log(connection, pause=pause)
        assert journal_mode(connection) == "wal"
        use_write_ahead_log(connection, pause=pause)
    assert len(waited) == 1


def test_the_switch_does_not_wait_for_ever(
    path: Path, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "BUSY_SECONDS", -1.0)
    with (
        open_connection(path, "mode=rw") as connection,
        pytest.raises(sqlite3.OperationalError, match="locked"),
    ):
        use_write_ahead_log(connection)


def test_a_file_that_is_there_is_not_touched(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0o640)
    create_private_file(path)
    assert path.read_bytes() == b"x"
    assert path.stat().st_mode & 0o777 == 0o640


def test_only_its_owner_may_read_a_new_file(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_below_a_file_cannot_be_made(path: Path) -> None:
    with pytest.raises(StoreError, match="below"):
        create_private_file(path / "below" / "x.db")
