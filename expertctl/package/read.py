"""Reading a package strictly, in one pass: structure, every digest, the manifest, the tensors.

Nothing is believed: the archive that must come is derived from the OCI manifest, which is itself
derived from the files it names, and each byte is compared or hashed. Decompression overlaps with
hashing. What a package holds may be used only after `expertctl.package.verify`.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from expertctl.digest import Digest, FileDigest, Progress, hash_stream, no_progress
from expertctl.errors import DigestError, InvalidPackageError, UsageError
from expertctl.package.adapter import AdapterSpec
from expertctl.package.archive import BLOCK
from expertctl.package.archive_reader import (
    DAMAGED,
    DISCARD,
    ArchiveReader,
    BlobSink,
    Content,
    PlainContent,
    kept_bytes,
)
from expertctl.package.content import check_content
from expertctl.package.frame import MAGIC, check_frame, decompressing
from expertctl.package.layout import (
    MAX_FILES,
    MAX_TOTAL_BYTES,
    WEIGHT_TYPE,
    Blobs,
    Layout,
    content_digest,
    media_type,
)
from expertctl.package.set_layout import MAX_PACKAGES, MAX_SET_BYTES, index_name
from expertctl.reference import Reference
from expertctl.regular_file import open_regular
from expertctl.schema.manifest import Manifest

_MEMBER_BYTES = 2 * BLOCK
_MAX_ARCHIVE = MAX_TOTAL_BYTES + (MAX_FILES + 8) * _MEMBER_BYTES
_MAX_SET_ARCHIVE = MAX_SET_BYTES + (MAX_FILES + 8) * MAX_PACKAGES * _MEMBER_BYTES


@dataclass(frozen=True, slots=True)
class PackageContents:
    """What a package holds; its digests are right, but its signature is not verified yet."""

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
            reader = ArchiveReader(
                frame, size=content, what=path.name, sink=sink, progress=progress
            )
            layout = reader.read_package()
    return _contents(layout, reader.starts, path.name)


def read_set(
    path: Path, *, sink: BlobSink = DISCARD, progress: Progress = no_progress
) -> Iterator[PackageContents]:
    """Read several packages that were exported together, in a frame or as a plain tar.

    Every byte is read and hashed at once. A package's content is parsed only when it is taken, so
    after one that is not vouched for, no further one costs anything.

    Raises:
        NotFoundError: when there is no such file.
        InvalidPackageError: when it, or a package that is taken, is malformed in any way.
        DigestError: when bytes are not those of the digest that names them.
    """
    with _archive(path, _MAX_SET_ARCHIVE) as (content, size):
        reader = ArchiveReader(content, size=size, what=path.name, sink=sink, progress=progress)
        layout = reader.read_set()
    return (_member(name, of, reader, path.name) for name, of in layout.packages.items())


@contextmanager
def _archive(path: Path, limit: int) -> Iterator[tuple[Content, int]]:
    """Open the tar that a file is, or that is in its frame, and tell its size."""
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        framed = stream.read(len(MAGIC)) == MAGIC
        stream.seek(0)
        if framed:
            size = check_frame(stream, file_size=size, max_content=limit, what=path.name)
            with decompressing(stream, what=path.name) as frame:
                yield frame, size
        else:
            yield PlainContent(stream, path.name), size


def _member(name: str, layout: Layout, reader: ArchiveReader, what: str) -> PackageContents:
    contents = _contents(layout, reader.starts, f"{what} {name}")
    manifest = contents.manifest
    if index_name(manifest.package, manifest.semver) != name:
        raise InvalidPackageError(what, [f"what index.json calls {name} is {manifest.ref}"])
    return contents


def names_file(text: str) -> bool:
    """Tell a file from a reference: by its form, or because it is there.

    A folder may be called like a reference, ``acme/sql``; then the reference is meant.
    """
    if text.endswith(".expert") or text.startswith((".", "/")):
        return True
    try:
        mode = os.stat(text).st_mode  # noqa: PTH116  # an empty Path is this folder
    except (OSError, ValueError):  # it does not exist, or cannot be a path
        return False
    return not (stat.S_ISDIR(mode) and _is_reference(text))


def _is_reference(text: str) -> bool:
    try:
        Reference.parse(text)
    except UsageError:
        return False
    return True


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
            start = stream.read(kept_bytes(file))
            stream.seek(0)
            size, digest = hash_stream(stream, progress=progress)
        if (size, digest) != (file.size, file.digest):
            raise DigestError(f"{what}: {file.path} does not have its digest", hint=DAMAGED)
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
