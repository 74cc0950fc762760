"""Atomic and durable file operations, also after a power failure; opening files of the user.

A file is written beside its place, flushed to the disk and then renamed; the folder is flushed
too, because a rename is durable only when its folder is. Every byte that the store writes goes
through here, by one call of ``os`` per step: the tests kill the process at each of them.
"""

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from expertctl.digest import READ_CHUNK
from expertctl.errors import InvalidPackageError, NotFoundError, StoreError

NO_SPACE_ERRORS = {errno.ENOSPC, errno.EDQUOT}
"""Error numbers for a full disk or an exhausted quota."""
_DESCRIPTOR_PATHS = ("/dev/std", "/dev/fd/", "/proc/self/fd/")
WriteBytes = Callable[[memoryview], None]


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by a file with this content and mode; the folder must exist."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        _write_and_close(handle, data, mode=mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_leftovers(path: Path) -> None:
    """Remove temporary files of processes killed in `write_atomic`; no other may write now."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        left.unlink(missing_ok=True)


def write_to_path(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write to a path of the user: links are followed, devices and pipes are written into.

    So are descriptors that are already open, such as ``/dev/stdout``.
    """
    is_open = path.absolute().as_posix().startswith(_DESCRIPTOR_PATHS)
    if is_open or (path.exists() and not path.is_file()):
        with path.open("ab") as stream:
            stream.write(data)
    else:
        write_atomic(path.resolve(), data, mode=mode)


def write_at(path: Path, data: bytes | memoryview, *, offset: int) -> None:
    """Truncate a file, or a new one, at an offset and write there; bytes before it are not touched.

    The data is durable at the end, but the truncated part is lost: another file, written later,
    must tell a reader how far it may read.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.ftruncate(handle, offset)
        os.lseek(handle, offset, os.SEEK_SET)
        _write_all(handle, memoryview(data))
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def open_staged_file(path: Path, *, mode: int = 0o644) -> Iterator[WriteBytes]:
    """Create or empty a file and yield its write function; it is durable at the end.

    The folder is not flushed: the file is meant to be published from there.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        yield lambda data: _write_all(handle, data)
        _set_mode_and_sync(handle, mode=mode)
    finally:
        os.close(handle)


def publish_file(source: Path, target: Path) -> None:
    """Move a flushed file to its place, replacing what is there.

    The caller flushes the folder of ``target`` after its last file. On another file system the
    file is copied, which also appears atomically.
    """
    try:
        source.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy_file(source, target)
        source.unlink()


def make_folders(folder: Path, *, mode: int = 0o755) -> None:
    """Create a folder and its missing parents, durably."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(mode=mode, exist_ok=True)
        sync_folder(new.parent)


def remove_tree(folder: Path) -> None:
    """Remove one of our folders with its contents; a missing folder is no error.

    Links are removed, never followed. Files that another process adds meanwhile are removed too.
    """
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            Path(entry.path).unlink(missing_ok=True)
    try:
        folder.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        remove_tree(folder)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable, where the system can (POSIX)."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy_file(source: Path, target: Path) -> None:
    mode = source.stat().st_mode & 0o777
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    temporary = Path(name)
    try:
        with source.open("rb") as stream:
            _write_and_close(handle, iter(lambda: stream.read(READ_CHUNK), b""), mode=mode)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_and_close(handle: int, data: bytes | Iterator[bytes], *, mode: int) -> None:
    try:
        for part in [data] if isinstance(data, bytes) else data:
            _write_all(handle, memoryview(part))
        _set_mode_and_sync(handle, mode=mode)
    finally:
        os.close(handle)


def _write_all(handle: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(handle, data[done:])


def _set_mode_and_sync(handle: int, *, mode: int) -> None:
    if os.name == "posix":
        os.fchmod(handle, mode)
    os.fsync(handle)


@contextmanager
def open_regular_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file, without blocking on a pipe or a device; unbuffered, for large reads.

    Raises:
        NotFoundError: when there is no such file.
        InvalidPackageError: when it is something else.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError as error:
        hint = f"there is nothing at {path.absolute()}"
        raise NotFoundError(f"{path}: no such file", hint=hint) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InvalidPackageError(str(path), ["not a regular file"], hint=_build_folder_hint(path))
    with os.fdopen(handle, "rb", buffering=0) as stream:
        yield stream


def _build_folder_hint(path: Path) -> str:
    if (path / "adapter_config.json").is_file():
        return f"that is a folder with an adapter: `expertctl build {path}` packs it"
    return ""


@contextmanager
def hold_lock(lock: Path, *, guarded: Path, seconds: float, mode: int = 0o600) -> Iterator[None]:
    """Hold a lock file while ``guarded`` is changed; the folder of the lock must exist.

    Raises:
        StoreError: when another process holds it for too long.
    """
    from filelock import FileLock, Timeout  # large, and commands that only read need no lock

    try:
        with FileLock(lock, timeout=seconds, mode=mode, thread_local=False):
            yield
    except Timeout as error:
        message = f"{guarded} is being changed by another process"
        raise StoreError(message, hint="try again when that has ended") from error
