"""What registries said last: never lowered, never forgotten, whole after any crash."""

import multiprocessing
import os
import stat
from pathlib import Path

import pytest
from filelock import FileLock

from expertctl.errors import StoreError, TrustError
from expertctl.reference import PackageName
from expertctl.registry import index_store
from expertctl.registry.index_document import IndexDocument, Release, sign_index
from expertctl.registry.index_store import IndexStore
from expertctl.trust.grants import KnownRegistry
from tests.registry.indexes import (
    SQL,
    make_index_document,
    make_known_registry,
    make_named_key,
    make_release,
)
from tests.store.fault_injection import run_with_fault

KNOWN = make_known_registry()


@pytest.fixture
def store(tmp_path: Path) -> IndexStore:
    return IndexStore(tmp_path / "registries")


def envelope(revision: int, *versions: str) -> bytes:
    return sign_index(
        make_index_document(revision, releases=[make_release(v) for v in versions]),
        make_named_key("index"),
    )


def believe(store: IndexStore, data: bytes, *, registry: KnownRegistry = KNOWN) -> IndexDocument:
    floor = store.load(registry, SQL)
    return store.accept(registry, SQL, data, floor=floor)


def revision(store: IndexStore, registry: KnownRegistry = KNOWN) -> int | None:
    found = store.load(registry, SQL)
    return None if found is None else found.document.revision


def test_nothing_is_known_at_first_and_asking_writes_nothing(store: IndexStore) -> None:
    assert store.load(KNOWN, SQL) is None
    assert not store.folder.exists()


