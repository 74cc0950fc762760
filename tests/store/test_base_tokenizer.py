"""A base whose tokenizer was merely saved again is the same base, to packages of both versions."""

import json
import os
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from expertctl.errors import BaseMismatchError, ConflictError
from expertctl.package.compatibility import check_expert_base
from expertctl.package.read import read_package
from expertctl.reference import Digest
from expertctl.schema.manifest import Manifest
from expertctl.store.bases import BaseStore
from tests.factories import write_base
from tests.store.fixtures import HomeFixture, PackageFactory, fast, package_factory, user_home

__all__ = ["fast", "package_factory", "user_home"]

KEPT = "tokenizer-digest.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_base(tmp_path / "my-base", layers=1, hidden=16, heads=2, kv_heads=1)


@pytest.fixture
def bases(user_home: HomeFixture) -> BaseStore:
    return user_home.bases


def save_again(directory: Path) -> None:
    """Have the library save it while it cuts and pads, in other bytes."""
    path = directory / "tokenizer.json"
    before = path.read_bytes()
    tokenizer = Tokenizer.from_str(before.decode())
    tokenizer.enable_truncation(64)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path), pretty=False)
    assert path.read_bytes() != before


def retrain(directory: Path) -> None:
    path = directory / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    vocab = document["model"]["vocab"]
    vocab["!"], vocab["#"] = vocab["#"], vocab["!"]
    path.write_text(json.dumps(document), encoding="utf-8")


def forget_canonical(bases: BaseStore) -> Path:
    """Leave what releases before version 2 wrote."""
    (kept,) = bases.folder.glob(f"*/{KEPT}")
    kept.unlink()
    return kept


def test_a_base_that_an_earlier_release_added_gets_its_digest_at_first_use(
    bases: BaseStore, directory: Path
) -> None:
    added = bases.add(directory)
    record = bases.folder / "my-base" / "base.json"
    before = record.read_bytes()
    kept = forget_canonical(bases)
    (base,) = bases.list_bases()
    assert base.identity.canonical_tokenizer == added.identity.canonical_tokenizer is not None
    assert kept.is_file()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert record.read_bytes() == before
    shutil.rmtree(directory)  # it is not read again
    (base,) = bases.list_bases()
    assert base.identity.canonical_tokenizer == added.identity.canonical_tokenizer


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version":1}', '{"version":2,"file":"x"}'])
def test_a_kept_digest_that_is_damaged_is_computed_again(
    content: str, bases: BaseStore, directory: Path
) -> None:
    added = bases.add(directory)
    kept = bases.folder / "my-base" / KEPT
    kept.write_text(content)
    (base,) = bases.list_bases()
    assert base.identity.canonical_tokenizer == added.identity.canonical_tokenizer
    assert json.loads(kept.read_text())["file"] == str(added.identity.tokenizer)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_home_that_cannot_be_written_only_costs_time(bases: BaseStore, directory: Path) -> None:
    added = bases.add(directory)
    folder = forget_canonical(bases).parent
    folder.chmod(0o500)
    (base,) = bases.list_bases()
    assert base.identity.canonical_tokenizer == added.identity.canonical_tokenizer
    folder.chmod(0o700)


def test_of_a_file_that_changed_since_no_digest_is_told(bases: BaseStore, directory: Path) -> None:
    bases.add(directory)
    forget_canonical(bases)
    save_again(directory)
    (base,) = bases.list_bases()
    assert base.identity.canonical_tokenizer is None
    assert not (bases.folder / "my-base" / KEPT).exists()


def test_a_recorded_tokenizer_without_a_canonical_form_goes_on_by_its_file(
    bases: BaseStore, directory: Path
) -> None:
    added = bases.add(directory)
    forget_canonical(bases)
    record = bases.folder / "my-base" / "base.json"
    twice = b'{"a": 1, "a": 2}'
    (directory / "tokenizer.json").write_bytes(twice)
    document = json.loads(record.read_text())
    for file in document["files"]:
        if file["path"] == "tokenizer.json":
            file |= {"size": len(twice), "digest": str(Digest.compute(twice))}
    document["identity"]["tokenizer"] = str(Digest.compute(twice))
    record.write_text(json.dumps(document))
    (base,) = bases.list_bases()
    assert base.identity.canonical_tokenizer is None
    assert base.identity.tokenizer == Digest.compute(twice) != added.identity.tokenizer
    assert json.loads((bases.folder / "my-base" / KEPT).read_text())["canonical"] is None


@pytest.mark.parametrize("copied", [False, True])
def test_a_base_that_was_saved_again_is_added_as_the_base_it_is(
    copied: bool, bases: BaseStore, directory: Path
) -> None:
    first = bases.add_copy(directory) if copied else bases.add(directory)
    save_again(directory)
    again = bases.add(directory)
    assert again.identity == first.identity  # plans and packages of version 1 name it so
    assert bases.list_bases() == [again]
    bases.check(again)
    bases.check_integrity()


def test_a_base_with_another_tokenizer_is_another_base(bases: BaseStore, directory: Path) -> None:
    bases.add(directory)
    retrain(directory)
    with pytest.raises(ConflictError, match="another base is called my-base"):
        bases.add(directory)


def test_a_base_that_was_saved_again_in_place_says_how_to_go_on(
    bases: BaseStore, directory: Path
) -> None:
    base = bases.add(directory)
    save_again(directory)
    with pytest.raises(BaseMismatchError, match=r"tokenizer\.json") as caught:
        bases.check(base)
    assert "`expertctl base add DIR` is enough" in caught.value.hint


def test_the_digest_goes_with_its_base(bases: BaseStore, directory: Path) -> None:
    base = bases.add(directory)
    bases.remove(base)
    assert not (bases.folder / "my-base").exists()
    left = bases.folder / "my-base"
    left.mkdir()
    (left / KEPT).write_text("{}")  # as a process that was killed meanwhile leaves it
    assert bases.collect_garbage() == (left,)
    assert not left.exists()


@pytest.fixture
def manifest(package_factory: PackageFactory) -> Manifest:
    return read_package(package_factory.package()).manifest


def test_a_package_of_version_2_fits_the_base_that_was_saved_again(
    manifest: Manifest, bases: BaseStore, package_factory: PackageFactory, tmp_path: Path
) -> None:
    assert manifest.base.tokenizer_version == 2
    again = Path(shutil.copytree(package_factory.base_dir, tmp_path / "again"))
    save_again(again)
    assert check_expert_base(manifest, bases.add(again).identity) == []


def test_a_package_of_version_2_does_not_fit_another_tokenizer(
    manifest: Manifest, bases: BaseStore, package_factory: PackageFactory, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(package_factory.base_dir, tmp_path / "other"))
    retrain(other)
    with pytest.raises(BaseMismatchError, match="the tokenizer differs"):
        check_expert_base(manifest, bases.add(other).identity)
