"""Base models that the machine knows."""

import json
import os
import shutil
from pathlib import Path

import pytest

from expertctl.digest import hash_file
from expertctl.errors import (
    BaseMismatchError,
    ConflictError,
    IncompatibleError,
    InvalidPackageError,
    NotFoundError,
    StoreError,
    UsageError,
)
from expertctl.package.architecture_rows import ARCHITECTURES, ELSE_FOREIGN
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.store.bases import BaseStore
from tests.factories import write_base
from tests.gpt2_base import write_gpt2
from tests.store.fixtures import HomeFixture


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_base(tmp_path / "my-base", layers=1, hidden=16, heads=2, kv_heads=1)


@pytest.fixture
def bases(user_home: HomeFixture) -> BaseStore:
    return user_home.bases


def flip(path: Path) -> None:
    """Change one bit and keep size, time and inode."""
    status = path.stat()
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_base_is_remembered_where_it_is(bases: BaseStore, directory: Path) -> None:
    base = bases.add(directory)
    assert bases.list_bases() == [base]
    assert base.name == "my-base"
    assert base.path == directory
    assert BaseFacts(base.identity, base.shapes) == read_base(directory, name="my-base")
    assert {f.path: f.digest for f in base.files} == {
        path.name: hash_file(path)[1] for path in directory.iterdir()
    }
    assert base.size == sum(path.stat().st_size for path in directory.iterdir())
    kept = {path.name for path in (bases.folder / "my-base").iterdir()}
    assert kept == {"base.json", "tokenizer-digest.json"}
    bases.check_integrity()


def test_a_copy_lives_without_the_original(bases: BaseStore, directory: Path) -> None:
    base = bases.add_copy(directory, name="org/copied", revision="abc")
    (directory / "notes.txt").write_text("never copied")
    shutil.rmtree(directory)
    bases.check(base)
    bases.rehash(base)
    assert base.copied
    assert base.path == bases.folder / "org%2Fcopied" / "files"
    assert bases.find("org/copied").identity.revision == "abc"
    bases.remove(base)
    assert bases.list_bases() == []
    assert not (bases.folder / "org%2Fcopied").exists()


def test_a_copy_moves_with_its_folder(bases: BaseStore, directory: Path, tmp_path: Path) -> None:
    base = bases.add_copy(directory, name="org/copied")
    bases.add(directory, name="referenced")
    moved = BaseStore(bases.folder.rename(tmp_path / "moved"))
    assert moved.find("org/copied").path == moved.folder / "org%2Fcopied" / "files"
    assert moved.find("referenced").path == directory
    moved.check_integrity()
    (base,) = [base for base in moved.list_bases() if base.copied]
    assert moved.add_copy(directory, name="org/copied").files == base.files


def test_a_copy_recorded_with_its_whole_path_moves_too(
    bases: BaseStore, directory: Path, tmp_path: Path
) -> None:
    base = bases.add_copy(directory)
    record = bases.folder / "my-base" / "base.json"
    assert str(tmp_path) not in record.read_text()
    record.write_text(record.read_text().replace('"files"', json.dumps(str(base.path)), 1))
    assert bases.list_bases() == [base]
    moved = BaseStore(bases.folder.rename(tmp_path / "moved"))
    moved.check_integrity()


def test_progress_tells_every_byte(bases: BaseStore, directory: Path) -> None:
    seen: list[int] = []
    base = bases.add(directory, progress=seen.append)
    assert base.size < sum(seen) <= 2 * base.size + sum(f.size for f in base.files)


