"""What was read from a file is read again only once the file changed."""

import os
import time
from pathlib import Path

import pytest

from expertctl.store.disk import FileCachedValue


class CountingReader:
    """Reads a file and counts how often."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0

    def __call__(self) -> str:
        self.count += 1
        return self.path.read_text() if self.path.exists() else "absent"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_an_old_file_is_read_once(path: Path) -> None:
    path.write_text("one")
    age(path, 5)
    reader = CountingReader(path)
    kept = FileCachedValue(path, reader)
    assert [kept.get() for _ in range(3)] == ["one"] * 3
    assert reader.count == 1


def test_a_file_that_was_written_a_moment_ago_is_read_again(path: Path) -> None:
    path.write_text("one")
    age(path, 0)
    reader = CountingReader(path)
    kept = FileCachedValue(path, reader)
    assert kept.get() == "one"
    stamp = path.stat()
    path.write_text("two")  # as long as before, within one tick of the clock
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert kept.get() == "two"


@pytest.mark.parametrize("change", ["length", "time", "another file", "log"])
def test_a_change_is_seen(change: str, path: Path) -> None:
    path.write_text("one")
    age(path, 50)
    reader = CountingReader(path)
    kept = FileCachedValue(path, reader)
    assert kept.get() == "one"
    match change:
        case "length":
            path.write_text("longer")
            age(path, 50)
        case "time":
            path.write_text("two")
            age(path, 40)
        case "another file":
            other = path.with_name("other")
            other.write_text("two")
            age(other, 50)
            other.replace(path)
        case _:
            path.with_name("file-wal").write_text("x")
    kept.get()
    assert reader.count == 2


def test_an_absent_file_and_an_empty_log_are_nothing(path: Path) -> None:
    reader = CountingReader(path)
    kept = FileCachedValue(path, reader)
    assert [kept.get(), kept.get()] == ["absent", "absent"]
    path.with_name("file-wal").touch()
    assert kept.get() == "absent"
    assert reader.count == 1
    path.write_text("there")
    assert kept.get() == "there"
