"""Writing packages: the deterministic tar, plain or in a zstd frame as ``.expert``, and signing.

Bytes are hashed again while they are written, so a file that changes meanwhile is detected. A file
or directory appears under its name completely or not at all.

A `BlobSpool` is a folder of blobs between reading a package and writing something from it. Blobs
are written while they are hashed, under their digest; no name in it comes from a package.
"""

import hashlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Protocol

from expertctl.errors import DigestError, NotFoundError, UsageError
from expertctl.files import sync_folder
from expertctl.package.archive import (
    END_OF_ARCHIVE,
    AnyLayout,
    compute_archive_size,
    list_documents,
    list_members,
)
from expertctl.package.frame import FASTEST_LEVEL, check_ratio, open_compressor
from expertctl.package.layout import Blobs, PackageLayout, build_layout
from expertctl.package.read import PackageContents, read_package
from expertctl.reference import READ_CHUNK, Digest, FileDigest, Progress, ignore_progress
from expertctl.schema.manifest import SIGNATURE_PATH
from expertctl.trust.bundle import sign_files
from expertctl.trust.keys import PrivateKey


class ArchiveOutput(Protocol):
    """The destination of a tar: a file, or a compressor."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Write some bytes."""
        ...


def write_package(
    path: Path,
    layout: AnyLayout,
    blobs: Blobs,
    *,
    level: int = FASTEST_LEVEL,
    progress: Progress = ignore_progress,
) -> None:
    """Write a ``.expert`` file, or a set in the same kind of frame.

    Raises as `copy_verified`, and InvalidPackageError when readers would refuse the ratio.
    """
    size = compute_archive_size(layout)
    with open_atomic_file(path) as stream:
        with open_compressor(stream, content_size=size, level=level) as output:
            write_archive(output, layout, blobs, progress=progress)
        check_ratio(size, stream.tell(), what=path.name)


def write_oci_archive(
    path: Path, layout: AnyLayout, blobs: Blobs, *, progress: Progress = ignore_progress
) -> None:
    """Write the plain tar, an OCI archive for other tools; raises as `copy_verified`."""
    with open_atomic_file(path) as stream:
        write_archive(stream, layout, blobs, progress=progress)


def write_archive(
    output: ArchiveOutput, layout: AnyLayout, blobs: Blobs, *, progress: Progress = ignore_progress
) -> None:
    """Write the tar of a layout; raises as `copy_verified`."""
    documents = list_documents(layout)
    for member in list_members(layout):
        output.write(member.header)
        if member.name in documents:
            output.write(documents[member.name])
        else:
            with blobs(member.digest) as stream:
                copy_verified(
                    stream, output, size=member.size, digest=member.digest, progress=progress
                )
        output.write(bytes(member.padding))
    output.write(END_OF_ARCHIVE)


def copy_verified(
    stream: BinaryIO,
    output: ArchiveOutput,
    *,
    size: int,
    digest: Digest,
    progress: Progress = ignore_progress,
) -> None:
    """Copy a whole blob, hashing what is written.

    Raises:
        DigestError: when its bytes do not match its digest.
    """
    hasher, left = hashlib.sha256(), size
    while chunk := stream.read(min(READ_CHUNK, left)):
        hasher.update(chunk)
        output.write(chunk)
        left -= len(chunk)
        progress(len(chunk))
    if left or stream.read(1) or hasher.hexdigest() != digest.hex:
        raise DigestError(
            f"{getattr(stream, 'name', digest)}: the content changed while it was packed",
            hint="make sure that no other program writes to it, and try again",
        )


def check_target(path: Path) -> None:
    """Require a path to which a file can be written.

    Raises:
        NotFoundError: when the folder does not exist.
        UsageError: when it is a directory.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a directory", hint="name a file with -o FILE")
    require_folder(path)


def require_folder(path: Path) -> Path:
    """Return the existing parent folder of a new file or directory.

    Raises:
        NotFoundError: when it does not exist.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        hint = f"create it first: mkdir -p {shlex.quote(str(folder))}"
        raise NotFoundError(f"{path.parent}: no such directory", hint=hint)
    return folder


