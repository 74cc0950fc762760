"""Unpack and re-sign: contained, whole or not at all, and equal to what was packed."""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from expertctl.errors import (
    DigestError,
    ExpertError,
    InvalidPackageError,
    NotFoundError,
    UsageError,
)
from expertctl.package.layout import OCI_LAYOUT
from expertctl.package.read import read_package
from expertctl.package.write import sign_package, unpack_package
from expertctl.reference import hash_file
from expertctl.trust.bundle import read_bundle, verify_bundle
from expertctl.trust.keys import PrivateKey
from tests.package.forged_packages import (
    make_package_archive,
    read_archive,
    read_packed_files,
    write_frame,
)


@pytest.fixture
def own(package: Path, tmp_path: Path) -> Path:
    """A copy of the package that the test may change."""
    return Path(shutil.copy(package, tmp_path / "own.expert"))


@pytest.fixture
def damaged(package: Path, tmp_path: Path) -> Path:
    tar = bytearray(read_archive(package))
    tar[-1500] ^= 1
    return write_frame(bytes(tar), tmp_path / "damaged.expert")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_unpacked_files_are_those_of_the_package(package: Path, tmp_path: Path) -> None:
    contents = unpack_package(package, tmp_path / "out")
    assert names(tmp_path / "out") == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "expert.json",
        "model.sig",
    ]
    for file in contents.layout.layers:
        path = tmp_path / "out" / file.path
        assert hash_file(path) == (file.size, file.digest)
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755
    assert names(tmp_path) == ["out"]


def test_an_empty_directory_is_filled(package: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    unpack_package(package, tmp_path / "out")
    assert len(names(tmp_path / "out")) == 4


def fill(target: Path) -> None:
    target.mkdir()
    (target / "mine.txt").write_text("mine")


def write(target: Path) -> None:
    target.write_text("mine")


def link(target: Path) -> None:
    (target.parent / "real").mkdir()
    target.symlink_to(target.parent / "real")


@pytest.mark.parametrize("prepare", [fill, write, link])
def test_what_is_there_is_not_touched(
    prepare: Callable[[Path], None], package: Path, tmp_path: Path
) -> None:
    prepare(tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError):
        unpack_package(package, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_the_working_directory_is_not_replaced(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UsageError, match="is the working directory"):
        unpack_package(package, Path())


def test_a_parent_that_is_missing_is_named(package: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such directory"):
        unpack_package(package, tmp_path / "none" / "out")


def test_a_damaged_package_leaves_nothing(damaged: Path, tmp_path: Path, key: PrivateKey) -> None:
    before, data = names(tmp_path), damaged.read_bytes()
    for action in (
        lambda: unpack_package(damaged, tmp_path / "out"),
        lambda: sign_package(damaged, key),
    ):
        with pytest.raises((DigestError, InvalidPackageError)):
            action()
        assert names(tmp_path) == before
    assert damaged.read_bytes() == data


def test_equal_files_are_both_unpacked(package: Path, tmp_path: Path) -> None:
    files = {**read_packed_files(read_archive(package)), "README.md": b"same", "LICENSE": b"same"}
    path = write_frame(make_package_archive(files), tmp_path / "x.expert")
    unpack_package(path, tmp_path / "out")
    readme, licence = (tmp_path / "out" / name for name in ("README.md", "LICENSE"))
    readme.write_text("changed")
    assert licence.read_text() == "same"


def test_a_new_signature_keeps_the_content(own: Path) -> None:
    before, other = read_package(own), PrivateKey.generate()
    told = sign_package(own, other)
    after = read_package(own)
    assert told == after
    assert after.content_digest == before.content_digest
    assert after.package_digest != before.package_digest
    assert after.signature is not None
    bundle = read_bundle(after.signature)
    assert bundle.key_id == other.public.key_id
    verify_bundle(bundle, after.files, other.public)


def test_signing_an_unsigned_package_equals_building_it_signed(
    unsigned: Path, package: Path, key: PrivateKey, tmp_path: Path
) -> None:
    copy = Path(shutil.copy(unsigned, tmp_path / "x.expert"))
    sign_package(copy, key)
    assert read_archive(copy) == read_archive(package)


def test_a_file_may_hold_the_very_bytes_of_another_member(package: Path, tmp_path: Path) -> None:
    files = {**read_packed_files(read_archive(package)), "README.md": OCI_LAYOUT}
    path = write_frame(make_package_archive(files), tmp_path / "x.expert")
    unpack_package(path, tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_bytes() == OCI_LAYOUT


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_an_error(package: Path, tmp_path: Path) -> None:
    (tmp_path / "ro").mkdir(mode=0o555)
    with pytest.raises((OSError, ExpertError)):
        unpack_package(package, tmp_path / "ro" / "out")
