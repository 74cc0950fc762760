"""Digests of blobs and manifests: sha256 as everywhere, and sha512, which OCI also registers.

Where blobs lie: one file each, named by its digest, written once and never changed.

::

    FOLDER/<algorithm>/<first two hex digits>/<hex>

This is all that the rest of the server knows about blobs, so that another kind of storage needs
these few methods and nothing else. A file is put there (`adopt`) and taken away (`remove`) only
while the database's write lock is held: so a blob that is garbage and a blob that just came again
are never mistaken for each other. A file without a row is garbage; a row without a file is damage.
"""

import errno
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, Self

from expertctl.digest import Digest
from expertctl.errors import DigestError, DiskFullError, NotFoundError, StoreError
from expertctl.files import make_folders, sync_folder

DIGEST_LENGTHS = {"sha256": 64, "sha512": 128}
"""Length of the hex digits of each algorithm."""

_HEX = re.compile(r"[0-9a-f]+")


class Hasher(Protocol):
    """What `hashlib` gives for either algorithm."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Take more bytes in."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""


@dataclass(frozen=True, slots=True, order=True)
class BlobDigest:
    """``algorithm:hex``; only `parse` and `of` make one, so it is safe in a file name."""

    algorithm: str
    hex: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a digest of a known algorithm in its one form, lower-case hex.

        Raises:
            DigestError: for any other text.
        """
        algorithm, _, value = text.partition(":")
        if DIGEST_LENGTHS.get(algorithm) != len(value) or not _HEX.fullmatch(value):
            raise DigestError(f"{text[:160]!r} is not a sha256 or sha512 digest")
        return cls(algorithm, value)

    @classmethod
    def compute(cls, data: bytes, *, algorithm: str = "sha256") -> Self:
        """Hash bytes that are in memory."""
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
    """One file of the storage, as a listing finds it."""

    digest: BlobDigest
    size: int
    modified: float
    """When it was put there, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class BlobStorage:
    """Blobs in a folder; whole and on the disk, or not there."""

    folder: Path

    def path(self, digest: AnyDigest) -> Path:
        """Return where a blob lies, or would."""
        algorithm, _, value = str(digest).partition(":")
        return self.folder / algorithm / value[:2] / value

    @contextmanager
    def open(self, digest: AnyDigest) -> Iterator[BinaryIO]:
        """Lend the bytes of a blob, unbuffered.

        Raises:
            NotFoundError: when there is no such blob.
            StoreError: when the disk fails.
        """
        with wrap_disk_errors(), self._open_file(digest) as stream:
            yield stream

    def size(self, digest: AnyDigest) -> int | None:
        """Return the size of a blob in bytes, None when there is none."""
        with wrap_disk_errors():
            try:
                return self.path(digest).stat().st_size
            except FileNotFoundError:
                return None

    def adopt(self, temporary: Path, digest: AnyDigest) -> None:
        """Take in a file of this file system that is flushed and has this digest.

        Raises:
            DiskFullError: when there is no room.
            StoreError: when the disk fails, or the whole storage is gone.
        """
        target = self.path(digest)
        with wrap_disk_errors():
            self.folder.stat()  # a new one in its place would hide the blobs that come back
            make_folders(target.parent)
            temporary.replace(target)
            sync_folder(target.parent)

    def remove(self, digest: AnyDigest) -> None:
        """Remove a blob; one that is not there is no error."""
        with wrap_disk_errors():
            self.path(digest).unlink(missing_ok=True)

    def list_blobs(self) -> Iterator[StoredBlob]:
        """List every blob that lies there; what is not one of ours is passed over."""
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
    """Turn what the disk refuses into errors that say whether it is full.

    Raises:
        DiskFullError: when there is no room.
        StoreError: for anything else that the system says.
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
