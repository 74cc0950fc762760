"""Threads that hash: what they begin with is let go of when nobody waits for it."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event

import pytest

from expertctl.package.base_model import open_hashing_threads
from expertctl.reference import READ_CHUNK, Digest, hash_file

LARGE = 1 << 33


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of many chunks, all of it a hole."""
    path = tmp_path / "large"
    with path.open("wb") as stream:
        stream.truncate(LARGE)
    return path


def interrupted(path: Path, waiting: "list[Future[tuple[int, Digest]]]") -> Iterator[int]:
    """Hash a file nine times and be interrupted at the first chunk; yield each chunk's size."""
    begun, chunks = Event(), list[int]()

    def count(size: int) -> None:
        chunks.append(size)
        begun.set()
        go_on(size)

    try:
        with open_hashing_threads() as (pool, go_on):
            waiting += [pool.submit(hash_file, path, progress=count) for _ in range(9)]
            begun.wait()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        yield from chunks


def test_whoever_is_interrupted_does_not_wait_for_what_was_begun(large: Path) -> None:
    waiting = list["Future[tuple[int, Digest]]"]()
    assert 0 < sum(interrupted(large, waiting)) < LARGE
    assert all(task.done() for task in waiting)
    assert waiting[-1].cancelled()


def test_what_is_waited_for_is_hashed_whole(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"abc" * READ_CHUNK)
    with open_hashing_threads() as (pool, go_on):
        task = pool.submit(hash_file, path, progress=go_on)
    assert task.result() == hash_file(path)
