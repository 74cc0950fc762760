"""Atomic, durable file replacement."""

import errno
import os
import stat
from pathlib import Path

import pytest

from expertctl.files import (
    make_folders,
    open_staged_file,
    publish_file,
    remove_tree,
    sync_folder,
    write_atomic,
    write_to_path,
)


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


def test_what_a_person_names_is_followed_and_stays_what_it_is(tmp_path: Path) -> None:
    pipe, link, folder = tmp_path / "pipe", tmp_path / "link", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    link.symlink_to(folder / "there")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_to_path(pipe, b"through it")
        assert os.read(reader, 99) == b"through it"
    finally:
        os.close(reader)
    write_to_path(link, b"one", mode=0o600)
    write_to_path(link, b"two", mode=0o600)
    assert (folder / "there").read_bytes() == b"two"
    assert link.is_symlink()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert stat.S_IMODE(link.stat().st_mode) == 0o600
    with pytest.raises(IsADirectoryError):
        write_to_path(folder, b"no")
    log = tmp_path / "log"
    log.write_bytes(b"old\n")
    with log.open("ab") as stream:
        write_to_path(Path(f"/dev/fd/{stream.fileno()}"), b"new\n")
        stream.write(b"later\n")
    assert log.read_bytes() == b"old\nnew\nlater\n"
    assert [path.name for path in folder.iterdir()] == ["there"]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_failure_keeps_the_old_file_and_removes_the_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, bytes(data)[:3]))
    write_atomic(tmp_path / "file", b"0123456789")
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "absent" / "file", b"")


def test_syncing_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "absent")


def test_a_staged_file_holds_what_was_written_and_has_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "staged"
    path.write_bytes(b"something longer that was there before")
    with open_staged_file(path, mode=0o444) as write:
        write(memoryview(b"one "))
        write(memoryview(b"two"))
    assert path.read_bytes() == b"one two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_a_staged_file_is_not_sealed_when_its_writer_fails(tmp_path: Path) -> None:
    path = tmp_path / "staged"
    with pytest.raises(TypeError), open_staged_file(path, mode=0o444) as write:
        write(None)  # type: ignore[arg-type]  # whatever goes wrong in the body
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_publishing_replaces_and_leaves_no_source(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    publish_file(source, target)
    assert target.read_bytes() == b"new"
    assert not source.exists()


def test_publishing_onto_another_file_system_copies_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "other" / "target"
    target.parent.mkdir()
    source.write_bytes(os.urandom(3_000_000))
    source.chmod(0o444)
    content, replace = source.read_bytes(), os.replace

    def across(old: "os.PathLike[str]", new: "os.PathLike[str]") -> None:
        if Path(old).parent != Path(new).parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(old, new)

    monkeypatch.setattr(os, "replace", across)
    publish_file(source, target)
    assert target.read_bytes() == content
    assert stat.S_IMODE(target.stat().st_mode) == 0o444
    assert not source.exists()
    assert list(target.parent.iterdir()) == [target]


def test_publishing_reports_any_other_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        publish_file(tmp_path / "absent", tmp_path / "target")


def test_folders_are_made_with_all_above_them(tmp_path: Path) -> None:
    make_folders(tmp_path / "a" / "b" / "c", mode=0o700)
    make_folders(tmp_path / "a" / "b" / "c")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_removing_a_tree_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"kept")
    tree = tmp_path / "tree"
    (tree / "inner").mkdir(parents=True)
    (tree / "inner" / "file").write_bytes(b"gone")
    (tree / "link").symlink_to(outside)
    remove_tree(tree)
    remove_tree(tree)
    assert not tree.exists()
    assert (outside / "file").read_bytes() == b"kept"


def test_a_copy_that_fails_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "other" / "target"
    target.parent.mkdir()
    source.write_bytes(b"content")

    def across(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "replace", across)
    with pytest.raises(OSError, match="cross-device"):
        publish_file(source, target)
    assert source.read_bytes() == b"content"
    assert list(target.parent.iterdir()) == []


def test_removing_a_link_to_a_folder_leaves_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "precious").write_text("kept")
    link = tmp_path / "link"
    link.symlink_to(folder)
    remove_tree(link)
    assert not link.is_symlink()
    assert (folder / "precious").read_text() == "kept"


def test_what_is_put_into_a_tree_while_it_is_removed_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    late, remove = [folder / "late"], Path.rmdir

    def rmdir(path: Path) -> None:
        if late:
            late.pop().touch()
        remove(path)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    remove_tree(folder)
    assert not folder.exists()