def test_what_was_believed_is_remembered_byte_for_byte_for_the_owner_alone(
    store: IndexStore,
) -> None:
    assert believe(store, envelope(3)).revision == 3
    found = store.load(KNOWN, SQL)
    assert found is not None
    assert found.envelope == envelope(3)
    path = store.path(KNOWN, SQL)
    assert path == (
        store.folder
        / "127.0.0.1+8080"
        / "index"
        / KNOWN.index_key.key_id.removeprefix("sha256:")
        / "acme"
        / "sql.json"
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    store.check_integrity(KNOWN)


def test_a_newer_revision_replaces_an_older(store: IndexStore) -> None:
    believe(store, envelope(1))
    assert believe(store, envelope(5, "1.0.0", "1.1.0")).revision == 5
    assert revision(store) == 5


def test_a_rollback_is_refused_with_both_revisions_and_the_way_out(store: IndexStore) -> None:
    believe(store, envelope(5))
    with pytest.raises(TrustError, match="revision 4, but it had 5 before") as refused:
        believe(store, envelope(4))
    assert str(store.path(KNOWN, SQL)) in refused.value.hint
    assert revision(store) == 5


def test_one_revision_that_says_two_things_is_refused(store: IndexStore) -> None:
    believe(store, envelope(5, "1.0.0"))
    with pytest.raises(TrustError, match="5 says two things"):
        believe(store, envelope(5, "1.0.1"))
    assert revision(store) == 5


def test_the_same_again_is_believed_and_not_written_again(store: IndexStore) -> None:
    believe(store, envelope(5))
    before = store.path(KNOWN, SQL).stat().st_ino
    assert believe(store, envelope(5)).revision == 5
    assert store.path(KNOWN, SQL).stat().st_ino == before


def test_who_was_told_more_meanwhile_is_right_too(store: IndexStore) -> None:
    floor = store.load(KNOWN, SQL)
    believe(store, envelope(6))
    assert store.accept(KNOWN, SQL, envelope(5), floor=floor).revision == 6
    assert store.accept(KNOWN, SQL, envelope(6), floor=floor).revision == 6
    with pytest.raises(TrustError, match="two things"):
        store.accept(KNOWN, SQL, envelope(6, "9.9.9"), floor=floor)
    assert revision(store) == 6


def test_packages_and_registries_have_floors_of_their_own(store: IndexStore) -> None:
    other = PackageName("acme", "sql-old")
    elsewhere = make_known_registry("127.0.0.1:9090")
    believe(store, envelope(5))
    data = sign_index(make_index_document(1, package=other), make_named_key("index"))
    assert store.accept(KNOWN, other, data, floor=None).revision == 1
    assert believe(store, envelope(1), registry=elsewhere).revision == 1
    assert revision(store) == 5


def test_a_new_index_key_begins_anew_and_the_old_floor_stays(store: IndexStore) -> None:
    believe(store, envelope(2**53 - 1))
    renewed = make_known_registry(index_key="renewed")
    data = sign_index(make_index_document(1), make_named_key("renewed"))
    assert believe(store, data, registry=renewed).revision == 1
    assert revision(store) == 2**53 - 1


def test_what_a_foreign_key_signed_is_not_remembered(store: IndexStore) -> None:
    believe(store, envelope(1))
    with pytest.raises(TrustError, match="index key"):
        believe(store, sign_index(make_index_document(9), make_named_key("mallory")))
    assert revision(store) == 1


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other package", "a folder"])
def test_a_damaged_memory_stops_and_never_forgets_the_floor(damage: str, store: IndexStore) -> None:
    believe(store, envelope(5))
    path = store.path(KNOWN, SQL)
    data = path.read_bytes()
    path.unlink()
    match damage:
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(data[:-10])
        case "flipped":
            path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
        case "other package":
            other = make_index_document(9, package=PackageName("acme", "else"))
            path.write_bytes(sign_index(other, make_named_key("index")))
        case _:
            path.mkdir()
    for act in (lambda: believe(store, envelope(6)), lambda: store.load(KNOWN, SQL)):
        with pytest.raises(StoreError, match="the stored index of acme/sql") as refused:
            act()
        assert "move it away" in refused.value.hint
        assert str(path) in refused.value.hint


@pytest.mark.all
@pytest.mark.parametrize("fault", ["kill", "full", "error"])
def test_whatever_stops_the_writing_the_floor_is_the_old_or_the_new_one(
    fault: str, tmp_path: Path
) -> None:
    def fresh(name: str) -> IndexStore:
        store = IndexStore(tmp_path / name)
        believe(store, envelope(1))
        return store

    template = fresh("whole")
    whole = run_with_fault(lambda: believe(template, envelope(2)))
    assert not whole.errors
    assert len(whole.steps) >= 3
    for step in range(1, len(whole.steps) + 1):
        store = fresh(f"{fault}-{step}")
        ended = run_with_fault(lambda s=store: believe(s, envelope(2)), at=step, fault=fault)  # type: ignore[misc, arg-type]
        assert ended.killed if fault == "kill" else ended.completed_or_raised(StoreError), (
            ended.trace
        )
        assert revision(store) in {1, 2}
        believe(store, envelope(2))
        assert revision(store) == 2
        store.check_integrity(KNOWN)


def test_a_folder_that_cannot_be_written_stops_what_could_not_be_remembered(
    store: IndexStore,
) -> None:
    store.folder.mkdir()
    (store.folder / "127.0.0.1+8080").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be"):
        believe(store, envelope(1))


def test_a_lock_that_is_held_for_too_long_is_told(tmp_path: Path) -> None:
    store = IndexStore(tmp_path / "registries", lock_seconds=0)
    folder = store.folder / "127.0.0.1+8080" / "index"
    folder.mkdir(parents=True)
    with FileLock(folder / "lock"), pytest.raises(StoreError, match="another process"):
        believe(store, envelope(1))
    assert believe(store, envelope(1)).revision == 1


def _raise_floor(folder: Path, data: list[bytes]) -> None:
    store = IndexStore(folder)
    for one in data:
        store.accept(KNOWN, SQL, one, floor=None)


def test_processes_that_write_at_once_never_lower_the_floor(store: IndexStore) -> None:
    data = [envelope(n) for n in range(1, 31)]
    workers = [
        multiprocessing.get_context("fork").Process(
            target=_raise_floor, args=(store.folder, data[start::3])
        )
        for start in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert revision(store) == 30
    assert os.listdir(store.path(KNOWN, SQL).parent) == ["sql.json"]  # noqa: PTH208 - names


def said(revision: int, *releases: Release) -> bytes:
    return sign_index(make_index_document(revision, releases=releases), make_named_key("index"))


def first(store: IndexStore) -> dict[str, str]:
    """The first contents that are kept, by version."""
    return {str(v): str(c.digest) for v, c in store.first_contents(KNOWN, SQL).items()}


def test_a_version_that_changes_is_remembered_as_it_was(store: IndexStore) -> None:
    old, new, other = (
        make_release("1.0.0"),
        make_release("1.0.0", content="b"),
        make_release("1.1.0"),
    )
    believe(store, said(1, old, other))
    assert first(store) == {}
    believe(store, said(2, new, other))
    believe(store, said(3, make_release("1.0.0", content="c"), other))
    assert first(store) == {"1.0.0": str(old.content_digest)}
    [content] = store.first_contents(KNOWN, SQL).values()
    assert content.signers == (make_named_key("alice").public.key_id,)
    store.check_integrity(KNOWN)


def test_a_version_that_vanishes_is_remembered_for_when_it_comes_back(store: IndexStore) -> None:
    old = make_release("1.0.0")
    believe(store, said(1, old))
    believe(store, said(2, make_release("2.0.0")))
    believe(store, said(3, make_release("1.0.0", content="b"), make_release("2.0.0")))
    assert first(store) == {"1.0.0": str(old.content_digest)}


def test_a_change_that_is_accepted_is_forgotten_and_noticed_when_it_is_undone(
    store: IndexStore,
) -> None:
    old, new = make_release("1.0.0"), make_release("1.0.0", content="b")
    believe(store, said(1, old))
    believe(store, said(2, new))
    store.accept_content(KNOWN, SQL, old.version)
    assert first(store) == {}
    believe(store, said(3, old))
    assert first(store) == {"1.0.0": str(new.content_digest)}


def test_first_contents_that_cannot_be_read_stop_their_package(store: IndexStore) -> None:
    believe(store, said(1, make_release("1.0.0")))
    believe(store, said(2, make_release("1.0.0", content="b")))
    path = store.path(KNOWN, SQL).with_suffix(".first")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match="cannot be read") as refused:
        store.first_contents(KNOWN, SQL)
    assert str(path) in refused.value.hint
    with pytest.raises(StoreError):
        believe(store, said(3, make_release("1.0.0")))
    assert [problem.hint for problem in store.find_problems(KNOWN)] == [refused.value.hint]


def test_more_changed_versions_than_can_be_remembered_are_refused(
    store: IndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a registry could make the file too large to be read, and have it moved away."""
    monkeypatch.setattr(index_store, "MAX_BYTES", 300)
    believe(store, said(1, make_release("1.0.0"), make_release("1.1.0")))
    believe(store, said(2, make_release("1.1.0")))
    assert list(first(store)) == ["1.0.0"]
    with pytest.raises(TrustError, match=r"changed or took away 2 versions of acme/sql, more"):
        believe(store, said(3, make_release("2.0.0")))
    assert revision(store) == 2
    assert list(first(store)) == ["1.0.0"]
    store.check_integrity(KNOWN)


def test_a_process_that_is_killed_after_the_first_contents_were_written_forgets_nothing(
    store: IndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The envelope is written last, so the next attempt finds the old one and adds nothing."""
    old, new = make_release("1.0.0"), make_release("1.0.0", content="b")
    believe(store, said(1, old))
    real = index_store.write_atomic

    def killed(path: Path, data: bytes, *, mode: int) -> None:
        if path.suffix == ".json":
            raise KeyboardInterrupt
        real(path, data, mode=mode)

    with monkeypatch.context() as patch:
        patch.setattr(index_store, "write_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            believe(store, said(2, new))
    assert revision(store) == 1
    assert first(store) == {"1.0.0": str(old.content_digest)}
    believe(store, said(2, new))
    assert first(store) == {"1.0.0": str(old.content_digest)}
