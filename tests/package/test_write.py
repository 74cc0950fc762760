"""Writing packages: whole or not at all, in little memory, and never other bytes than promised."""

import errno
import io
import stat
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from expertctl.errors import DigestError, InvalidPackageError, NotFoundError, UsageError
from expertctl.package.archive import compute_archive_size
from expertctl.package.frame import RATIO_FREE_BYTES
from expertctl.package.layout import Blobs, PackageLayout, build_layout
from expertctl.package.read import read_package
from expertctl.package.write import (
    open_atomic_file,
    write_archive,
    write_oci_archive,
    write_package,
)
from expertctl.reference import Digest, FileDigest
from tests.package.forged_packages import (
    Files,
    list_layout_members,
    make_archive,
    read_archive,
    read_packed_files,
)

CONTENT: Files = {"expert.json": b"{}", "a.safetensors": b"weights", "README.md": b""}


def layout_for(files: Files) -> PackageLayout:
    return build_layout([FileDigest(p, len(d), Digest.compute(d)) for p, d in files.items()], None)


def blobs_of(files: Files) -> Blobs:
    @contextmanager
    def blob(digest: Digest) -> Iterator[BinaryIO]:
        yield io.BytesIO(next(d for d in files.values() if Digest.compute(d) == digest))

    return blob


def test_the_archive_is_the_members_one_after_the_other() -> None:
    layout, stream = layout_for(CONTENT), io.BytesIO()
    write_archive(stream, layout, blobs_of(CONTENT))
    assert stream.getvalue() == make_archive(list_layout_members(layout, CONTENT))
    assert len(stream.getvalue()) == compute_archive_size(layout)


def test_the_export_is_the_content_of_the_frame(tmp_path: Path) -> None:
    layout = layout_for(CONTENT)
    write_package(tmp_path / "x.expert", layout, blobs_of(CONTENT))
    write_oci_archive(tmp_path / "x.tar", layout, blobs_of(CONTENT))
    assert read_archive(tmp_path / "x.expert") == (tmp_path / "x.tar").read_bytes()
    assert stat.S_IMODE((tmp_path / "x.expert").stat().st_mode) == 0o644


@pytest.mark.parametrize("other", [b"weighty", b"weight", b"weights!", b""])
def test_other_bytes_than_promised_are_refused(other: bytes, tmp_path: Path) -> None:
    promised = Digest.compute(CONTENT["a.safetensors"])

    @contextmanager
    def changed(digest: Digest) -> Iterator[BinaryIO]:
        with blobs_of(CONTENT)(digest) as stream:
            yield io.BytesIO(other) if digest == promised else stream

    with pytest.raises(DigestError, match="changed while it was packed"):
        write_package(tmp_path / "x.expert", layout_for(CONTENT), changed)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x.expert"
    path.write_bytes(b"old")

    @contextmanager
    def full(digest: Digest) -> Iterator[BinaryIO]:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield io.BytesIO()

    with pytest.raises(OSError, match="No space left"):
        write_package(path, layout_for(CONTENT), full)
    assert [p.name for p in tmp_path.iterdir()] == ["x.expert"]
    assert path.read_bytes() == b"old"


def test_a_file_is_replaced_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with open_atomic_file(path) as stream:
        stream.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_a_directory_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"), open_atomic_file(tmp_path):
        raise AssertionError
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="none"):
        write_oci_archive(tmp_path / "none" / "x.tar", layout_for(CONTENT), blobs_of(CONTENT))


def test_what_readers_would_take_for_a_bomb_is_not_written(tmp_path: Path) -> None:
    files = {**CONTENT, "a.safetensors": bytes(RATIO_FREE_BYTES)}
    with pytest.raises(InvalidPackageError, match="more than 50 times"):
        write_package(tmp_path / "x.expert", layout_for(files), blobs_of(files))
    assert list(tmp_path.iterdir()) == []


class Zeros(io.RawIOBase):
    """As many zero bytes as wanted, without having them."""

    def __init__(self, size: int) -> None:
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # as RawIOBase has it
        count = min(len(buffer), self._left)
        buffer[:count] = bytes(count)
        self._left -= count
        return count


def test_weights_are_never_held_in_memory(package: Path, tmp_path: Path) -> None:
    """A README of 32 MiB stands for weights: both are streamed in the same way."""
    size, digest = 32 << 20, Digest.compute(bytes(32 << 20))
    files = read_packed_files(read_archive(package))
    del files["model.sig"]
    layout = build_layout([*layout_for(files).files, FileDigest("README.md", size, digest)], None)

    @contextmanager
    def blob(wanted: Digest) -> Iterator[BinaryIO]:
        if wanted == digest:
            yield io.BufferedReader(Zeros(size))
            return
        with blobs_of(files)(wanted) as stream:
            yield stream

    tracemalloc.start()
    try:
        write_package(tmp_path / "x.expert", layout, blob)
        contents = read_package(tmp_path / "x.expert")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert contents.size > size
    assert "README.md" not in contents.small
    assert peak < 12 << 20
