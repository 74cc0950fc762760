"""Links in a directory that is packed: those of the hub's cache are followed, no others."""

import os
from pathlib import Path

import pytest

from expertctl.errors import DigestError, InvalidPackageError, NotFoundError
from expertctl.package.base_model import BaseFacts
from expertctl.package.build import build_package, plan_build
from expertctl.package.directory import (
    CONFIG_PATH,
    WEIGHTS_PATH,
    find_cache_folder,
    find_cached_name,
    find_source_file,
    list_source_names,
)
from expertctl.package.draft import ManifestOverrides
from expertctl.package.read import read_package

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A ``models--…`` folder as huggingface_hub makes it, with one file of its snapshot."""
    folder = tmp_path / "hub" / "models--acme--sql-lora"
    (folder / "blobs").mkdir(parents=True)
    (folder / "snapshots" / REVISION).mkdir(parents=True)
    (folder / "blobs" / "aa").write_bytes(b"{}")
    return folder


def snapshot(cache: Path) -> Path:
    return cache / "snapshots" / REVISION


def link(cache: Path, target: str | Path, name: str = "x.json") -> Path:
    (snapshot(cache) / name).symlink_to(target)
    return snapshot(cache)


def refused(directory: Path, name: str = "x.json") -> str:
    with pytest.raises(InvalidPackageError) as caught:
        find_source_file(directory, name)
    return caught.value.message


def test_a_snapshot_of_the_hubs_cache_is_built(cache: Path, lora: Path, facts: BaseFacts) -> None:
    for number, name in enumerate((CONFIG_PATH, WEIGHTS_PATH)):
        (lora / name).rename(cache / "blobs" / f"b{number}")
        link(cache, f"../../blobs/b{number}", name)
    plan = plan_build(snapshot(cache), ManifestOverrides(), base=facts)
    assert plan.manifest.name == "local/sql-lora"
    contents = read_package(build_package(plan, cache.parent / "out.expert").path)
    assert [spec.tensors for spec in contents.adapters] == [28]


def test_the_folder_above_the_snapshots_names_them(
    cache: Path, lora: Path, facts: BaseFacts
) -> None:
    (lora / CONFIG_PATH).rename(cache / "blobs" / "b0")
    link(cache, "../../blobs/b0", CONFIG_PATH)
    with pytest.raises(NotFoundError) as caught:
        plan_build(cache, ManifestOverrides(), base=facts)
    assert caught.value.message.endswith(f"there are adapters below it: snapshots/{REVISION}")
    assert caught.value.hint.endswith(f"expertctl build {snapshot(cache)}")


@pytest.mark.parametrize("name", ["$(reboot)", "x\nhint: y", "a b", "--opt"])
def test_no_name_that_a_shell_would_read_gets_into_a_hint(
    name: str, tmp_path: Path, facts: BaseFacts
) -> None:
    (tmp_path / "snapshots" / name).mkdir(parents=True)
    (tmp_path / "snapshots" / name / CONFIG_PATH).write_text("{}")
    with pytest.raises(NotFoundError) as caught:
        plan_build(tmp_path, ManifestOverrides(), base=facts)
    assert name not in caught.value.message + caught.value.hint


def test_a_snapshot_that_huggingface_hub_made_is_followed(tmp_path: Path) -> None:
    from huggingface_hub import file_download

    folder = tmp_path / "models--acme--sql-lora"
    blob, pointer = folder / "blobs" / "aa", folder / "snapshots" / REVISION / "x.json"
    blob.parent.mkdir(parents=True)
    pointer.parent.mkdir(parents=True)
    blob.write_bytes(b"{}")
    file_download._create_symlink(str(blob), str(pointer))
    found = find_source_file(pointer.parent, "x.json")
    assert found is not None
    assert found.path == blob
    assert found.read(max_bytes=10) == b"{}"


def test_a_chain_of_links_inside_the_cache_is_followed(cache: Path) -> None:
    (cache / "blobs" / "bb").symlink_to("aa")
    found = find_source_file(link(cache, "../../blobs/bb"), "x.json")
    assert found is not None
    assert found.path == cache / "blobs" / "aa"


def test_a_snapshot_that_is_reached_through_a_link_is_the_snapshot(
    cache: Path, tmp_path: Path
) -> None:
    link(cache, "../../blobs/aa")
    (tmp_path / "mine").symlink_to(snapshot(cache))
    assert find_source_file(tmp_path / "mine", "x.json") is not None
    assert find_cached_name(tmp_path / "mine") == "sql-lora"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("../../../../secret", "leaves models--acme--sql-lora"),
        ("../../../models--other--lora/blobs/aa", "leaves models--acme--sql-lora"),
        ("../../blobs/../../../secret", "leaves models--acme--sql-lora"),
        ("../../blobs/out", "leaves models--acme--sql-lora"),
        ("../../blobs/there-and-back", "leaves models--acme--sql-lora"),
        ("../../blobs/folder/aa", "leaves models--acme--sql-lora"),
        ("../../blobs/none", "missing"),
        ("../../none/aa", "missing"),
        ("../../blobs/loop", "loop of symbolic links"),
        ("x.json", "loop of symbolic links"),
        ("../../blobs", "not a regular file"),
        ("../..", "a symbolic link to a folder"),
        ("../../blobs/pipe", "not a regular file"),
    ],
)
def test_a_link_that_leads_elsewhere_is_refused(
    target: str, message: str, cache: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for place in (tmp_path / "secret", outside / "aa"):
        place.write_text("secret")
    other = cache.parent / "models--other--lora" / "blobs"
    other.mkdir(parents=True)
    (other / "aa").write_text("another repository")
    blobs = cache / "blobs"
    (blobs / "out").symlink_to(tmp_path / "secret")
    (outside / "back").symlink_to(blobs / "aa")
    (blobs / "there-and-back").symlink_to(outside / "back")
    (blobs / "folder").symlink_to(outside)
    (blobs / "loop").symlink_to("loop")
    os.mkfifo(blobs / "pipe")
    assert message in refused(link(cache, target))


def test_an_absolute_link_is_followed_only_inside_the_cache(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    assert find_source_file(link(cache, cache / "blobs" / "aa"), "x.json") is not None
    assert "leaves" in refused(link(cache, tmp_path / "secret", "y.json"), "y.json")


def test_a_link_in_a_folder_that_only_looks_like_the_cache_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path / "models--a--b", tmp_path / "models--a--b" / "blobs" / "deep"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "real").write_text("x")
        (folder / "x.json").symlink_to("real")
        assert find_cache_folder(folder) is None
        assert "a symbolic link is not packed" in refused(folder)


def test_a_file_that_is_replaced_after_it_was_checked_is_not_read(
    cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    found = find_source_file(link(cache, "../../blobs/aa"), "x.json")
    assert found is not None
    (cache / "blobs" / "aa").unlink()
    (cache / "blobs" / "aa").symlink_to(tmp_path / "secret")
    with pytest.raises(DigestError, match="replaced"):
        found.open()
    (cache / "blobs" / "aa").unlink()
    with pytest.raises(DigestError, match="replaced"):
        found.open()
    os.link(tmp_path / "secret", cache / "blobs" / "aa")
    with pytest.raises(DigestError, match="replaced"):
        found.open()


def test_a_folder_of_the_cache_that_is_replaced_leads_nowhere_else(
    cache: Path, tmp_path: Path
) -> None:
    found = find_source_file(link(cache, "../../blobs/aa"), "x.json")
    assert found is not None
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "aa").write_text("secret")
    (cache / "blobs").rename(tmp_path / "moved")
    (cache / "blobs").symlink_to(outside)
    with pytest.raises(DigestError, match="replaced"):
        found.open()


def test_a_pipe_or_a_folder_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    (tmp_path / "y.json").mkdir()
    assert "not a regular file" in refused(tmp_path)
    assert "not a regular file" in refused(tmp_path, "y.json")
    assert find_source_file(tmp_path, "z.json") is None
    assert list_source_names(tmp_path) == ["x.json", "y.json"]
