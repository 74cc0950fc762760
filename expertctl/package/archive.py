"""The tar inside a package: USTAR headers as our writer makes them, and no others.

A member is a regular file named ``oci-layout``, ``index.json`` or ``blobs/sha256/<64 hex>``, mode
0644, of nobody, from 1970. Order: those two, the OCI manifests (one, but in a set), their config,
small files, weights; then two zero blocks. A reader makes the header that must come next and
compares it byte by byte.
"""

import re
from dataclasses import dataclass

from expertctl.digest import Digest
from expertctl.errors import InvalidPackageError
from expertctl.package.layout import CONFIG, MAX_FILE_BYTES, OCI_LAYOUT, Layout
from expertctl.package.set_layout import SetLayout

BLOCK = 512
END = bytes(2 * BLOCK)
LAYOUT_MEMBER = "oci-layout"
INDEX_MEMBER = "index.json"
_SIZE = slice(124, 136)
_SIZE_TEXT = re.compile(rb"[0-7]{11}\x00")

AnyLayout = Layout | SetLayout
"""What an archive holds: one package, or several."""


@dataclass(frozen=True, slots=True)
class Member:
    """One file in the tar: its name, its size and the digest that its bytes must have."""

    name: str
    size: int
    digest: Digest

    @property
    def header(self) -> bytes:
        """The 512 bytes before its content."""
        return header(self.name, self.size)

    @property
    def padding(self) -> int:
        """How many zero bytes follow its content."""
        return -self.size % BLOCK


def blob_name(digest: Digest) -> str:
    """Return the name of a blob in the tar."""
    return f"blobs/sha256/{digest.hex}"


def members(layout: AnyLayout) -> list[Member]:
    """Return every member in order: `documents`, then the blobs of files."""
    made = [Member(name, len(data), Digest.of(data)) for name, data in documents(layout).items()]
    return made + [Member(blob_name(digest), size, digest) for digest, size in layout.blobs]


def documents(layout: AnyLayout) -> dict[str, bytes]:
    """Return the generated members in order: all that come before the packed files."""
    manifests = {blob_name(Digest.of(data)): data for data in (*layout.manifests, CONFIG)}
    return {LAYOUT_MEMBER: OCI_LAYOUT, INDEX_MEMBER: layout.index, **manifests}


def archive_size(layout: AnyLayout) -> int:
    """Return how many bytes the tar has."""
    return sum(BLOCK + m.size + m.padding for m in members(layout)) + len(END)


def header(name: str, size: int) -> bytes:
    """Return the USTAR header of a regular file (POSIX.1-1988, IEEE Std 1003.1)."""
    assert len(name) <= 100, "names are ours"
    assert 0 <= size <= MAX_FILE_BYTES, "sizes were checked"
    block = bytearray(BLOCK)
    block[0 : len(name)] = name.encode("ascii")
    block[100:108] = b"0000644\0"
    block[108:116] = b"0000000\0"
    block[116:124] = b"0000000\0"
    block[_SIZE] = b"%011o\0" % size
    block[136:148] = b"00000000000\0"
    block[148:156] = b" " * 8
    block[156:157] = b"0"
    block[257:265] = b"ustar\x0000"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def declared_size(block: bytes, *, name: str, what: str) -> int:
    """Return the size in a header that must otherwise be the one of ``name``.

    Raises:
        InvalidPackageError: for any other header.
    """
    text = block[_SIZE]
    if not _SIZE_TEXT.fullmatch(text):
        raise refused(what, name)
    size = int(text[:-1], 8)
    if header(name, size) != block:
        raise refused(what, name)
    return size


def refused(what: str, name: str) -> InvalidPackageError:
    """Return the error for a member that is not the one that must come next."""
    return InvalidPackageError(what, [f"the archive does not continue with {name} as it must"])
