"""Reading the tar of a package or of a set in one pass, as strictly as possible.

The archive that must come is derived from the index and the OCI manifests, which are themselves
derived from the files they name, and each byte is compared or hashed. What is kept of the files in
memory is bounded; all their bytes go to a sink.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import BinaryIO, Protocol

from expertctl.digest import CHUNK, Digest, FileDigest, Progress, no_progress
from expertctl.errors import DigestError, InvalidPackageError
from expertctl.package.archive import (
    BLOCK,
    END,
    INDEX_MEMBER,
    LAYOUT_MEMBER,
    AnyLayout,
    Member,
    archive_size,
    blob_name,
    declared_size,
    documents,
    members,
    refused,
)
from expertctl.package.layout import (
    CONFIG,
    MAX_MANIFEST_BYTES,
    OCI_LAYOUT,
    WEIGHT_TYPE,
    Descriptor,
    Layout,
    media_type,
    read_index,
    read_manifest,
)
from expertctl.package.set_layout import (
    MAX_INDEX_BYTES,
    SetLayout,
    read_set_index,
    set_layout_of,
)
from expertctl.package.tensor_file import ADAPTER_LIMITS, LENGTH_BYTES
from expertctl.schema.manifest import SIGNATURE_PATH

MAX_SMALL_BYTES = 1 << 20
MAX_SIGNATURE_BYTES = 1 << 20
MAX_KEPT_BYTES = 320 << 20
"""How many bytes of all files may be kept: more than any one package needs, little for a set.

Bytes that several files share count for each of them, as they are read for each."""
DAMAGED = "it is damaged or was altered; get it again"
_HEADER_BYTES = ADAPTER_LIMITS.header_bytes + LENGTH_BYTES


class Content(Protocol):
    """The bytes of an archive as a stream: out of a frame, or plain."""

    def read_exact(self, size: int) -> bytes:
        """Return the next ``size`` bytes; fewer are an InvalidPackageError."""
        ...

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Yield the next ``size`` bytes in pieces, each valid until the next is taken."""
        ...

    def at_end(self) -> bool:
        """Tell whether nothing follows."""
        ...


