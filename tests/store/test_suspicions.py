"""Verdicts are kept, a mark belongs to who brought it first, and damage is no trap."""

import os
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from expertctl.errors import DiskFullError, StoreError
from expertctl.reference import Digest
from expertctl.store.locks import exclusive_lock
from expertctl.store.preference import (
    FLAGS_FILE,
    SUSPICION_SENTENCE,
    Flag,
    describe_flags,
    flags_to_json,
    read_flags,
    write_flags,
)
from expertctl.store.suspicions import PackageVerdict, SuspicionStore

COPIED = Flag("copied", "3 of its 4 examples are those of acme/sql", "acme/sql")
STUFFED = Flag("stuffed", "it has 65 keywords")


def digest(text: str) -> Digest:
    return Digest.compute(text.encode())


def verdict(name: str, *flags: Flag, marks: tuple[int, ...] = (), rules: int = 1) -> PackageVerdict:
    return PackageVerdict(digest(name), name, flags, rules, frozenset(marks))


def find_flags(suspicions: SuspicionStore, content: Digest) -> tuple[Flag, ...] | None:
    found = suspicions.find_verdicts([content])
    return found[content].flags if found else None


@pytest.fixture
def suspicions(tmp_path: Path) -> SuspicionStore:
    return SuspicionStore(tmp_path / "home" / "suspicions.db")


def test_nothing_is_known_before_anything_is_judged(suspicions: SuspicionStore) -> None:
    assert suspicions.read_flagged() == {}
    assert find_flags(suspicions, digest("acme/sql")) is None
    assert suspicions.find_owners([1]) == {}
    assert suspicions.find_names(["acme/sql"]) == {}
    assert suspicions.find_problems() == []
    suspicions.check_integrity()
    assert not suspicions.path.parent.exists()


def test_verdicts_are_remembered(suspicions: SuspicionStore) -> None:
    suspicions.add([verdict("acme/sql"), verdict("evil/sql", COPIED, STUFFED, rules=2)])
    again = SuspicionStore(suspicions.path)
    assert find_flags(again, digest("acme/sql")) == ()
    assert find_flags(again, digest("evil/sql")) == (COPIED, STUFFED)
    assert again.read_flagged() == {digest("evil/sql"): (COPIED, STUFFED)}
    assert again.find_verdicts([digest("evil/sql"), digest("other")]) == {
        digest("evil/sql"): verdict("evil/sql", COPIED, STUFFED, rules=2)
    }
    again.check_integrity()


def test_nobody_else_may_read_the_files(suspicions: SuspicionStore) -> None:
    suspicions.add([verdict("evil/sql", COPIED)])
    assert suspicions.path.stat().st_mode & 0o077 == 0
    assert suspicions.path.with_name(FLAGS_FILE).stat().st_mode & 0o077 == 0


def test_a_mark_belongs_to_who_brought_it_first(suspicions: SuspicionStore) -> None:
    suspicions.add([verdict("acme/sql", marks=(1, 2, -(2**63)))])
    suspicions.add([verdict("evil/sql", marks=(2, 3))])
    assert suspicions.find_owners([1, 2, 3, 4, -(2**63)]) == {
        1: "acme/sql",
        2: "acme/sql",
        3: "evil/sql",
        -(2**63): "acme/sql",
    }
    many = range(10_000)
    assert len(suspicions.find_owners(many)) == 3


def test_attack_105_what_a_flagged_package_brings_does_not_count(
    suspicions: SuspicionStore,
) -> None:
    suspicions.add([verdict("evil/sql", STUFFED, marks=(1,))])
    assert suspicions.find_owners([1]) == {}
    assert suspicions.find_names(["evil/sql"]) == {"evil/sql": "evil/sql"}


def test_packages_are_found_with_and_without_namespace(suspicions: SuspicionStore) -> None:
    suspicions.add([verdict("acme/sql"), verdict("bank/money-transfer")])
    assert suspicions.find_names(["sql", "acme/sql", "bank/money-transfer", "x"]) == {
        "sql": "acme/sql",
        "acme/sql": "acme/sql",
        "bank/money-transfer": "bank/money-transfer",
    }


def test_contents_are_found_by_publisher(suspicions: SuspicionStore) -> None:
    suspicions.add([verdict(n) for n in ("acme/a", "acme/b", "acme-two/c", "acme0/d", "zoo/e")])
    assert set(suspicions.list_namespace_contents("acme")) == {digest("acme/a"), digest("acme/b")}


def test_what_is_kept_keeps_its_marks(suspicions: SuspicionStore) -> None:
    suspicions.add(
        [verdict("acme/a", marks=(1,)), verdict("acme/b", marks=(2,)), verdict("evil/c", STUFFED)]
    )
    suspicions.retain([digest("acme/a")], {"acme/a", "evil/c"})
    assert suspicions.find_owners([1, 2]) == {1: "acme/a"}
    assert find_flags(suspicions, digest("acme/b")) is None
    assert suspicions.read_flagged() == {}
    assert suspicions.find_names(["evil/c", "acme/b"]) == {"evil/c": "evil/c"}
    suspicions.check_integrity()


