"""Digests: the strict parser of ``sha256:<hex>``, and hashing in bounded memory."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from expertctl.errors import DigestError, UsageError

READ_CHUNK = 1 << 20
_HEX = re.compile(r"[0-9a-f]{64}")

Progress = Callable[[int], None]
"""Called with the number of bytes just handled."""


def ignore_progress(_: int) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """A sha256 digest; ``hex`` is 64 lower-case hex digits."""

    hex: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``sha256:<64 lower-case hex>`` and nothing else.

        Raises:
            DigestError: for any other text.
        """
        algorithm, _, value = text.partition(":")
        if algorithm != "sha256" or not _HEX.fullmatch(value):
            raise DigestError(f"{text[:80]!r} is not a digest of the form sha256:<64 hex digits>")
        return cls(value)

    @classmethod
    def parse_input(cls, text: str) -> Self:
        """Parse a digest that the user typed; a typing error is a usage error.

        Raises:
            UsageError: for any other text.
        """
        try:
            return cls.parse(text)
        except DigestError as error:
            hint = "`expertctl list --json` shows the digests of what is installed"
            raise UsageError(error.message, hint=hint) from error

    @classmethod
    def compute(cls, data: bytes | bytearray | memoryview) -> Self:
        """Hash bytes in memory."""
        return cls(hashlib.sha256(data).hexdigest())

    def __str__(self) -> str:
        """Return ``sha256:<hex>``."""
        return f"sha256:{self.hex}"


@dataclass(frozen=True, slots=True, order=True)
class FileDigest:
    """One file of a package: its path inside it, its size in bytes, its digest."""

    path: str
    size: int
    digest: Digest


def hash_stream(stream: BinaryIO, *, progress: Progress = ignore_progress) -> tuple[int, Digest]:
    """Return the size in bytes and the digest of the rest of ``stream``."""
    hasher, size = hashlib.sha256(), 0
    buffer = bytearray(READ_CHUNK)
    view = memoryview(buffer)
    while count := stream.readinto(buffer):  # type: ignore[attr-defined]  # raw and buffered files
        hasher.update(view[:count])
        size += count
        progress(count)
    return size, Digest(hasher.hexdigest())


def hash_file(path: Path, *, progress: Progress = ignore_progress) -> tuple[int, Digest]:
    """Return the size in bytes and the digest of a file."""
    with path.open("rb") as stream:
        return hash_stream(stream, progress=progress)
