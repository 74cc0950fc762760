"""The tar inside a package: USTAR headers exactly as our writer makes them, read in one pass.

A member is a regular file named ``oci-layout``, ``index.json`` or ``blobs/sha256/<64 hex>``, with
mode 0644, owner 0 and time 0. The order is: those two, the OCI manifests (one, but several in a
set), their config, small files, weights; then two zero blocks.

The expected archive is derived from the index and the OCI manifests, which are themselves derived
from the files they name, and every byte is compared or hashed. The amount of file content kept in
memory is bounded; all bytes go to a sink.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from expertctl.errors import DigestError, InvalidPackageError
from expertctl.package.layout import (
    CONFIG,
    MAX_FILE_BYTES,
    MAX_INDEX_BYTES,
    MAX_MANIFEST_BYTES,
    OCI_LAYOUT,
    WEIGHT_TYPE,
    Descriptor,
    PackageLayout,
    SetLayout,
    build_set_layout,
    choose_media_type,
    parse_oci_index,
    parse_oci_manifest,
    parse_set_index,
)
from expertctl.package.tensor_file import ADAPTER_LIMITS, LENGTH_BYTES
from expertctl.reference import READ_CHUNK, Digest, FileDigest, Progress, ignore_progress
from expertctl.schema.manifest import SIGNATURE_PATH

BLOCK_SIZE = 512
END_OF_ARCHIVE = bytes(2 * BLOCK_SIZE)
LAYOUT_MEMBER = "oci-layout"
INDEX_MEMBER = "index.json"
_SIZE = slice(124, 136)
_SIZE_TEXT = re.compile(rb"[0-7]{11}\x00")

AnyLayout = PackageLayout | SetLayout
"""The layout of an archive: one package, or a set."""


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """One file in the tar: its name, size and expected digest."""

    name: str
    size: int
    digest: Digest

    @property
    def header(self) -> bytes:
        """The 512 bytes before its content."""
        return build_header(self.name, self.size)

    @property
    def padding(self) -> int:
        """The number of zero bytes after its content."""
        return -self.size % BLOCK_SIZE


def build_blob_name(digest: Digest) -> str:
    """Return the name of a blob in the tar."""
    return f"blobs/sha256/{digest.hex}"


def list_members(layout: AnyLayout) -> list[ArchiveMember]:
    """Return every member in order: `list_documents`, then the blobs of files."""
    generated = [
        ArchiveMember(name, len(data), Digest.compute(data))
        for name, data in list_documents(layout).items()
    ]
    return generated + [
        ArchiveMember(build_blob_name(digest), size, digest) for digest, size in layout.blobs
    ]


def list_documents(layout: AnyLayout) -> dict[str, bytes]:
    """Return the generated members in order: all that precede the packed files."""
    manifests = {
        build_blob_name(Digest.compute(data)): data for data in (*layout.manifests, CONFIG)
    }
    return {LAYOUT_MEMBER: OCI_LAYOUT, INDEX_MEMBER: layout.index, **manifests}


def compute_archive_size(layout: AnyLayout) -> int:
    """Return the size of the tar in bytes."""
    return sum(BLOCK_SIZE + m.size + m.padding for m in list_members(layout)) + len(END_OF_ARCHIVE)


def build_header(name: str, size: int) -> bytes:
    """Return the USTAR header of a regular file (POSIX.1-1988, IEEE Std 1003.1)."""
    assert len(name) <= 100, "names are ours"
    assert 0 <= size <= MAX_FILE_BYTES, "sizes were checked"
    block = bytearray(BLOCK_SIZE)
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


def parse_declared_size(block: bytes, *, name: str, what: str) -> int:
    """Return the size in a header that must otherwise equal that of ``name``.

    Raises:
        InvalidPackageError: for any other header.
    """
    text = block[_SIZE]
    if not _SIZE_TEXT.fullmatch(text):
        raise unexpected_member_error(what, name)
    size = int(text[:-1], 8)
    if build_header(name, size) != block:
        raise unexpected_member_error(what, name)
    return size


def unexpected_member_error(what: str, name: str) -> InvalidPackageError:
    """Return the error for an unexpected member."""
    return InvalidPackageError(what, [f"the archive does not continue with {name} as expected"])


MAX_SMALL_BYTES = 1 << 20
MAX_SIGNATURE_BYTES = 1 << 20
MAX_KEPT_BYTES = 320 << 20
"""The largest number of bytes to keep of all files: enough for any package, tight for a set.

