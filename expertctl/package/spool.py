"""A folder of blobs between reading a package and writing something from it.

Blobs are written while they are hashed, under their digest; nothing here has a name that came from
a package. What is made of them appears whole or not at all.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from expertctl.digest import Digest, FileDigest, Progress, no_progress
from expertctl.package.layout import Blobs, Layout, layout_of
from expertctl.package.read import PackageContents, read_package
from expertctl.package.write import demand_folder, filling, write_package
from expertctl.schema.manifest import SIGNATURE_PATH
from expertctl.trust.bundle import sign_files
from expertctl.trust.keys import PrivateKey


@dataclass(frozen=True, slots=True)
class Spool:
    """Blobs in a folder; a `BlobSink` for readers and `Blobs` for writers."""

    folder: Path

    @contextmanager
    def open(self, digest: Digest, size: int) -> Iterator[Callable[[memoryview], object]]:
        """Take a blob."""
        del size
        with (self.folder / digest.hex).open("xb", buffering=0) as stream:
            yield lambda chunk: _write_all(stream.fileno(), chunk)

    @contextmanager
    def blob(self, digest: Digest) -> Iterator[BinaryIO]:
        """Open a blob that was taken."""
        with (self.folder / digest.hex).open("rb") as stream:
            yield stream


def unpack(path: Path, directory: Path, *, progress: Progress = no_progress) -> PackageContents:
    """Write a package's files, the signature too, into a new or empty directory.

    Raises:
        UsageError: when the directory holds something.
        NotFoundError: when there is no such file, or no directory to write to.
        InvalidPackageError: when the package is malformed.
        DigestError: when bytes are not those of their digest.
    """
    with (
        filling(directory) as made,
        spooling(path, beside=directory, progress=progress) as (contents, spool),
    ):
        for file in contents.layout.layers:
            _place(spool.folder / file.digest.hex, made / file.path)
    return contents


def sign_package(
    path: Path, key: PrivateKey, *, progress: Progress = no_progress
) -> PackageContents:
    """Put a signature, or a new one, into a package; its content digest stays.

    Raises:
        InvalidPackageError: when the package is malformed.
        DigestError: when bytes are not those of their digest.
    """
    with spooling(path, beside=path, progress=progress) as (contents, spool):
        signature = sign_files(contents.files, name=contents.manifest.ref, key=key)
        layout = signed_layout(contents.files, signature)
        write_package(path, layout, with_document(spool.blob, signature))
    return replace(contents, layout=layout, signature=signature)


def signed_layout(files: tuple[FileDigest, ...], signature: bytes | None) -> Layout:
    """Return the layout of files with a signature, or without one."""
    if signature is None:
        return layout_of(files, None)
    return layout_of(files, FileDigest(SIGNATURE_PATH, len(signature), Digest.of(signature)))


def with_document(blobs: Blobs, document: bytes | None) -> Blobs:
    """Return a source of blobs that knows one more, which is in memory."""

    @contextmanager
    def blob(digest: Digest) -> Iterator[BinaryIO]:
        if document is not None and digest == Digest.of(document):
            yield BytesIO(document)
            return
        with blobs(digest) as stream:
            yield stream

    return blob


@contextmanager
def spooling(
    path: Path, *, beside: Path, progress: Progress = no_progress
) -> Iterator[tuple[PackageContents, Spool]]:
    """Read a package into a temporary folder beside a place, on the same disk.

    Raises:
        NotFoundError: when there is no such file or place.
    """
    with tempfile.TemporaryDirectory(prefix=".expertctl-", dir=demand_folder(beside)) as name:
        spool = Spool(Path(name))
        yield read_package(path, sink=spool, progress=progress), spool


def _place(blob: Path, target: Path) -> None:
    """Copy a blob to a file name that the layout has checked; two files may share one blob."""
    shutil.copyfile(blob, target)
    target.chmod(0o644)


def _write_all(handle: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(handle, chunk) :]
