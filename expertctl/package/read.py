"""Reading a package strictly, in one pass: structure, every digest, the manifest, the tensors.

Nothing is believed: the archive that must come is derived from the OCI manifest, which is itself
derived from the files it names, and each byte is compared or hashed. Decompression overlaps with
hashing. What a package holds may be used only after `expertctl.package.verify`.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from expertctl.digest import Digest, FileDigest, Progress, hash_stream, no_progress
from expertctl.errors import DigestError, InvalidPackageError, UsageError
from expertctl.package.adapter import AdapterSpec
from expertctl.package.archive import (
    BLOCK,
    END,
    INDEX_MEMBER,
    LAYOUT_MEMBER,
    Member,
    archive_size,
    blob_name,
    declared_size,
    members,
    refused,
)
from expertctl.package.content import check_content
from expertctl.package.frame import FrameReader, check_frame, decompressing
from expertctl.package.layout import (
    CONFIG,
    MAX_FILES,
    MAX_MANIFEST_BYTES,
    MAX_TOTAL_BYTES,
    OCI_LAYOUT,
    WEIGHT_TYPE,
    Blobs,
    Layout,
    content_digest,
    media_type,
    read_index,
    read_manifest,
)
from expertctl.package.tensor_file import ADAPTER_LIMITS, LENGTH_BYTES
from expertctl.reference import Reference
from expertctl.regular_file import open_regular
from expertctl.schema.manifest import SIGNATURE_PATH, Manifest

MAX_SMALL_BYTES = 1 << 20
MAX_SIGNATURE_BYTES = 1 << 20
_MAX_ARCHIVE = MAX_TOTAL_BYTES + (MAX_FILES + 8) * 2 * BLOCK
_DAMAGED = "it is damaged or was altered; get it again"
_HEADER_BYTES = ADAPTER_LIMITS.header_bytes + LENGTH_BYTES


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


@dataclass(frozen=True, slots=True)
class PackageContents:
    """What a package holds; its digests are right, but nobody has vouched for it yet."""

    manifest: Manifest
    adapters: tuple[AdapterSpec, ...]
    """What the tensors mean, in the order of ``manifest.adapters``."""
    layout: Layout
    signature: bytes | None
    small: Mapping[str, bytes]
    """The bytes of files up to 1 MiB that are no weights, by path."""
    content_digest: Digest

    @property
    def files(self) -> tuple[FileDigest, ...]:
        """All files but the signature, sorted by path."""
        return self.layout.files

    @property
    def package_digest(self) -> Digest:
        """The digest of the OCI manifest."""
        return self.layout.package_digest

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)


def read_package(
    path: Path, *, sink: BlobSink = DISCARD, progress: Progress = no_progress
) -> PackageContents:
    """Read a ``.expert`` file whole.

    Raises:
        NotFoundError: when there is no such file.
        InvalidPackageError: when it is malformed in any way.
        DigestError: when bytes are not those of the digest that names them.
    """
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        content = check_frame(stream, file_size=size, max_content=_MAX_ARCHIVE, what=path.name)
        with decompressing(stream, what=path.name) as frame:
            return _ArchiveReader(frame, sink, progress, path.name).read(content)


def names_file(text: str) -> bool:
    """Tell a file from a reference: by its form, or because it is there.

    A folder may be called like a reference, ``acme/sql``; then the reference is meant.
    """
    if text.endswith(".expert") or text.startswith((".", "/")):
        return True
    try:
        mode = os.stat(text).st_mode  # noqa: PTH116  # an empty Path is this folder
    except (OSError, ValueError):  # not there, or nothing that could be
        return False
    return not (stat.S_ISDIR(mode) and _is_reference(text))


def _is_reference(text: str) -> bool:
    try:
        Reference.parse(text)
    except UsageError:
        return False
    return True


class _ArchiveReader:
    """One pass over one archive."""

    def __init__(self, frame: FrameReader, sink: BlobSink, progress: Progress, what: str) -> None:
        self._frame = frame
        self._sink = sink
        self._progress = progress
        self._what = what
        self._starts: dict[Digest, bytes] = {}

    def read(self, archive_bytes: int) -> PackageContents:
        """Read everything; ``archive_bytes`` is what the frame promised."""
        layout = self._read_layout()
        if archive_size(layout) != archive_bytes:
            raise InvalidPackageError(
                self._what,
                [f"an archive of {archive_bytes} bytes; its manifest makes {archive_size(layout)}"],
            )
        for member in members(layout)[4:]:
            self._expect_header(member)
            files = [file for file in layout.layers if file.digest == member.digest]
            self._starts[member.digest] = self._read_blob(member, _Start(files))
        if self._frame.read_exact(len(END)) != END or not self._frame.at_end():
            raise InvalidPackageError(self._what, ["something follows the last file"])
        return _contents(layout, self._starts, self._what)

    def _read_layout(self) -> Layout:
        if self._document(LAYOUT_MEMBER, len(OCI_LAYOUT)) != OCI_LAYOUT:
            raise refused(self._what, LAYOUT_MEMBER)
        descriptor = read_index(self._document(INDEX_MEMBER, MAX_MANIFEST_BYTES), what=self._what)
        name = blob_name(descriptor.digest)
        data = self._document(name, MAX_MANIFEST_BYTES)
        if len(data) != descriptor.size:
            raise InvalidPackageError(self._what, ["index.json gives the manifest another size"])
        if Digest.of(data) != descriptor.digest:
            raise DigestError(f"{self._what}: the OCI manifest does not have its digest")
        layout = read_manifest(data, what=self._what)
        config = blob_name(Digest.of(CONFIG))
        if self._document(config, len(CONFIG)) != CONFIG:
            raise refused(self._what, config)
        return layout

    def _document(self, name: str, limit: int) -> bytes:
        """Read a member whose name is known and whose size is not."""
        size = declared_size(self._frame.read_exact(BLOCK), name=name, what=self._what)
        if size > limit:
            raise InvalidPackageError(self._what, [f"{name}: {size} bytes, at most {limit}"])
        data = self._frame.read_exact(size)
        self._expect_zeros(-size % BLOCK, name)
        return data

    def _expect_header(self, member: Member) -> None:
        if self._frame.read_exact(BLOCK) != member.header:
            raise refused(self._what, member.name)

    def _expect_zeros(self, count: int, name: str) -> None:
        if self._frame.read_exact(count).strip(b"\0"):
            raise InvalidPackageError(self._what, [f"{name}: the padding is not zero"])

    def _read_blob(self, member: Member, start: "_Start") -> bytes:
        hasher = hashlib.sha256()
        with self._sink.open(member.digest, member.size) as write:
            for chunk in self._frame.chunks(member.size):
                hasher.update(chunk)
                write(chunk)
                start.take(chunk)
                self._progress(len(chunk))
            if hasher.hexdigest() != member.digest.hex:
                raise DigestError(
                    f"{self._what}: {member.name} does not have the digest that names it",
                    hint=_DAMAGED,
                )
        self._expect_zeros(member.padding, member.name)
        return bytes(start.data)


class _Start:
    """The beginning of a blob: as much as is looked at later, which of tensors is the header."""

    def __init__(self, files: Sequence[FileDigest]) -> None:
        self.data = bytearray()
        self._limit = max(_kept_bytes(file) for file in files)
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


def read_blobs(
    layout: Layout, blobs: Blobs, *, what: str, progress: Progress = no_progress
) -> PackageContents:
    """Read a package whose files are kept apart, as strictly as a ``.expert`` file.

    Raises:
        InvalidPackageError: when the files are not a package.
        DigestError: when bytes are not those of their digest.
    """
    starts: dict[Digest, bytes] = {}
    for file in layout.layers:
        with blobs(file.digest) as stream:
            start = stream.read(_kept_bytes(file))
            stream.seek(0)
            size, digest = hash_stream(stream, progress=progress)
        if (size, digest) != (file.size, file.digest):
            raise DigestError(f"{what}: {file.path} does not have its digest", hint=_DAMAGED)
        starts[digest] = max(start, starts.get(digest, b""), key=len)
    return _contents(layout, starts, what)


def _contents(layout: Layout, starts: Mapping[Digest, bytes], what: str) -> PackageContents:
    """Check what the files say, from the beginning of each."""
    small, headers = {}, {}
    for file in layout.files:
        start = starts[file.digest]
        if media_type(file.path) == WEIGHT_TYPE:
            headers[file.path] = start
        elif len(start) == file.size:
            small[file.path] = start
    manifest, adapters = check_content(layout.files, small, headers, what=what)
    signature = starts[layout.signature.digest] if layout.signature else None
    digest = content_digest(layout.files)
    return PackageContents(manifest, adapters, layout, signature, small, digest)


def _kept_bytes(file: FileDigest) -> int:
    """How much of a file's start is kept in memory."""
    if media_type(file.path) == WEIGHT_TYPE:
        return min(file.size, _HEADER_BYTES)
    if file.path == SIGNATURE_PATH and file.size > MAX_SIGNATURE_BYTES:
        raise InvalidPackageError(SIGNATURE_PATH, [f"{file.size} bytes are no signature"])
    return file.size if file.size <= MAX_SMALL_BYTES else 0
