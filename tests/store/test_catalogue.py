"""The catalogue and the history of uses."""

import json
import multiprocessing
import sqlite3
import stat
from pathlib import Path

import pytest

from expertctl.errors import DiskFullError, ExpertError, StoreError
from expertctl.reference import Digest
from expertctl.store.catalogue import Catalogue, UsageCount
from tests.store.fixtures import HomeFixture, PackageFactory, record_use

X, Y = Digest.compute(b"x"), Digest.compute(b"y")


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(tmp_path / "index.db")


def test_an_absent_catalogue_is_read_without_being_made(catalogue: Catalogue) -> None:
    assert catalogue.history.read_usage_counts().get(X) is None
    assert catalogue.read_success_rates().find_rate(X) is None
    assert catalogue.list_refs() == []
    assert catalogue.find_problems() == []
    assert not catalogue.path.exists()


def test_uses_are_counted_for_each_content(catalogue: Catalogue) -> None:
    for _ in range(4):
        assert record_use(catalogue, X)
    assert record_use(catalogue, Y)
    usage = catalogue.history.read_usage_counts().get(X)
    assert usage is not None
    assert (usage.uses, usage.successes, usage.failures) == (4, 0, 0)
    assert usage.last_used is not None
    assert catalogue.read_success_rates().find_rate(X) is None
    assert catalogue.read_success_rates().find_rate(Y) is None


def test_nobody_else_may_read_it(catalogue: Catalogue) -> None:
    record_use(catalogue, X)
    assert stat.S_IMODE(catalogue.path.stat().st_mode) == 0o600
    assert catalogue.find_problems() == []
    catalogue.path.chmod(0o644)
    assert catalogue.find_problems() == ["others may read or write it"]


