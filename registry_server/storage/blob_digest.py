"""Digests of blobs and manifests: sha256 as everywhere, and sha512, which OCI also registers."""

import hashlib
import re
from dataclasses import dataclass
from typing import Protocol, Self

from expertctl.errors import DigestError

ALGORITHMS = {"sha256": 64, "sha512": 128}
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
        if ALGORITHMS.get(algorithm) != len(value) or not _HEX.fullmatch(value):
            raise DigestError(f"{text[:160]!r} is not a sha256 or sha512 digest")
        return cls(algorithm, value)

    @classmethod
    def of(cls, data: bytes, *, algorithm: str = "sha256") -> Self:
        """Hash bytes that are in memory."""
        hasher = new_hasher(algorithm)
        hasher.update(data)
        return cls(algorithm, hasher.hexdigest())

    def __str__(self) -> str:
        """Return ``algorithm:hex``."""
        return f"{self.algorithm}:{self.hex}"


def new_hasher(algorithm: str) -> Hasher:
    """Start hashing with a known algorithm."""
    assert algorithm in ALGORITHMS
    return hashlib.new(algorithm, usedforsecurity=True)
