"""Blob storage: one file per blob, named by its digest, written once and never changed.

Digests are sha256, or sha512, which OCI registers as well.

::

    FOLDER/<algorithm>/<first two hex digits>/<hex>

The rest of the server accesses blobs only through these methods. Files are added (`adopt`) and
removed (`remove`) only under the write lock of the database, so garbage collection cannot remove a
blob that was just uploaded again. A file without a row is garbage; a row without a file is damage.
"""

import errno
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, Self

from expertctl.errors import DigestError, DiskFullError, NotFoundError, StoreError
from expertctl.files import make_folders, sync_folder
from expertctl.reference import Digest

DIGEST_LENGTHS = {"sha256": 64, "sha512": 128}
"""Algorithm → number of hex digits."""

_HEX = re.compile(r"[0-9a-f]+")


class Hasher(Protocol):
    """The interface of `hashlib` hash objects."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Hash more bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""


@dataclass(frozen=True, slots=True, order=True)
class BlobDigest:
    """``algorithm:hex``; created only by `parse` and `compute`, so it is safe in a file name."""

    algorithm: str
    hex: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a digest of a known algorithm, in lower-case hex.

        Raises:
            DigestError: for any other text.
        """
        algorithm, _, value = text.partition(":")
        if DIGEST_LENGTHS.get(algorithm) != len(value) or not _HEX.fullmatch(value):
            raise DigestError(f"{text[:160]!r} is not a sha256 or sha512 digest")
        return cls(algorithm, value)

    @classmethod
    def compute(cls, data: bytes, *, algorithm: str = "sha256") -> Self:
        """Return the digest of bytes in memory."""
        hasher = create_hasher(algorithm)
        hasher.update(data)
        return cls(algorithm, hasher.hexdigest())

    def __str__(self) -> str:
        """Return ``algorithm:hex``."""
        return f"{self.algorithm}:{self.hex}"


def create_hasher(algorithm: str) -> Hasher:
    """Start hashing with a known algorithm."""
    assert algorithm in DIGEST_LENGTHS
    return hashlib.new(algorithm, usedforsecurity=True)


AnyDigest = BlobDigest | Digest
_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A file of the storage, as listed."""

    digest: BlobDigest
    size: int
    modified: float
    """When it was added, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class BlobStorage:
    """Stores blobs in a folder; each is complete and durable, or absent."""

    folder: Path

    def path(self, digest: AnyDigest) -> Path:
        """Return the path of a blob, whether it exists or not."""
        algorithm, _, value = str(digest).partition(":")
        return self.folder / algorithm / value[:2] / value

    @contextmanager
    def open(self, digest: AnyDigest) -> Iterator[BinaryIO]:
        """Open a blob for reading, unbuffered.

        Raises:
            NotFoundError: when there is no such blob.
            StoreError: when the disk fails.
        """
        with wrap_disk_errors(), self._open_file(digest) as stream:
            yield stream

    def size(self, digest: AnyDigest) -> int | None:
        """Return the size of a blob in bytes; None if it does not exist."""
        with wrap_disk_errors():
            try:
                return self.path(digest).stat().st_size
            except FileNotFoundError:
                return None

    def adopt(self, temporary: Path, digest: AnyDigest) -> None:
        """Move a file with this digest into the storage: flushed, and on the same file system.

        Raises:
            DiskFullError: when there is no room.
            StoreError: when the disk fails, or the folder of the storage is missing.
        """
        target = self.path(digest)
        with wrap_disk_errors():
            self.folder.stat()  # a new folder would hide the blobs when the disk is back
            make_folders(target.parent)
            temporary.replace(target)
            sync_folder(target.parent)

    def remove(self, digest: AnyDigest) -> None:
        """Remove a blob, if it exists."""
        with wrap_disk_errors():
            self.path(digest).unlink(missing_ok=True)

    def list_blobs(self) -> Iterator[StoredBlob]:
        """List all blobs; ignore other files."""
        with wrap_disk_errors():
            for file in sorted(self.folder.glob("*/??/*")):
                if (digest := _parse_blob_path(file)) and self.path(digest) == file:
                    with suppress(FileNotFoundError):  # removed since it was listed
                        entry = file.stat()
                        yield StoredBlob(digest, entry.st_size, entry.st_mtime)

    def _open_file(self, digest: AnyDigest) -> BinaryIO:
        try:
            return self.path(digest).open("rb", buffering=0)
        except FileNotFoundError as error:
            raise NotFoundError(f"blob {digest} is not in the storage") from error


@contextmanager
def wrap_disk_errors() -> Iterator[None]:
    """Convert errors of the file system; a full disk has its own.

    Raises:
        DiskFullError: when there is no room.
        StoreError: for any other error.
    """
    try:
        yield
    except OSError as error:
        fact = error.strerror or str(error)
        if error.errno in _DISK_FULL_ERRNOS:
            raise DiskFullError(f"the registry's disk is full: {fact}") from error
        raise StoreError(f"the registry's disk fails: {fact}", hint="try again later") from error


def _parse_blob_path(file: Path) -> BlobDigest | None:
    try:
        return BlobDigest.parse(f"{file.parent.parent.name}:{file.name}")
    except DigestError:
        return None
