"""What an install writes before anything is published: one folder, held by its process."""

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from expertctl.digest import CHUNK, Digest
from expertctl.durable import staged_file

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
BLOB_MODE = 0o444
"""Nothing may change a verified blob in place."""


@dataclass(frozen=True, slots=True)
class Staging:
    """A `BlobSink` in a folder of its own; leaving `open` means that the bytes are on the disk."""

    folder: Path

    def open(
        self, digest: Digest, size: int
    ) -> AbstractContextManager[Callable[[memoryview], None]]:
        """Begin a blob."""
        del size
        return staged_file(self.path(digest), mode=BLOB_MODE)

    def blob(self, digest: Digest) -> AbstractContextManager[BinaryIO]:
        """Open a staged blob."""
        return self.path(digest).open("rb")

    def path(self, digest: Digest) -> Path:
        """Where a staged blob is."""
        return self.folder / digest.hex

    def adopt(self, digest: Digest, source: Path) -> None:
        """Stage a blob that exists elsewhere already; it stays there too."""
        self.path(digest).unlink(missing_ok=True)
        _link(source, self.path(digest))

    def part(self, name: str, digests: Iterable[Digest]) -> "Staging":
        """Return a staging inside this one with some of its blobs; several may share a blob."""
        part = Staging(self.folder / name)
        part.folder.mkdir(mode=0o700)
        for digest in digests:
            _link(self.path(digest), part.path(digest))
        return part

    @property
    def ref(self) -> Path:
        """Where a ref is written before it is published."""
        return self.folder / "ref"


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; copy it where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with source.open("rb") as stream, staged_file(target, mode=BLOB_MODE) as write:
            while chunk := stream.read(CHUNK):
                write(memoryview(chunk))