def test_names_and_commits_of_a_hub_cache_are_understood(
    bases: BaseStore, directory: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / ("c1" * 20)
    snapshot.mkdir(parents=True)
    for path in directory.iterdir():
        (snapshot / path.name).symlink_to(path)
    base = bases.add(snapshot)
    assert (base.name, base.identity.revision) == ("Qwen/Qwen3-0.6B", "c1" * 20)


def test_adding_again_is_harmless(bases: BaseStore, directory: Path, tmp_path: Path) -> None:
    first = bases.add(directory)
    again = bases.add(directory)
    assert again.identity == first.identity
    moved = directory.rename(tmp_path / "moved")
    assert bases.add(moved, name="my-base").path == moved
    assert bases.add_copy(moved, name="my-base").copied
    assert not bases.add(moved, name="my-base").copied
    assert len(bases.list_bases()) == 1
    bases.check_integrity()


def test_a_name_belongs_to_one_base(bases: BaseStore, directory: Path, tmp_path: Path) -> None:
    bases.add(directory, name="taken")
    other = write_base(tmp_path / "other", layers=1, hidden=16, heads=2, kv_heads=1, seed=1)
    for add in (bases.add, bases.add_copy):
        with pytest.raises(ConflictError, match="another base is called taken") as error:
            add(other, name="taken")
        assert "--name" in error.value.hint
    assert bases.find("taken").path == directory
    assert [path.name for path in bases.folder.iterdir() if path.name[0] == "."] == []


def test_a_base_is_found_by_name_or_digest(bases: BaseStore, directory: Path) -> None:
    base = bases.add(directory, name="Qwen/Qwen3-0.6B")
    for wanted in ("Qwen/Qwen3-0.6B", str(base.identity.weights), str(base.identity.arch)):
        assert bases.find(wanted) == base
    with pytest.raises(NotFoundError, match="no base is called") as error:
        bases.find("Qwen/Qwen3-0.8B")
    assert error.value.hint.startswith("did you mean Qwen/Qwen3-0.6B? known: Qwen/Qwen3-0.6B; ")
    with pytest.raises(NotFoundError) as error:
        bases.find("None")
    assert "base add" in error.value.hint


@pytest.mark.parametrize(
    ("label", "found"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("/models/qwen3-0.6b/", True),
        ("C:\\models\\Qwen3-0.6B", True),
        ("Qwen3-0.6B", True),
        ("Qwen/Qwen3-0.6B-chat", False),
        ("Qwen", False),
        ("", False),
    ],
)
def test_a_label_means_the_only_base_with_its_last_part(
    bases: BaseStore, directory: Path, label: str, found: bool
) -> None:
    base = bases.add(directory, name="Qwen3-0.6B")
    assert bases.find_by_label(label) == (base if found else None)


def test_a_label_that_could_mean_two_bases_means_none_but_its_own(
    bases: BaseStore, directory: Path
) -> None:
    first = bases.add(directory, name="one/tiny")
    bases.add(directory, name="two/tiny")
    assert bases.find_by_label("tiny") is None
    assert bases.find_by_label("one/tiny") == first


def test_the_label_of_a_quantised_copy_means_the_base_that_it_was_made_from(
    bases: BaseStore, directory: Path
) -> None:
    base = bases.add(directory, name="acme/Tiny")
    for label in ("acme/Tiny-bnb-4bit", "unsloth/tiny-unsloth-bnb-4bit", "tiny-bnb-8bit"):
        assert bases.find_by_label(label) == base
    assert bases.find_by_label("acme/Tiny-4bit") is None


def test_a_base_is_found_by_its_folder_however_that_is_written(
    bases: BaseStore, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = bases.add(directory, name="mine")
    link = tmp_path / "link"
    link.symlink_to(directory)
    monkeypatch.chdir(directory.parent)
    for wanted in (str(directory), f"{directory}/.", str(link), f"./{directory.name}"):
        assert bases.find(wanted) == base
    for wanted in ("", " ", str(tmp_path), "nowhere", "a\0b", "x" * 5000, "~nobody-at-all/x"):
        with pytest.raises(NotFoundError, match="no base is called"):
            bases.find(wanted)


def test_a_name_wins_over_a_folder_of_that_name(
    bases: BaseStore, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases.add(directory, name="here")
    other = write_base(tmp_path / "there", layers=1, hidden=16, heads=2, kv_heads=1, seed=1)
    named = bases.add(other, name=directory.name)
    monkeypatch.chdir(directory.parent)
    assert bases.find(directory.name) == named


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES.keys() - ELSE_FOREIGN))
def test_every_supported_architecture_is_accepted(
    arch: str, bases: BaseStore, tmp_path: Path
) -> None:
    directory = write_base(tmp_path / arch, arch=arch, layers=2, hidden=16, heads=2, kv_heads=1)
    assert bases.add(directory).name == arch


def test_a_base_in_several_files_is_remembered_whole(bases: BaseStore, tmp_path: Path) -> None:
    directory = write_base(tmp_path / "sharded", shards=2)
    names = {file.path for file in bases.add(directory).files}
    assert {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    } <= names


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_architecture_that_cannot_run_is_refused_by_name(
    bases: BaseStore, directory: Path
) -> None:
    edit_config(directory, model_type="bert", architectures=["BertForMaskedLM"])
    with pytest.raises(IncompatibleError, match=r"'bert' as .* is not supported") as error:
        bases.add(directory)
    assert "causal language model" in error.value.hint
    edit_config(
        directory,
        model_type="qwen3",
        architectures=None,
        quantization_config={"quant_method": "hqq"},
    )
    with pytest.raises(IncompatibleError, match="the method 'hqq'"):
        bases.add(directory)
    assert bases.list_bases() == []


def test_a_base_that_only_transformers_runs_is_remembered_as_such(
    bases: BaseStore, tmp_path: Path
) -> None:
    added = bases.add(write_gpt2(tmp_path / "gpt2"))
    assert added.foreign
    assert bases.find("gpt2") == added
    bases.check_integrity()
    copied = bases.add_copy(tmp_path / "gpt2", name="copy")
    assert (copied.foreign, copied.identity.arch) == (True, added.identity.arch)


def test_a_foreign_base_that_names_code_of_its_own_is_refused_before_it_is_copied(
    bases: BaseStore, tmp_path: Path
) -> None:
    directory = write_gpt2(tmp_path / "gpt2", auto_map={"AutoConfig": "code.Config"})
    for add in (bases.add, bases.add_copy):
        with pytest.raises(IncompatibleError, match="auto_map"):
            add(directory)
    assert not bases.folder.exists()


def test_a_base_that_could_not_be_loaded_is_refused_before_it_is_copied(
    bases: BaseStore, directory: Path
) -> None:
    edit_config(directory, rope_scaling={"type": "proportional", "factor": 2.0})
    for add in (bases.add, bases.add_copy):
        with pytest.raises(IncompatibleError, match="'proportional' is not supported"):
            add(directory)
    edit_config(directory, rope_scaling=None, intermediate_size=50)
    for add in (bases.add, bases.add_copy):
        with pytest.raises(InvalidPackageError, match=r"50\] by config\.json"):
            add(directory)
    assert not bases.folder.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_without_its_files_is_refused(
    name: str, bases: BaseStore, directory: Path
) -> None:
    (directory / name).unlink()
    for add in (bases.add, bases.add_copy):
        with pytest.raises(NotFoundError, match=f"{name} is missing"):
            add(directory)


def test_pickled_weights_are_never_opened(bases: BaseStore, directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(NotFoundError) as error:
        bases.add(directory)
    assert "pickles are never opened" in error.value.hint


def test_weights_that_are_cut_short_are_refused(bases: BaseStore, directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(InvalidPackageError):
        bases.add(directory)


def test_what_is_no_directory_is_refused(bases: BaseStore, directory: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such directory") as error:
        bases.add(Path("Qwen/Qwen3-0.6B"))
    assert "expertctl pull ORG/NAME" in error.value.hint
    for path in (directory / "gone", Path("../gone"), Path("models/Qwen/gone")):
        with pytest.raises(NotFoundError, match="no such directory"):
            bases.add(path)
    with pytest.raises(UsageError, match="is no directory"):
        bases.add(directory / "config.json")
    weights = tmp_path / "only" / "model.gguf"
    weights.parent.mkdir()
    weights.write_bytes(b"PK")
    with pytest.raises(InvalidPackageError, match="not a GGUF file"):
        bases.add(weights)
    with pytest.raises(UsageError, match="holds GGUF files") as error:
        bases.add(weights.parent)
    assert f"expertctl base add {weights}" in error.value.hint
    assert not bases.folder.exists()


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", " x", "a\nb", "a\x1b[31m", "é" * 60])
def test_a_name_that_cannot_be_shown_or_stored_is_refused(
    name: str, bases: BaseStore, directory: Path
) -> None:
    with pytest.raises(UsageError, match="cannot name a base"):
        bases.add(directory, name=name or " ")


def test_a_name_cannot_lead_out_of_the_folder(bases: BaseStore, directory: Path) -> None:
    base = bases.add(directory, name="a/../../../b")
    assert base.name == "a/../../../b"
    assert {path.name for path in bases.folder.iterdir()} == {"lock", "a%2F..%2F..%2F..%2Fb"}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "chat_template.jinja"])
def test_a_changed_file_is_named(name: str, bases: BaseStore, directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    base = bases.add(directory)
    path = directory / name
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(1, 1))
    with pytest.raises(BaseMismatchError, match=f"{name} has other content") as error:
        bases.check(base)
    assert "base remove my-base" in error.value.hint
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(BaseMismatchError, match=f"{name} has .* bytes, not"):
        bases.check(base)
    path.unlink()
    for demand in (bases.check, bases.rehash):
        with pytest.raises(BaseMismatchError, match=f"{name} is missing"):
            demand(base)


def test_a_new_file_that_would_be_read_is_named(bases: BaseStore, directory: Path) -> None:
    base = bases.add(directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(BaseMismatchError, match=r"chat_template\.jinja is new"):
        bases.check(base)


def test_the_same_bytes_at_another_time_are_the_same_base(
    bases: BaseStore, directory: Path
) -> None:
    base = bases.add(directory)
    path = directory / "model.safetensors"
    shutil.copyfile(path, directory / "again")
    (directory / "again").replace(path)
    bases.check(base)
    (refreshed,) = bases.list_bases()
    assert refreshed != base
    assert refreshed.identity == base.identity
    assert path.stat().st_ino in {file.inode for file in refreshed.files}


def test_a_flip_behind_the_clock_is_found_by_rehashing(bases: BaseStore, directory: Path) -> None:
    base = bases.add(directory)
    flip(directory / "model.safetensors")
    bases.check(base)
    with pytest.raises(BaseMismatchError, match=r"model\.safetensors has other content"):
        bases.rehash(base)


def test_a_damaged_record_is_told_with_the_way_out(bases: BaseStore, directory: Path) -> None:
    bases.add(directory)
    path = bases.folder / "my-base" / "base.json"
    for data in (b"", b"{}", b"[]", path.read_bytes().replace(b"sha256:", b"sha255:", 1)):
        path.write_bytes(data)
        with pytest.raises(StoreError, match=r"base\.json is damaged") as error:
            bases.list_bases()
        assert "add the base again" in error.value.hint


def test_removing_forgets_and_leaves_the_files(bases: BaseStore, directory: Path) -> None:
    base = bases.add(directory)
    bases.remove(base)
    assert bases.list_bases() == []
    assert (directory / "model.safetensors").exists()


def test_a_base_that_changes_while_it_is_read_is_refused(bases: BaseStore, directory: Path) -> None:
    def disturb(_: int) -> None:
        os.utime(directory / "model.safetensors", ns=(1, 1))

    with pytest.raises(InvalidPackageError, match=r"model\.safetensors changed while it was read"):
        bases.add(directory, progress=disturb)
    assert bases.list_bases() == []


def test_whoever_looks_at_the_folder_sees_every_change_of_a_record(
    bases: BaseStore, directory: Path
) -> None:
    def seen() -> int:
        return bases.folder.stat().st_mtime_ns

    base = bases.add(directory)
    marks = [seen()]
    bases.add(directory)
    marks.append(seen())
    bases.check(bases.find("my-base"))
    assert seen() == marks[-1]
    (directory / "config.json").touch()
    bases.check(bases.find("my-base"))
    marks.append(seen())
    bases.add_copy(directory)
    marks.append(seen())
    bases.remove(base)
    assert len({*marks, seen()}) == 5
