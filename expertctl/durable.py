"""Files that are there whole or not at all, also after a power cut.

A file is written beside its place, flushed to the disk and then renamed; the folder is flushed
too, because a rename is durable only when its folder is. Every byte that the store writes goes
through here, by one call of ``os`` per step: the tests kill the process at each of them.
"""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from expertctl.digest import CHUNK

NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
"""What the system says where a disk or a quota is full."""
_DESCRIPTORS = ("/dev/std", "/dev/fd/", "/proc/self/fd/")
Write = Callable[[memoryview], None]


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by a file with this content and mode; the folder must exist."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        _fill(handle, data, mode=mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_named(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write where the user said: a link is followed, a device or a pipe is written into.

    So is what is open already, such as ``/dev/stdout``, wherever it leads.
    """
    is_open = path.absolute().as_posix().startswith(_DESCRIPTORS)
    if is_open or (path.exists() and not path.is_file()):
        with path.open("ab") as stream:
            stream.write(data)
    else:
        write_atomic(path.resolve(), data, mode=mode)


def append(path: Path, data: bytes | memoryview, *, at: int) -> None:
    """Cut a file, or a new one, at an offset and write there; what lies before is not touched.

    It is on the disk at the end, but what was cut off is gone: another file, written later, must
    tell a reader how far it may read.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.ftruncate(handle, at)
        os.lseek(handle, at, os.SEEK_SET)
        _write_all(handle, memoryview(data))
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def staged_file(path: Path, *, mode: int = 0o644) -> Iterator[Write]:
    """Create or empty a file and lend it for writing; it is on the disk at the end.

    The folder is not flushed: the file is meant to be published from there.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        yield lambda data: _write_all(handle, data)
        _seal(handle, mode=mode)
    finally:
        os.close(handle)


def publish(source: Path, target: Path) -> None:
    """Move a flushed file to its place, replacing what is there.

    The caller flushes the folder of ``target`` when its last file is there. A place on another
    file system gets a copy, which also appears atomically.
    """
    try:
        source.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy(source, target)
        source.unlink()


def make_folders(folder: Path, *, mode: int = 0o755) -> None:
    """Create a folder and those above it that are missing, durably."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(mode=mode, exist_ok=True)
        sync_folder(new.parent)


def remove_tree(folder: Path) -> None:
    """Remove a folder of ours and all that is in it; what is gone already is no error.

    Links are removed, never followed. What another process puts there meanwhile goes too.
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


def _copy(source: Path, target: Path) -> None:
    mode = source.stat().st_mode & 0o777
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    temporary = Path(name)
    try:
        with source.open("rb") as stream:
            _fill(handle, iter(lambda: stream.read(CHUNK), b""), mode=mode)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _fill(handle: int, data: bytes | Iterator[bytes], *, mode: int) -> None:
    try:
        for part in [data] if isinstance(data, bytes) else data:
            _write_all(handle, memoryview(part))
        _seal(handle, mode=mode)
    finally:
        os.close(handle)


def _write_all(handle: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(handle, data[done:])


def _seal(handle: int, *, mode: int) -> None:
    if os.name == "posix":
        os.fchmod(handle, mode)
    os.fsync(handle)
