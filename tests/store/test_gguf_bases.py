"""GGUF files as known bases: they stay in place, and are never removed."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import (
    BaseMismatchError,
    ConflictError,
    InvalidPackageError,
    NotFoundError,
    UsageError,
)
from expertctl.store import bases as module
from expertctl.store.bases import BaseStore
from tests.factories import write_base
from tests.gguf_files import write_gguf
from tests.store.fixtures import HomeFixture


@pytest.fixture
def file(tmp_path: Path) -> Path:
    base = write_base(tmp_path / "base", layers=1, intermediate=64)
    (tmp_path / "models").mkdir()
    return write_gguf(tmp_path / "models" / "small.Q8_0.gguf", base, kind="Q8_0")


@pytest.fixture
def bases(user_home: HomeFixture) -> BaseStore:
    return user_home.bases


def test_a_file_is_remembered_where_it_is(bases: BaseStore, file: Path) -> None:
    base = bases.add(file)
    assert bases.list_bases() == [base]
    assert (base.name, base.source, base.copied) == ("small.Q8_0", file, False)
    assert bases.find(str(file)) == bases.find("small.Q8_0") == base
    assert base.path.parent == bases.folder / "small.Q8_0"
    assert str(file) in {entry.path for entry in base.files}
    assert base.size > file.stat().st_size
    bases.check(base)
    bases.rehash(base)
    bases.check_integrity()


def test_adding_it_again_changes_nothing(bases: BaseStore, file: Path) -> None:
    first, second = bases.add(file), bases.add(file)
    assert (first.identity, first.files) == (second.identity, second.files)
    assert [path.name for path in first.path.parent.glob("derived-*")] == [first.path.name]


def test_a_file_that_was_moved_is_added_from_its_new_place(bases: BaseStore, file: Path) -> None:
    old = bases.add(file)
    moved = file.rename(file.with_name("moved.gguf"))
    with pytest.raises(BaseMismatchError, match=r"small.Q8_0.gguf is missing"):
        bases.check(old)
    base = bases.add(moved, name=old.name)
    assert (base.identity, base.source) == (old.identity, moved)
    assert not old.path.exists()
    bases.check(base)


def test_a_changed_file_is_found(bases: BaseStore, file: Path) -> None:
    base = bases.add(file)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(BaseMismatchError, match="has other content"):
        bases.check(base)
    with pytest.raises(ConflictError, match="another base is called"):
        bases.add(file)


def test_a_copy_needs_the_file_no_more_and_moves_with_the_home(
    bases: BaseStore, file: Path, tmp_path: Path
) -> None:
    base = bases.add_copy(file)
    assert base.copied
    file.unlink()
    home = bases.folder.rename(tmp_path / "elsewhere")
    moved = BaseStore(home)
    (found,) = moved.list_bases()
    moved.rehash(found)
    assert (found.path, found.identity) == (home / base.name / "files", base.identity)


def test_a_home_can_be_moved_while_the_file_stays(
    bases: BaseStore, file: Path, tmp_path: Path
) -> None:
    base = bases.add(file)
    home = bases.folder.rename(tmp_path / "elsewhere")
    (found,) = BaseStore(home).list_bases()
    BaseStore(home).rehash(found)
    assert (found.path.parent, found.source) == (home / base.name, file)


def test_removing_a_base_leaves_the_file(bases: BaseStore, file: Path) -> None:
    data, base = file.read_bytes(), bases.add(file)
    bases.remove(base)
    assert file.read_bytes() == data
    assert not base.path.parent.exists()
    assert bases.find_garbage() == ()


def test_a_folder_left_by_a_killed_process_is_garbage(bases: BaseStore, file: Path) -> None:
    base = bases.add(file)
    (base.path.parent / "base.json").unlink()
    assert bases.find_garbage() == (base.path.parent,)
    assert bases.collect_garbage() == (base.path.parent,)
    assert file.exists()
    assert bases.add(file).identity == base.identity


def test_a_blob_is_named_by_its_header(bases: BaseStore, file: Path) -> None:
    blob = file.rename(file.with_name("sha256-0123456789abcdef"))
    assert bases.add(blob).name == "a base"


def test_a_file_in_the_cache_of_the_hub_has_its_revision(
    bases: BaseStore, file: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--acme--small-GGUF" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    link = snapshot / file.name
    link.symlink_to(file.rename(tmp_path / "0123456789abcdef"))
    base = bases.add(link)
    assert (base.name, base.identity.revision) == ("small.Q8_0", "0123abc")
    bases.rehash(base)


def test_a_16_bit_file_has_the_identity_of_its_folder(bases: BaseStore, tmp_path: Path) -> None:
    directory = write_base(tmp_path / "bf16", layers=1, dtype="bfloat16")
    known = bases.add(directory)
    other = write_gguf(tmp_path / "bf16.gguf", directory, kind="BF16")
    added = bases.add(other, name="from gguf")
    assert added.identity.weights == known.identity.weights
    assert added.identity.arch == known.identity.arch


def test_other_files_and_folders_say_what_to_give(
    bases: BaseStore, file: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="holds GGUF files") as error:
        bases.add(file.parent)
    assert f"expertctl base add {file}" in error.value.hint
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"PK\x03\x04")
    with pytest.raises(InvalidPackageError, match="not a GGUF file"):
        bases.add(fake)
    with pytest.raises(NotFoundError):
        bases.add(tmp_path / "gone.gguf")
    fake.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(InvalidPackageError):
        bases.add(fake)
    derived = shutil.copytree(bases.add(file).path, tmp_path / "taken")
    with pytest.raises(UsageError, match="follow from a GGUF file"):
        bases.add(derived)
    assert [base.name for base in bases.list_bases()] == ["small.Q8_0"]


def test_the_copy_of_a_base_is_not_added_as_another_one(bases: BaseStore, file: Path) -> None:
    """It would be removed when the record no longer names it."""
    base = bases.add_copy(file, name="mine")
    with pytest.raises(UsageError, match="is the copy of a base"):
        bases.add(base.path / "model.gguf", name="mine")
    assert (base.path / "model.gguf").exists()
    bases.check(base)


def test_a_file_that_is_replaced_between_parsing_and_hashing_is_refused(
    bases: BaseStore, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_base(tmp_path / "other", layers=1, intermediate=64, seed=9)
    finished = write_gguf(tmp_path / "finished.gguf", other, kind="Q8_0")
    write = module.write_gguf_files

    def write_and_replace(*words: Any, **options: Any) -> Any:
        state = write(*words, **options)
        finished.replace(file)
        return state

    monkeypatch.setattr(module, "write_gguf_files", write_and_replace)
    with pytest.raises(InvalidPackageError, match="changed while it was read"):
        bases.add(file)
    assert bases.list_bases() == []