class PlainContent:
    """The bytes of an archive without a frame."""

    def __init__(self, stream: BinaryIO, what: str) -> None:
        """Read from ``stream`` on."""
        self._stream = stream
        self._what = what

    def read_exact(self, size: int) -> bytes:
        """Return the next ``size`` bytes.

        Raises:
            InvalidPackageError: when there are fewer.
        """
        return b"".join(bytes(chunk) for chunk in self.chunks(size))

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Yield the next ``size`` bytes in pieces.

        Raises:
            InvalidPackageError: when there are fewer.
        """
        while size:
            data = self._stream.read(min(CHUNK, size))
            if not data:
                raise InvalidPackageError(self._what, ["the archive is cut short"])
            size -= len(data)
            yield memoryview(data)

    def at_end(self) -> bool:
        """Tell whether nothing follows."""
        return not self._stream.read(1)


class BlobSink(Protocol):
    """Takes the bytes of every layer, `model.sig` included, while they are hashed.

    Leaving the context without an exception means that the digest was right; a blob must not be
    published before.
    """

    def open(
        self, digest: Digest, size: int
    ) -> AbstractContextManager[Callable[[memoryview], object]]:
        """Begin a blob."""
        ...


class Discard:
    """A sink that keeps nothing."""

    @contextmanager
    def open(self, digest: Digest, size: int) -> Iterator[Callable[[memoryview], object]]:
        """Begin a blob."""
        del digest, size
        yield len


DISCARD = Discard()


class ArchiveReader:
    """One pass over one archive of a known size."""

    def __init__(
        self,
        content: Content,
        *,
        size: int,
        what: str,
        sink: BlobSink = DISCARD,
        progress: Progress = no_progress,
    ) -> None:
        """Read from ``content``, from its first byte on."""
        self._content = content
        self._size = size
        self._what = what
        self._sink = sink
        self._progress = progress
        self.starts: dict[Digest, bytes] = {}
        """The beginning of every blob, as much as is needed later."""
        self._kept = 0

    def read_package(self) -> Layout:
        """Read the archive of one package to its end."""
        self._read_version()
        descriptor = read_index(self._document(INDEX_MEMBER, MAX_MANIFEST_BYTES), what=self._what)
        layout = self._read_manifest(descriptor)
        self._read_files(layout)
        return layout

    def read_set(self) -> SetLayout:
        """Read the archive of a set to its end."""
        self._read_version()
        named = read_set_index(self._document(INDEX_MEMBER, MAX_INDEX_BYTES), what=self._what)
        layout = set_layout_of({n: self._read_manifest(d) for n, d in named.items()})
        self._read_files(layout)
        return layout

    def _read_version(self) -> None:
        if self._document(LAYOUT_MEMBER, len(OCI_LAYOUT)) != OCI_LAYOUT:
            raise refused(self._what, LAYOUT_MEMBER)

    def _read_manifest(self, descriptor: Descriptor) -> Layout:
        data = self._document(blob_name(descriptor.digest), MAX_MANIFEST_BYTES)
        if len(data) != descriptor.size:
            raise InvalidPackageError(self._what, ["index.json gives the manifest another size"])
        if Digest.of(data) != descriptor.digest:
            raise DigestError(f"{self._what}: the OCI manifest does not have its digest")
        return read_manifest(data, what=self._what)

    def _read_files(self, layout: AnyLayout) -> None:
        """Read what follows the manifests: their config, every blob, the end."""
        config = blob_name(Digest.of(CONFIG))
        if self._document(config, len(CONFIG)) != CONFIG:
            raise refused(self._what, config)
        if archive_size(layout) != self._size:
            raise InvalidPackageError(
                self._what,
                [f"an archive of {self._size} bytes; its manifest makes {archive_size(layout)}"],
            )
        sharing: dict[Digest, list[FileDigest]] = {}
        for file in layout.layers:
            sharing.setdefault(file.digest, []).append(file)
        for member in members(layout)[len(documents(layout)) :]:
            self._expect_header(member)
            files = sharing[member.digest]
            self._keep(member.digest, self._read_blob(member, _Start(files)), times=len(files))
        if self._content.read_exact(len(END)) != END or not self._content.at_end():
            raise InvalidPackageError(self._what, ["something follows the last file"])

    def _keep(self, digest: Digest, start: bytes, *, times: int) -> None:
        self.starts[digest] = start
        self._kept += len(start) * times
        if self._kept > MAX_KEPT_BYTES:
            raise InvalidPackageError(
                self._what, [f"small files and headers of more than {MAX_KEPT_BYTES} bytes"]
            )

    def _document(self, name: str, limit: int) -> bytes:
        """Read a member whose name is known and whose size is not."""
        size = declared_size(self._content.read_exact(BLOCK), name=name, what=self._what)
        if size > limit:
            raise InvalidPackageError(self._what, [f"{name}: {size} bytes, at most {limit}"])
        data = self._content.read_exact(size)
        self._expect_zeros(-size % BLOCK, name)
        return data

    def _expect_header(self, member: Member) -> None:
        if self._content.read_exact(BLOCK) != member.header:
            raise refused(self._what, member.name)

    def _expect_zeros(self, count: int, name: str) -> None:
        if self._content.read_exact(count).strip(b"\0"):
            raise InvalidPackageError(self._what, [f"{name}: the padding is not zero"])

    def _read_blob(self, member: Member, start: "_Start") -> bytes:
        hasher = hashlib.sha256()
        with self._sink.open(member.digest, member.size) as write:
            for chunk in self._content.chunks(member.size):
                hasher.update(chunk)
                write(chunk)
                start.take(chunk)
                self._progress(len(chunk))
            if hasher.hexdigest() != member.digest.hex:
                raise DigestError(
                    f"{self._what}: {member.name} does not have the digest that names it",
                    hint=DAMAGED,
                )
        self._expect_zeros(member.padding, member.name)
        return bytes(start.data)


class _Start:
    """The beginning of a blob, as much as is needed later: of a tensor file, the header."""

    def __init__(self, files: Sequence[FileDigest]) -> None:
        self.data = bytearray()
        self._limit = max(kept_bytes(file) for file in files)
        self._is_tensors = all(media_type(file.path) == WEIGHT_TYPE for file in files)

    def take(self, chunk: memoryview) -> None:
        """Keep what is still wanted of the next bytes."""
        wanted = self._limit - len(self.data)
        if wanted <= 0:
            return
        self.data += chunk[:wanted]
        if self._is_tensors and len(self.data) >= LENGTH_BYTES:
            length = int.from_bytes(self.data[:LENGTH_BYTES], "little")
            self._limit = min(self._limit, LENGTH_BYTES + length)
            del self.data[self._limit :]


def kept_bytes(file: FileDigest) -> int:
    """Return how much of a file's start is kept in memory at most.

    Raises:
        InvalidPackageError: when it is a signature that cannot be one.
    """
    if media_type(file.path) == WEIGHT_TYPE:
        return min(file.size, _HEADER_BYTES)
    if file.path == SIGNATURE_PATH and file.size > MAX_SIGNATURE_BYTES:
        raise InvalidPackageError(SIGNATURE_PATH, [f"{file.size} bytes are no signature"])
    return file.size if file.size <= MAX_SMALL_BYTES else 0
