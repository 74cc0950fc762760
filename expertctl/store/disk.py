"""Disk access: OS errors as errors of ours, cached reads, and data derived from packages.

`disk_errors` translates an OSError into the error tree. `FileCachedValue` caches a value that was
read from an SQLite file until the file changes; a check costs two calls of ``stat``.

`DerivedData` owns data computed from packages, kept to save computing it again and never trusted
unchecked::

    store/derived/<content digest>/<key>    sha256 of digest, key and data, then the data

Losing a derived file only costs time: a file with any fault counts as absent, and one that cannot
be written is skipped with a note. `gc` removes those of packages that are gone.
"""

import errno
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from expertctl.errors import DiskFullError, ExpertError, StoreError
from expertctl.files import NO_SPACE_ERRORS, make_folders, write_atomic
from expertctl.reference import Digest

READ_ONLY_ERRORS = {errno.EROFS, errno.EACCES, errno.EPERM}
_FULL_ERRORS = NO_SPACE_ERRORS | {errno.EFBIG}


@contextmanager
def disk_errors(what: object) -> Iterator[None]:
    """Turn an OSError of the body into an error that names the file, or else ``what``.

    Raises:
        DiskFullError: when there is no space, no quota or no room in one file.
        StoreError: when the place cannot be written, or for any other reason.
    """
    try:
        yield
    except OSError as error:
        raise _translate_error(error, str(error.filename or what)) from error


def _translate_error(error: OSError, what: str) -> ExpertError:
    if error.errno in _FULL_ERRORS:
        hint = "free some space (`expertctl gc` removes what nothing needs), then repeat"
        return DiskFullError(f"{what}: {error.strerror}", hint=hint)
    if error.errno in READ_ONLY_ERRORS:
        hint = "this user may not write there; set EXPERT_HOME to a folder of your own"
        return StoreError(f"{what} is read-only: {error.strerror}", hint=hint)
    return StoreError(f"{what}: {error.strerror or error}")


T = TypeVar("T")
StatFingerprint = tuple[int, int, int]
"""Inode, size and modification time in nanoseconds."""
_FilePair = tuple[StatFingerprint | None, StatFingerprint | None]
"""The fingerprints of the file and of its log."""

_TICK_NS, _COARSE_TICK_NS = 100_000_000, 2_000_000_000
"""More than one step of a file system's time stamps; the second, where they are whole seconds."""
_SECOND_NS = 1_000_000_000


class FileCachedValue(Generic[T]):
    """Caches the last result of one query of an SQLite file.

    The result is not cached while the file is so young that another write could get the same stamp.
    """

    def __init__(self, path: Path, read: Callable[[], T]) -> None:
        """Store the file and the query; nothing is read yet."""
        self._paths, self._read = (str(path), f"{path}-wal"), read
        self._kept: tuple[_FilePair, T] | None = None

    def get(self) -> T:
        """Return the current value."""
        mark = stat_fingerprint(self._paths[0]), stat_fingerprint(self._paths[1])
        kept = self._kept  # once: another thread may replace it
        if kept is not None and kept[0] == mark:
            return kept[1]
        value = self._read()
        self._kept = (mark, value) if _is_stable(mark) else None
        return value


def stat_fingerprint(path: str) -> StatFingerprint | None:
    """Return the fingerprint of a file; None if missing or empty (readers make empty logs)."""
    try:
        found = os.stat(path)  # noqa: PTH116  # called for each prompt: a `Path` takes twice as long
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if found.st_size else None


def _is_stable(mark: _FilePair) -> bool:
    newest = max((stamp[2] for stamp in mark if stamp), default=0)
    tick = _TICK_NS if newest % _SECOND_NS else _COARSE_TICK_NS
    return abs(time.time_ns() - newest) > tick


_SEAL_BYTES = 32


class DerivedData:
    """The owner of ``store/derived``."""

    def __init__(self, root: Path) -> None:
        """Keep files below ``root``, which is created by the first write."""
        self.root = root
        self._notes: list[str] = []

    def read(self, package: Digest, key: Digest, *, size: int) -> bytes | None:
        """Return data of exactly that size that was written here; None when there is none."""
        try:
            with self.path(package, key).open("rb") as stream:
                if os.fstat(stream.fileno()).st_size != _SEAL_BYTES + size:
                    return None
                seal, data = stream.read(_SEAL_BYTES), stream.read(size)
        except OSError:
            return None  # missing or unreadable: it is computed again
        return data if seal == _compute_seal(package, key, data) else None

    def write(self, package: Digest, key: Digest, data: bytes) -> None:
        """Store data for later, or note why that is impossible."""
        path = self.path(package, key)
        try:
            make_folders(path.parent, mode=0o700)
            write_atomic(path, _compute_seal(package, key, data) + data, mode=0o600)
        except OSError as error:
            self._notes.append(
                f"{path} cannot be written ({error.strerror}): computed again next time"
            )

    def list_other_folders(self, packages: Collection[Digest]) -> list[Path]:
        """Return the folders of all other packages, sorted."""
        known = {package.hex for package in packages}
        folders = self.root.iterdir() if self.root.is_dir() else []
        return sorted(path for path in folders if path.is_dir() and path.name not in known)

    def take_notes(self) -> tuple[str, ...]:
        """Return the write failures since the last call, as messages for the user."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def path(self, package: Digest, key: Digest) -> Path:
        """Return the path for the data of a package under a key."""
        return self.root / package.hex / key.hex


def measure_folder(folder: Path) -> int:
    """Return the total size of the files in a folder, in bytes."""
    return sum(path.lstat().st_size for path in folder.glob("*"))


def _compute_seal(package: Digest, key: Digest, data: bytes) -> bytes:
    hasher = hashlib.sha256(f"{package}\n{key}\n".encode())
    hasher.update(data)
    return hasher.digest()