Bytes shared by several files count for each of them, as they are parsed for each."""
DAMAGED_HINT = "it is damaged or was altered; get it again"
_HEADER_BYTES = ADAPTER_LIMITS.header_bytes + LENGTH_BYTES


class ArchiveContent(Protocol):
    """The bytes of an archive as a stream, decompressed or plain."""

    def read_exact(self, size: int) -> bytes:
        """Return the next ``size`` bytes; raise InvalidPackageError if there are fewer."""
        ...

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Yield the next ``size`` bytes in chunks, each valid until the next one is taken."""
        ...

    def at_end(self) -> bool:
        """Tell whether nothing follows."""
        ...


class PlainArchiveContent:
    """The bytes of an uncompressed archive."""

    def __init__(self, stream: BinaryIO, what: str) -> None:
        """Read from the current position of ``stream``."""
        self._stream = stream
        self._what = what

    def read_exact(self, size: int) -> bytes:
        """Return the next ``size`` bytes; raises as `chunks`."""
        return b"".join(bytes(chunk) for chunk in self.chunks(size))

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Yield the next ``size`` bytes in chunks.

        Raises:
            InvalidPackageError: when there are fewer.
        """
        while size:
            data = self._stream.read(min(READ_CHUNK, size))
            if not data:
                raise InvalidPackageError(self._what, ["the archive is cut short"])
            size -= len(data)
            yield memoryview(data)

    def at_end(self) -> bool:
        """Tell whether nothing follows."""
        return not self._stream.read(1)


class BlobSink(Protocol):
    """Receives the bytes of every layer, including `model.sig`, while they are hashed.

    Leaving the context without an exception means that the digest matched; a blob must not be
    published before.
    """

    def open(
        self, digest: Digest, size: int
    ) -> AbstractContextManager[Callable[[memoryview], object]]:
        """Return a context that gives a function to write the chunks of one blob."""
        ...


class DiscardSink:
    """A sink that discards everything."""

    @contextmanager
    def open(self, digest: Digest, size: int) -> Iterator[Callable[[memoryview], object]]:
        """Discard a blob."""
        del digest, size
        yield len


DISCARD = DiscardSink()


class ArchiveReader:
    """Reads one archive of known size in one pass."""

    def __init__(
        self,
        content: ArchiveContent,
        *,
        size: int,
        what: str,
        sink: BlobSink = DISCARD,
        progress: Progress = ignore_progress,
    ) -> None:
        """Start at the first byte of ``content``."""
        self._content = content
        self._size = size
        self._what = what
        self._sink = sink
        self._progress = progress
        self.starts: dict[Digest, bytes] = {}
        """The beginning of every blob, as far as it is needed later."""
        self._kept = 0

    def read_package(self) -> PackageLayout:
        """Read the archive of one package to its end."""
        self._read_version()
        descriptor = parse_oci_index(
            self._read_document(INDEX_MEMBER, MAX_MANIFEST_BYTES), what=self._what
        )
        layout = self._read_manifest(descriptor)
        self._read_files(layout)
        return layout

    def read_set(self) -> SetLayout:
        """Read the archive of a set to its end."""
        self._read_version()
        named = parse_set_index(self._read_document(INDEX_MEMBER, MAX_INDEX_BYTES), what=self._what)
        layout = build_set_layout({n: self._read_manifest(d) for n, d in named.items()})
        self._read_files(layout)
        return layout

    def _read_version(self) -> None:
        if self._read_document(LAYOUT_MEMBER, len(OCI_LAYOUT)) != OCI_LAYOUT:
            raise unexpected_member_error(self._what, LAYOUT_MEMBER)

    def _read_manifest(self, descriptor: Descriptor) -> PackageLayout:
        data = self._read_document(build_blob_name(descriptor.digest), MAX_MANIFEST_BYTES)
        if len(data) != descriptor.size:
            raise InvalidPackageError(
                self._what, ["index.json states another size for the manifest"]
            )
        if Digest.compute(data) != descriptor.digest:
            raise DigestError(f"{self._what}: the OCI manifest does not have its digest")
        return parse_oci_manifest(data, what=self._what)

    def _read_files(self, layout: AnyLayout) -> None:
        """Read everything after the manifests: their config, every blob, the end."""
        config = build_blob_name(Digest.compute(CONFIG))
        if self._read_document(config, len(CONFIG)) != CONFIG:
            raise unexpected_member_error(self._what, config)
        if compute_archive_size(layout) != self._size:
            expected = compute_archive_size(layout)
            raise InvalidPackageError(
                self._what, [f"an archive of {self._size} bytes; its manifest makes {expected}"]
            )
        sharing: dict[Digest, list[FileDigest]] = {}
        for file in layout.layers:
            sharing.setdefault(file.digest, []).append(file)
        for member in list_members(layout)[len(list_documents(layout)) :]:
            self._expect_header(member)
            files = sharing[member.digest]
            self._keep_prefix(
                member.digest, self._read_blob(member, _BlobPrefix(files)), times=len(files)
            )
        if (
            self._content.read_exact(len(END_OF_ARCHIVE)) != END_OF_ARCHIVE
            or not self._content.at_end()
        ):
            raise InvalidPackageError(self._what, ["there is data after the last file"])

    def _keep_prefix(self, digest: Digest, start: bytes, *, times: int) -> None:
        self.starts[digest] = start
        self._kept += len(start) * times
        if self._kept > MAX_KEPT_BYTES:
            raise InvalidPackageError(
                self._what, [f"small files and headers of more than {MAX_KEPT_BYTES} bytes"]
            )

    def _read_document(self, name: str, limit: int) -> bytes:
        """Read a member with a known name and an unknown size."""
        size = parse_declared_size(self._content.read_exact(BLOCK_SIZE), name=name, what=self._what)
        if size > limit:
            raise InvalidPackageError(self._what, [f"{name}: {size} bytes, at most {limit}"])
        data = self._content.read_exact(size)
        self._expect_zeros(-size % BLOCK_SIZE, name)
        return data

    def _expect_header(self, member: ArchiveMember) -> None:
        if self._content.read_exact(BLOCK_SIZE) != member.header:
            raise unexpected_member_error(self._what, member.name)

    def _expect_zeros(self, count: int, name: str) -> None:
        if self._content.read_exact(count).strip(b"\0"):
            raise InvalidPackageError(self._what, [f"{name}: the padding is not zero"])

    def _read_blob(self, member: ArchiveMember, start: "_BlobPrefix") -> bytes:
        hasher = hashlib.sha256()
        with self._sink.open(member.digest, member.size) as write:
            for chunk in self._content.chunks(member.size):
                hasher.update(chunk)
                write(chunk)
                start.append(chunk)
                self._progress(len(chunk))
            if hasher.hexdigest() != member.digest.hex:
                raise DigestError(
                    f"{self._what}: {member.name} does not have the digest that names it",
                    hint=DAMAGED_HINT,
                )
        self._expect_zeros(member.padding, member.name)
        return bytes(start.data)


class _BlobPrefix:
    """The beginning of a blob, as far as it is needed later: of a tensor file, the header."""

    def __init__(self, files: Sequence[FileDigest]) -> None:
        self.data = bytearray()
        self._limit = max(count_kept_bytes(file) for file in files)
        self._is_tensors = all(choose_media_type(file.path) == WEIGHT_TYPE for file in files)

    def append(self, chunk: memoryview) -> None:
        """Keep what is needed of the next chunk."""
        wanted = self._limit - len(self.data)
        if wanted <= 0:
            return
        self.data += chunk[:wanted]
        if self._is_tensors and len(self.data) >= LENGTH_BYTES:
            length = int.from_bytes(self.data[:LENGTH_BYTES], "little")
            self._limit = min(self._limit, LENGTH_BYTES + length)
            del self.data[self._limit :]


def count_kept_bytes(file: FileDigest) -> int:
    """Return the largest number of bytes of a file to keep in memory.

    Raises:
        InvalidPackageError: for a signature that is too large.
    """
    if choose_media_type(file.path) == WEIGHT_TYPE:
        return min(file.size, _HEADER_BYTES)
    if file.path == SIGNATURE_PATH and file.size > MAX_SIGNATURE_BYTES:
        raise InvalidPackageError(SIGNATURE_PATH, [f"{file.size} bytes are no signature"])
    return file.size if file.size <= MAX_SMALL_BYTES else 0
