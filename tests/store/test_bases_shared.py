"""Bases that several processes read, add and remove at once."""

import shutil
from pathlib import Path
from threading import Lock

import pytest

from expertctl.store.base_record import StoredBase, read_base_record
from expertctl.store.bases import BaseStore
from expertctl.store.locks import claim_folder, exclusive_lock
from tests.factories import write_base
from tests.store.fixtures import HomeFixture


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_base(tmp_path / "my-base", layers=1, hidden=16, heads=2, kv_heads=1)


@pytest.fixture
def bases(user_home: HomeFixture) -> BaseStore:
    return user_home.bases


@pytest.mark.parametrize("copied", [False, True], ids=["where it is", "copied"])
def test_no_lock_is_held_while_a_base_is_read(
    copied: bool, bases: BaseStore, directory: Path
) -> None:
    free: list[bool] = []
    one_at_a_time = Lock()  # files are hashed in threads, which are no rivals here

    def look(_: int) -> None:
        with one_at_a_time, exclusive_lock(bases.folder / "lock", seconds=0):
            free.append(True)

    (bases.add_copy if copied else bases.add)(directory, progress=look)
    assert free
    bases.check_integrity()


def test_copying_again_leaves_a_sound_copy_to_its_readers(
    bases: BaseStore, directory: Path
) -> None:
    first = bases.add_copy(directory)
    again = bases.add_copy(directory)
    assert [file.inode for file in again.files] == [file.inode for file in first.files]
    assert again.added_ns > first.added_ns
    assert bases.list_bases() == [again]
    bases.check_integrity()


def test_copying_again_mends_a_damaged_copy(bases: BaseStore, directory: Path) -> None:
    base = bases.add_copy(directory)
    weights = base.path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(b"cut short")
    again = bases.add_copy(directory)
    assert (again.path, again.identity) == (base.path, base.identity)
    assert weights.read_bytes() == whole == (directory / "model.safetensors").read_bytes()
    bases.check_integrity()


def test_a_copy_that_is_added_from_its_own_place_stays(bases: BaseStore, directory: Path) -> None:
    base = bases.add_copy(directory)
    again = bases.add(base.path, name=base.name)
    assert (again.path, again.copied) == (base.path, True)
    bases.check_integrity()


def test_a_base_that_goes_while_all_are_read_is_left_out(
    bases: BaseStore, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, gone = bases.add(directory, name="b-kept"), bases.add(directory, name="a-gone")

    def read(path: Path) -> StoredBase:
        if path.parent.name == gone.name:
            shutil.rmtree(path.parent)
        return read_base_record(path)

    monkeypatch.setattr("expertctl.store.bases.read_base_record", read)
    assert bases.list_bases() == [kept]


def test_only_copies_that_nobody_makes_are_swept(bases: BaseStore, directory: Path) -> None:
    bases.add(directory)
    left = bases.folder / ".new-0123456789abcdef"
    (left / "files").mkdir(parents=True)
    with claim_folder(bases.folder, prefix=".new-") as held:
        bases.add(directory, name="another")
        assert held.is_dir()
        assert not left.exists()
    bases.add(directory)
    assert [path.name for path in bases.folder.iterdir() if path.name[0] == "."] == []
