"""Atomic, durable file replacement."""

import os
import stat
from pathlib import Path

import pytest

from expertctl.durable import sync_folder, write_atomic


def test_a_new_file_has_the_content_and_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "trust.json"
    write_atomic(path, b"one", mode=0o600)
    assert path.read_bytes() == b"one"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_replacing_leaves_one_file_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_keeps_the_old_file_and_removes_the_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os if call == "fsync" else Path, call, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "absent" / "file", b"")


def test_syncing_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "absent")