@pytest.mark.parametrize("content", [b"no database" * 999, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_knows_nothing_and_begins_anew(
    suspicions: SuspicionStore, content: bytes
) -> None:
    suspicions.path.parent.mkdir()
    suspicions.path.write_bytes(content)
    assert find_flags(suspicions, digest("acme/sql")) is None
    assert len(suspicions.find_problems()) == 1
    assert "reindex" in suspicions.notes[0]
    suspicions.add([verdict("acme/sql", COPIED)])
    assert find_flags(suspicions, digest("acme/sql")) == (COPIED,)
    assert "begins anew" in suspicions.notes[-1]
    suspicions.check_integrity()


def test_a_file_of_another_layout_begins_anew(suspicions: SuspicionStore) -> None:
    suspicions.path.parent.mkdir()
    with sqlite3.connect(suspicions.path) as db:
        db.execute("CREATE TABLE verdicts (something TEXT, name TEXT, flags TEXT, content_digest)")
    db.close()
    suspicions.add([verdict("acme/sql")])
    assert find_flags(suspicions, digest("acme/sql")) == ()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(StoreError, match="home"):
        SuspicionStore(tmp_path / "home" / "suspicions.db").add([verdict("acme/sql")])


def test_what_the_database_refuses_is_told(
    suspicions: SuspicionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expertctl.store.locks.BUSY_SECONDS", 0.0)
    suspicions.add([verdict("acme/sql")])
    holder = sqlite3.connect(suspicions.path)
    holder.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(StoreError, match="in use by another process"):
            suspicions.add([verdict("acme/b")])
    finally:
        holder.close()


def test_a_full_disk_is_told(suspicions: SuspicionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    full = "CREATE TABLE IF NOT EXISTS filler (x BLOB)", "PRAGMA max_page_count = 12"
    tables = (*full, "INSERT INTO filler VALUES (zeroblob(1000000))")
    monkeypatch.setattr("expertctl.store.suspicions._TABLES", tables)
    with pytest.raises(DiskFullError, match="no space left"):
        suspicions.add([verdict("acme/sql")])


def test_several_may_write_at_once(suspicions: SuspicionStore) -> None:
    names = ("one", "two", "three", "four")
    together = threading.Barrier(len(names))

    def write(name: str) -> None:
        together.wait()
        for number in range(3):
            own = SuspicionStore(suspicions.path)
            own.add([verdict(f"{name}/e{number}", marks=(number,)), verdict(f"{name}/x", STUFFED)])

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(write, names))
    assert [len(suspicions.list_namespace_contents(name)) for name in names] == [4, 4, 4, 4]
    assert set(suspicions.find_owners(range(5))) == {0, 1, 2}
    assert set(suspicions.read_flagged()) == {digest(f"{name}/x") for name in names}
    suspicions.check_integrity()


def test_a_file_that_another_process_repaired_meanwhile_is_kept(
    suspicions: SuspicionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspicions.path.parent.mkdir()
    suspicions.path.write_bytes(b"no database" * 999)
    other = SuspicionStore(suspicions.path)

    @contextmanager
    def overtaken(path: Path) -> Iterator[None]:
        monkeypatch.setattr("expertctl.store.suspicions.exclusive_lock", exclusive_lock)
        other.add([verdict("acme/first")])
        with exclusive_lock(path):
            yield

    monkeypatch.setattr("expertctl.store.suspicions.exclusive_lock", overtaken)
    suspicions.add([verdict("acme/second")])
    assert len(suspicions.list_namespace_contents("acme")) == 2
    assert [len(one.notes) for one in (other, suspicions)] == [1, 0]
    suspicions.check_integrity()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_can_be_read(suspicions: SuspicionStore) -> None:
    suspicions.add([verdict("evil/sql", COPIED)])
    suspicions.path.parent.chmod(0o500)
    try:
        assert find_flags(suspicions, digest("evil/sql")) == (COPIED,)
    finally:
        suspicions.path.parent.chmod(0o700)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": []}', '{"sha256:zz": 3}', "\xff", "null"])
def test_a_damaged_list_of_flags_is_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / FLAGS_FILE).write_text(text, encoding="latin-1")
    assert read_flags(tmp_path / FLAGS_FILE) == {}


def test_a_reason_is_told_once() -> None:
    assert describe_flags([COPIED, STUFFED, COPIED]) == (
        f"{SUSPICION_SENTENCE}: {COPIED.sentence}; {STUFFED.sentence}"
    )


def test_flags_are_written_as_they_are_read(tmp_path: Path) -> None:
    flagged = {digest("a"): (COPIED, STUFFED), digest("b"): (STUFFED,)}
    write_flags(tmp_path / FLAGS_FILE, flagged)
    assert read_flags(tmp_path / FLAGS_FILE) == flagged
    assert flags_to_json([STUFFED]) == [
        {"code": "stuffed", "sentence": "it has 65 keywords", "other": None}
    ]
