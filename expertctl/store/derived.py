"""Data derived from a package, kept to save computing it again: never believed unchecked.

::

    store/derived/<content digest>/<key>    sha256 of digest, key and data, then the data

Losing a file costs time, nothing else: whatever is odd about one counts as absent, and one that
cannot be written is left unwritten, with a note. `gc` removes those of packages that are gone.
"""

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

from expertctl.digest import Digest
from expertctl.durable import make_folders, write_atomic

_SEAL_BYTES = 32


class Derived:
    """The owner of ``store/derived``."""

    def __init__(self, root: Path) -> None:
        """Keep files below ``root``, which is created when something is written."""
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
        return data if seal == _seal(package, key, data) else None

    def write(self, package: Digest, key: Digest, data: bytes) -> None:
        """Keep data for the next time, or note why that cannot be."""
        path = self.path(package, key)
        try:
            make_folders(path.parent, mode=0o700)
            write_atomic(path, _seal(package, key, data) + data, mode=0o600)
        except OSError as error:
            self._notes.append(
                f"{path} cannot be written ({error.strerror}): computed again next time"
            )

    def folders_without(self, packages: Collection[Digest]) -> list[Path]:
        """Return the folders of all other packages, sorted."""
        known = {package.hex for package in packages}
        folders = self.root.iterdir() if self.root.is_dir() else []
        return sorted(path for path in folders if path.is_dir() and path.name not in known)

    def take_notes(self) -> tuple[str, ...]:
        """Return what could not be written since the last call, for the user."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def path(self, package: Digest, key: Digest) -> Path:
        """Where the data of a package under a key is, if it is there."""
        return self.root / package.hex / key.hex


def folder_size(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    return sum(path.lstat().st_size for path in folder.glob("*"))


def _seal(package: Digest, key: Digest, data: bytes) -> bytes:
    hasher = hashlib.sha256(f"{package}\n{key}\n".encode())
    hasher.update(data)
    return hasher.digest()
