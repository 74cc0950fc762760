"""Writing a package: the deterministic tar, plain for export or in a zstd frame as ``.expert``.

Bytes are hashed again while they are written, so a file that changes meanwhile is detected. A
package appears under its name whole or not at all, and so does a directory made of one.
"""

import hashlib
import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from expertctl.digest import CHUNK, Digest, Progress, no_progress
from expertctl.durable import sync_folder
from expertctl.errors import DigestError, NotFoundError, UsageError
from expertctl.package.archive import END, AnyLayout, archive_size, documents, members
from expertctl.package.frame import FAST, check_ratio, compressing
from expertctl.package.layout import Blobs


class Output(Protocol):
    """Where a tar goes: a file, or the compressor before it."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Take some bytes."""
        ...


def write_package(
    path: Path,
    layout: AnyLayout,
    blobs: Blobs,
    *,
    level: int = FAST,
    progress: Progress = no_progress,
) -> None:
    """Write a ``.expert`` file, or a set in the same frame.

    Raises:
        DigestError: when a blob's bytes are not those of its digest.
        InvalidPackageError: when readers would take the result for a decompression bomb.
    """
    size = archive_size(layout)
    with publishing(path) as stream:
        with compressing(stream, content_size=size, level=level) as output:
            write_archive(output, layout, blobs, progress=progress)
        check_ratio(size, stream.tell(), what=path.name)


def export_archive(
    path: Path, layout: AnyLayout, blobs: Blobs, *, progress: Progress = no_progress
) -> None:
    """Write the tar alone: an OCI archive that other tools read.

    Raises:
        DigestError: when a blob's bytes are not those of its digest.
    """
    with publishing(path) as stream:
        write_archive(stream, layout, blobs, progress=progress)


def write_archive(
    output: Output, layout: AnyLayout, blobs: Blobs, *, progress: Progress = no_progress
) -> None:
    """Write the tar of a layout.

    Raises:
        DigestError: when a blob's bytes are not those of its digest.
    """
    made = documents(layout)
    for member in members(layout):
        output.write(member.header)
        if member.name in made:
            output.write(made[member.name])
        else:
            with blobs(member.digest) as stream:
                copy_verified(
                    stream, output, size=member.size, digest=member.digest, progress=progress
                )
        output.write(bytes(member.padding))
    output.write(END)


def copy_verified(
    stream: BinaryIO,
    output: Output,
    *,
    size: int,
    digest: Digest,
    progress: Progress = no_progress,
) -> None:
    """Copy a blob whole, hashing what is written.

    Raises:
        DigestError: when its bytes are not those of its digest.
    """
    hasher, left = hashlib.sha256(), size
    while chunk := stream.read(min(CHUNK, left)):
        hasher.update(chunk)
        output.write(chunk)
        left -= len(chunk)
        progress(len(chunk))
    if left or stream.read(1) or hasher.hexdigest() != digest.hex:
        raise DigestError(
            f"{getattr(stream, 'name', digest)}: the content changed while it was packed",
            hint="let no other program write to it, and try again",
        )


def check_place(path: Path) -> None:
    """Refuse a place where no file can be written.

    Raises:
        NotFoundError: when the folder does not exist.
        UsageError: when a directory is there.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a directory", hint="name a file with -o FILE")
    demand_folder(path)


def demand_folder(path: Path) -> Path:
    """Return the folder that a new file or directory is to stand in.

    Raises:
        NotFoundError: when it does not exist.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        hint = f"make it first: mkdir -p {shlex.quote(str(folder))}"
        raise NotFoundError(f"{path.parent}: no such directory", hint=hint)
    return folder


@contextmanager
def publishing(path: Path) -> Iterator[BinaryIO]:
    """Give a stream whose content becomes ``path`` at the end, durably, or is dropped.

    Raises:
        NotFoundError: when the folder does not exist.
        UsageError: when a directory is there.
    """
    check_place(path)
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
def filling(directory: Path) -> Iterator[Path]:
    """Give a new folder that becomes ``directory`` at the end, or is dropped.

    Raises:
        UsageError: when something is there already.
        NotFoundError: when no directory is above it.
    """
    _refuse_filled(directory)
    with tempfile.TemporaryDirectory(prefix=".expertctl-", dir=demand_folder(directory)) as name:
        made = Path(name) / "files"
        made.mkdir(mode=0o755)
        yield made
        if directory.exists():
            directory.rmdir()
        made.replace(directory)


def _refuse_filled(directory: Path) -> None:
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise UsageError(f"{directory} is not a directory", hint="name a new directory")
    if directory.is_dir() and any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty", hint="name a new or empty directory")
    if directory.is_dir() and directory.samefile(Path.cwd()):
        raise UsageError(f"{directory} is the working directory", hint="name a new directory")