def test_experts_are_listed_and_forgotten_and_their_history_stays(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    (one, two) = user_home.install(
        package_factory.package("acme/one"),
        package_factory.package("acme/two"),
        catalogue=user_home.catalogue,
    )
    assert user_home.catalogue.list_refs() == ["acme/one@1.0.0", "acme/two@1.0.0"]
    record_use(user_home.catalogue, one.expert.content_digest)
    user_home.catalogue.remove(one.expert)
    assert user_home.catalogue.list_refs() == ["acme/two@1.0.0"]
    user_home.catalogue.rebuild([(one.expert, user_home.store.read_manifest(one.expert))])
    assert user_home.catalogue.list_refs() == ["acme/one@1.0.0"]
    usage = user_home.catalogue.history.read_usage_counts().get(one.expert.content_digest)
    assert usage is not None
    assert usage.uses == 1
    assert two.expert.ref not in user_home.catalogue.list_refs()
    user_home.catalogue.check_integrity()


@pytest.mark.parametrize("sidecars", [False, True])
def test_a_file_that_is_no_database_is_moved_aside(sidecars: bool, catalogue: Catalogue) -> None:
    if sidecars:
        record_use(catalogue, Y)
        for suffix in ("-wal", "-shm"):
            catalogue.path.with_name(f"index.db{suffix}").write_bytes(b"\xff" * 5000)
    catalogue.path.write_bytes(b"this is no database " * 500)
    assert (
        catalogue.find_problems()
        == ["others may read or write it", "file is not a database"][sidecars:]
    )
    assert catalogue.history.read_usage_counts().get(X) is None
    assert "was damaged" in catalogue.notes[0]
    assert "reindex" in catalogue.notes[0]
    assert catalogue.path.with_name("index.db.damaged").read_bytes()[:4] == b"this"
    assert record_use(catalogue, X)
    assert catalogue.history.read_usage_counts().get(X)
    catalogue.check_integrity()


def test_every_page_may_be_damaged_without_a_traceback(catalogue: Catalogue) -> None:
    for number in range(120):
        record_use(catalogue, Digest.compute(str(number).encode()))
    whole = catalogue.path.read_bytes()
    assert len(whole) > 3 * 4096
    for begin in range(0, len(whole), 4096):
        for name in ("index.db-wal", "index.db-shm", "index.db.damaged"):
            catalogue.path.with_name(name).unlink(missing_ok=True)
        catalogue.path.write_bytes(whole[:begin] + b"\xff" * 2048 + whole[begin + 2048 :])
        usage = catalogue.history.read_usage_counts().get(Digest.compute(b"7"))
        assert usage is None or usage.uses == 1
        for _ in range(2):  # damage may be met only by the second question
            assert record_use(catalogue, X), catalogue.notes
            found = catalogue.history.read_usage_counts().get(X)
        assert found is not None


def test_another_program_s_database_is_moved_aside(catalogue: Catalogue) -> None:
    with sqlite3.connect(catalogue.path) as connection:
        connection.execute("CREATE TABLE usage (something TEXT)")
    connection.close()
    assert catalogue.find_problems()[-1] == "the table usage is not ours"
    assert catalogue.history.read_usage_counts().get(X) is None
    assert record_use(catalogue, X)
    assert catalogue.history.read_usage_counts().get(X)


def test_a_writer_that_was_killed_before_it_began_left_nothing_to_repair(
    catalogue: Catalogue,
) -> None:
    catalogue.path.touch(mode=0o600)
    assert catalogue.find_problems() == []
    assert catalogue.history.read_usage_counts().get(X) is None
    assert record_use(catalogue, X)
    assert catalogue.notes == []


def test_a_place_that_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    catalogue = Catalogue(tmp_path / "file" / "index.db")
    assert not record_use(catalogue, X)
    assert "not recorded" in catalogue.notes[0]
    with pytest.raises(StoreError):
        catalogue.rebuild([])


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("SQLITE_FULL", DiskFullError),
        ("SQLITE_IOERR_SHMSIZE", DiskFullError),
        ("SQLITE_IOERR_FSYNC", StoreError),
        ("SQLITE_BUSY", StoreError),
        ("SQLITE_READONLY", StoreError),
        ("SQLITE_CANTOPEN", StoreError),
    ],
)
def test_what_sqlite_refuses_is_told_as_ours(
    name: str, error: type[ExpertError], catalogue: Catalogue
) -> None:
    refusal = sqlite3.OperationalError("refused")
    refusal.sqlite_errorname = name

    def refuse(_: object) -> None:
        raise refusal

    with pytest.raises(error, match=r"index\.db") as told:
        catalogue.database.write(refuse)
    assert told.value.hint
    assert not catalogue.path.with_name("index.db.damaged").exists()


def test_many_processes_count_without_losing_a_use(catalogue: Catalogue) -> None:
    context = multiprocessing.get_context("fork")

    def work() -> None:
        for _ in range(25):
            assert record_use(catalogue, X)

    workers = [context.Process(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    usage = catalogue.history.read_usage_counts()[X]
    assert usage == UsageCount(100, 0, 0, usage.last_used)


def test_names_of_signers_are_read_for_display(tmp_path: Path) -> None:
    from expertctl.store.preference import read_signers

    path = tmp_path / "trust.json"
    ids = ["sha256:" + c * 64 for c in "ab"]
    path.write_text(
        json.dumps(
            {
                "keys": [{"key_id": ids[0], "name": "me", "grants": []}],
                "revoked": [{"key_id": ids[1]}],
            }
        )
    )
    signers = read_signers(path)
    assert signers.display_name(ids[0]) == "me"
    assert signers.display_name(ids[1]) == "b" * 12
    assert signers.display_name(None) == "-"
    assert signers.revoked == {(ids[1], None, None)}
    for text in ("", "[]", "{}", '{"keys": 1, "revoked": []}', "\ud800".encode(errors="replace")):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert read_signers(path).names == {}
    assert read_signers(tmp_path / "absent").names == {}
