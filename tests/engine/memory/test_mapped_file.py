"""Parts of a mapped file are lent while the system holds them, and are the bytes of the file."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertctl.engine.memory import host
from expertctl.engine.memory.host import MappedFile

SIZE = 5 * mmap.PAGESIZE + 100


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[int]:
    """A file of which nobody read a byte since it was written to the disk."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    yield handle
    os.close(handle)


@pytest.fixture
def mapped(handle: int) -> Iterator[MappedFile]:
    found = MappedFile.map_file(handle)
    if found is None:
        pytest.skip("a system that does not tell what it holds of a file")
    yield found
    found.close()


def test_bytes_lie_at_the_addresses_that_are_told(handle: int, mapped: MappedFile) -> None:
    content = os.pread(handle, SIZE, 0)
    for begin, size in [(0, SIZE), (4096, 5000), (SIZE - 1, 1)]:
        expected = content[begin : begin + size]
        assert ctypes.string_at(mapped.address_at(begin), size) == expected
        with mapped.view(begin, size) as part:
            assert part == expected
            assert part.readonly


def test_a_part_is_cached_when_all_its_pages_are(handle: int, mapped: MappedFile) -> None:
    if mapped.is_cached(0, SIZE):
        pytest.skip("a file system that holds all it has in memory")
    assert not mapped.is_cached(SIZE - 1, 1)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)  # no more than is asked for
    os.pread(handle, 1, 2 * mmap.PAGESIZE)
    assert mapped.is_cached(2 * mmap.PAGESIZE, mmap.PAGESIZE)
    assert mapped.is_cached(3 * mmap.PAGESIZE - 1, 1)
    assert not mapped.is_cached(2 * mmap.PAGESIZE, mmap.PAGESIZE + 1)
    assert not mapped.is_cached(2 * mmap.PAGESIZE - 1, 2)
    os.pread(handle, SIZE, 0)
    assert mapped.is_cached(0, SIZE)


def test_what_was_cut_off_is_not_cached(handle: int, mapped: MappedFile, tmp_path: Path) -> None:
    os.pread(handle, SIZE, 0)
    assert mapped.is_cached(4 * mmap.PAGESIZE, 100)
    os.truncate(tmp_path / "file", 2 * mmap.PAGESIZE)
    assert not mapped.is_cached(4 * mmap.PAGESIZE, 100)
    assert mapped.is_cached(0, 2 * mmap.PAGESIZE)


def test_it_stays_when_the_file_is_closed_and_unlinked(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    handle = os.open(path, os.O_RDONLY)
    found = MappedFile.map_file(handle)
    os.close(handle)
    path.unlink()
    if found is not None:
        assert ctypes.string_at(found.address_at(3), 4) == b"3456"
        found.close()


def test_where_the_system_tells_nothing_nothing_is_mapped(
    handle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_find_mincore", lambda: None)
    assert MappedFile.map_file(handle) is None
