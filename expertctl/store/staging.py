"""What an install writes before anything is published: one folder, held by its process."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from expertctl.digest import Digest
from expertctl.durable import staged_file

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

    def path(self, digest: Digest) -> Path:
        """Where a staged blob is."""
        return self.folder / digest.hex

    @property
    def ref(self) -> Path:
        """Where a ref is written before it is published."""
        return self.folder / "ref"
