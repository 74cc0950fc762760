"""The files of a directory to pack: opening them safely, and checking documents for secrets.

The Hugging Face cache stores a snapshot as links: ``models--org--name/snapshots/REV/file`` points
to ``../../blobs/DIGEST``. Such a link is followed if every hop stays inside its ``models--…``
folder. Every other link is refused: it could bring any file of this machine into a package.

A file is opened without following links, and only if it is the one that was checked: device and
inode are compared on the open descriptor.
"""

import codecs
import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from expertctl.errors import DigestError, InvalidPackageError
from expertctl.reference import Digest, Progress, hash_stream, ignore_progress

_CACHE_PREFIX = "models--"
_SNAPSHOTS_FOLDER = "snapshots"
_MAX_HOPS = 8
_OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A regular file to pack, after following links; only `find_source_file` makes one."""

    name: str
    """Its name in the directory."""
    path: Path
    """Its real path, not a link."""
    size: int
    device: int
    inode: int

    def open(self) -> BinaryIO:
        """Open the file that was checked.

        Raises:
            DigestError: when another file, a link or nothing is in its place now.
        """
        try:
            descriptor = os.open(self.path, _OPEN_FLAGS)
        except OSError as error:
            raise self._changed_error() from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or (found.st_dev, found.st_ino) != (
            self.device,
            self.inode,
        ):
            os.close(descriptor)
            raise self._changed_error()
        return os.fdopen(descriptor, "rb")

    def read(self, *, max_bytes: int) -> bytes:
        """Return at most ``max_bytes`` + 1 bytes, enough for the caller to detect an excess."""
        with self.open() as stream:
            return stream.read(max_bytes + 1)

    def hash(self, *, progress: Progress = ignore_progress) -> tuple[int, Digest]:
        """Return its size in bytes and its digest."""
        with self.open() as stream:
            return hash_stream(stream, progress=progress)

    def _changed_error(self) -> DigestError:
        return DigestError(
            f"{self.name}: the file was replaced while it was being packed",
            hint="build again when nothing writes to the directory",
        )


def find_source_file(directory: Path, name: str) -> SourceFile | None:
    """Find a file of a directory by its plain name; ``None`` when it does not exist.

    Raises:
        InvalidPackageError: for a link that may not be followed, and for a non-regular file.
    """
    path = directory / name
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(found.st_mode):
        path = _follow_links(directory.resolve() / name, name)
        found = path.lstat()
        if path.resolve() != path:  # a folder on the way was replaced meanwhile
            raise InvalidPackageError(name, ["a symbolic link that changed while it was read"])
    if not stat.S_ISREG(found.st_mode):
        raise InvalidPackageError(name, ["not a regular file"])
    return SourceFile(name, path, found.st_size, found.st_dev, found.st_ino)


def list_source_names(directory: Path) -> list[str]:
    """Return the names of all entries of a directory, sorted."""
    return sorted(path.name for path in directory.iterdir())


def find_cache_folder(directory: Path) -> Path | None:
    """Return the ``models--…`` folder of the hub cache that a snapshot belongs to, if any."""
    real = directory.resolve()
    for folder in real.parents:
        below = real.relative_to(folder).parts
        if (
            folder.name.startswith(_CACHE_PREFIX)
            and len(below) > 1
            and below[0] == _SNAPSHOTS_FOLDER
        ):
            return folder
    return None


def find_cached_name(directory: Path) -> str | None:
    """Return the name of the repository that a snapshot of the hub cache belongs to."""
    folder = find_cache_folder(directory)
    return folder.name.rpartition("--")[2] if folder is not None else None


def _follow_links(path: Path, name: str) -> Path:
    """Follow a link hop by hop; ``path`` is absolute, and its folder contains no links."""
    folder = find_cache_folder(path.parent)
    if folder is None:
        raise InvalidPackageError(name, ["a symbolic link is not packed; put the file itself here"])
    for _ in range(_MAX_HOPS):
        if not path.parent.is_relative_to(folder):
            raise InvalidPackageError(
                name, [f"a symbolic link that leaves {folder.name}; put the file itself here"]
            )
        try:
            target = path.readlink()
        except FileNotFoundError as error:
            raise InvalidPackageError(
                name, ["a symbolic link to a file that is missing; download it again"]
            ) from error
        except OSError as error:
            if error.errno == errno.EINVAL:  # not a link: the end of the chain
                return path
            raise InvalidPackageError(name, [f"cannot be read: {error.strerror}"]) from error
        path = _resolve_next_hop(path, target, name)
    raise InvalidPackageError(name, ["a loop of symbolic links"])


def _resolve_next_hop(path: Path, target: Path, name: str) -> Path:
    """Return the target of a link with the links in its folder, but not itself, resolved."""
    there = path.parent / target
    if there.name in ("", "..", "."):
        raise InvalidPackageError(name, ["a symbolic link to a folder"])
    try:
        return there.parent.resolve(strict=True) / there.name
    except (OSError, RuntimeError) as error:
        raise InvalidPackageError(
            name, ["a symbolic link to a file that is missing; download it again"]
        ) from error


_PRIVATE_KEY = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----")
_TOKEN = re.compile(rb"(?<![A-Za-z0-9_-])xpt_[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])")
_MAX_SECRET_BYTES = 64
README = "README.md"
_CHUNK = 1 << 20


def find_document_problem(stream: BinaryIO, *, name: str) -> str | None:
    """Return why a non-weights file of a package is refused, or None.

    The stream is read from its position to its end. Secrets are those of `find_secret`.
    """
    if secret := find_secret_in_stream(stream):
        return f"{name}: holds {secret}, which must never be published"
    stream.seek(0)
    if name == README and (at := _find_invalid_utf8(stream)) is not None:
        return f"{name}: not UTF-8 at byte {at}"
    return None


def find_secret_in_stream(stream: BinaryIO) -> str | None:
    """Return the kind of secret in a stream of any length; see `find_secret`."""
    tail = b""
    while chunk := stream.read(_CHUNK):
        if found := find_secret(tail + chunk):
            return found
        tail = chunk[-_MAX_SECRET_BYTES:]
    return None


def _find_invalid_utf8(stream: BinaryIO) -> int | None:
    """Return the offset of the first invalid UTF-8 in a stream of any length, or None."""
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        chunk = stream.read(_CHUNK)
        kept = len(decoder.getstate()[0])
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            return read - kept + error.start
        if not chunk:
            return None
        read += len(chunk)


def find_secret(data: bytes) -> str | None:
    """Return the kind of secret in some bytes: a PEM private key, or a registry access token."""
    if _PRIVATE_KEY.search(data):
        return "a private key"
    return "an access token" if _TOKEN.search(data) else None