@contextmanager
def open_atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Give a stream that becomes ``path`` on success, durably; raises as `check_target`."""
    check_target(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:80]}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def open_atomic_directory(directory: Path) -> Iterator[Path]:
    """Give a new folder that becomes ``directory`` on success, and is discarded on error.

    Raises:
        UsageError: when it exists and is not an empty directory.
        NotFoundError: when its parent does not exist.
    """
    _require_empty(directory)
    with tempfile.TemporaryDirectory(prefix=".expertctl-", dir=require_folder(directory)) as name:
        made = Path(name) / "files"
        made.mkdir(mode=0o755)
        yield made
        if directory.exists():
            directory.rmdir()
        made.replace(directory)


def _require_empty(directory: Path) -> None:
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise UsageError(f"{directory} is not a directory", hint="name a new directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty", hint="name a new or empty directory")
    if directory.is_dir() and directory.samefile(Path.cwd()):
        raise UsageError(f"{directory} is the working directory", hint="name a new directory")


@dataclass(frozen=True, slots=True)
class BlobSpool:
    """Blobs in a folder; a `BlobSink` for readers, and with `blob` the `Blobs` for writers."""

    folder: Path

    @contextmanager
    def open(self, digest: Digest, size: int) -> Iterator[Callable[[memoryview], object]]:
        """Write a blob."""
        del size
        with (self.folder / digest.hex).open("xb", buffering=0) as stream:
            yield lambda chunk: _write_fully(stream.fileno(), chunk)

    @contextmanager
    def blob(self, digest: Digest) -> Iterator[BinaryIO]:
        """Open a blob."""
        with (self.folder / digest.hex).open("rb") as stream:
            yield stream


def unpack_package(
    path: Path, directory: Path, *, progress: Progress = ignore_progress
) -> PackageContents:
    """Write the files of a package, including the signature, to a new or empty directory.

    Raises as `read_package` and `open_atomic_directory`.
    """
    with (
        open_atomic_directory(directory) as folder,
        spool_package(path, target=directory, progress=progress) as (contents, spool),
    ):
        for file in contents.layout.layers:  # two files may share one blob
            shutil.copyfile(spool.folder / file.digest.hex, folder / file.path)
            (folder / file.path).chmod(0o644)
    return contents


def sign_package(
    path: Path, key: PrivateKey, *, progress: Progress = ignore_progress
) -> PackageContents:
    """Sign a package anew; its content digest stays. Raises as `read_package`."""
    with spool_package(path, target=path, progress=progress) as (contents, spool):
        signature = sign_files(contents.files, name=contents.manifest.ref, key=key)
        layout = build_signed_layout(contents.files, signature)
        write_package(path, layout, add_document(spool.blob, signature))
    return replace(contents, layout=layout, signature=signature)


def build_signed_layout(files: tuple[FileDigest, ...], signature: bytes | None) -> PackageLayout:
    """Return the layout of files with or without a signature."""
    if signature is None:
        return build_layout(files, None)
    return build_layout(
        files, FileDigest(SIGNATURE_PATH, len(signature), Digest.compute(signature))
    )


def add_document(blobs: Blobs, document: bytes | None) -> Blobs:
    """Return a source of blobs with one more blob, from memory."""

    @contextmanager
    def blob(digest: Digest) -> Iterator[BinaryIO]:
        if document is not None and digest == Digest.compute(document):
            yield BytesIO(document)
            return
        with blobs(digest) as stream:
            yield stream

    return blob


@contextmanager
def spool_package(
    path: Path, *, target: Path, progress: Progress = ignore_progress
) -> Iterator[tuple[PackageContents, BlobSpool]]:
    """Read a package into a temporary folder next to ``target``; raises as `read_package`."""
    with tempfile.TemporaryDirectory(prefix=".expertctl-", dir=require_folder(target)) as name:
        spool = BlobSpool(Path(name))
        yield read_package(path, sink=spool, progress=progress), spool


def _write_fully(handle: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(handle, chunk) :]
