"""The file of one blob upload while it is open: appended to, hashed as it grows, locked.

One request at a time writes to an upload, over all processes of the server: the file is locked as
long as it is open. Writing and hashing happen in threads; closing waits for the one that writes.
Bytes that a request leaves behind never change, so what was hashed of them stays right.
"""

import fcntl
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from registry_server.oci.errors import OciCode, OciError
from registry_server.storage.blob_digest import BlobDigest, Hasher, new_hasher
from registry_server.storage.blobs import disk_errors

_PIECE = 1 << 20


@dataclass(slots=True)
class RunningHash:
    """The hash of the first ``size`` bytes of an upload."""

    algorithm: str
    size: int
    hasher: Hasher

    @classmethod
    def new(cls, algorithm: str) -> "RunningHash":
        """Begin at the beginning."""
        return cls(algorithm, 0, new_hasher(algorithm))

    def update(self, data: memoryview | bytes) -> None:
        """Take in the bytes that come next."""
        self.hasher.update(data)
        self.size += len(data)


class UploadFile:
    """An open upload; ``offset`` bytes of it are on the file system."""

    def __init__(self, path: Path, handle: int, running: RunningHash) -> None:
        """Keep an open and locked file; `open_upload` makes one."""
        self.path = path
        self.offset = os.fstat(handle).st_size
        self.hash = running if running.size <= self.offset else RunningHash.new("sha256")
        self._handle: int | None = handle
        self._writing = threading.Lock()

    @property
    def closed(self) -> bool:
        """Whether this request is done with the file."""
        return self._handle is None

    def append(self, data: bytes | bytearray) -> None:
        """Write and hash more bytes.

        Raises:
            DiskFullError: when there is no room.
            StoreError: when the disk fails.
        """
        view = memoryview(data)
        with self._writing, disk_errors():
            done = 0
            while done < len(view):
                done += os.pwrite(self._descriptor(), view[done:], self.offset + done)
            if self.hash.size == self.offset:
                self.hash.update(view)
            self.offset += len(view)

    def truncate(self, size: int) -> None:
        """Forget what this request wrote behind ``size``."""
        with self._writing, disk_errors():
            os.ftruncate(self._descriptor(), size)
            self.offset = size
            if self.hash.size > size:
                self.hash = RunningHash.new(self.hash.algorithm)

    def digest(self, algorithm: str) -> BlobDigest:
        """Return the digest of the whole file; what was not hashed as it came is read again."""
        with self._writing, disk_errors():
            if algorithm != self.hash.algorithm:
                self.hash = RunningHash.new(algorithm)
            while self.hash.size < self.offset:
                piece = os.pread(self._descriptor(), _PIECE, self.hash.size)
                if not piece:
                    raise OSError(f"upload {self.path.name} is shorter than it was")
                self.hash.update(piece)
            return BlobDigest(algorithm, self.hash.hasher.hexdigest())

    def sync(self) -> None:
        """Make the bytes durable, under the mode that blobs have."""
        with disk_errors():
            os.fchmod(self._descriptor(), 0o644)
            os.fsync(self._descriptor())

    def close(self) -> None:
        """Let others write; waits for a thread that still does."""
        with self._writing:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None

    def discard(self) -> None:
        """Remove the file and close it."""
        with disk_errors():
            self.path.unlink(missing_ok=True)
        self.close()

    def _descriptor(self) -> int:
        assert self._handle is not None
        return self._handle


def open_upload(path: Path, running: RunningHash | None = None) -> UploadFile:
    """Open an upload that is there.

    Raises:
        OciError: when it is gone, or another request writes to it.
        StoreError: when the disk fails.
    """
    with disk_errors():
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise _gone() from error
        _lock(handle)
        if not _lies_at(path, handle):
            os.close(handle)
            raise _gone()
    return UploadFile(path, handle, running or RunningHash.new("sha256"))


def new_upload(path: Path, algorithm: str) -> UploadFile:
    """Make the file of an upload that begins.

    Raises:
        DiskFullError: when there is no room.
        StoreError: when the disk fails.
    """
    with disk_errors():
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600)
        _lock(handle)
    return UploadFile(path, handle, RunningHash.new(algorithm))


def _lies_at(path: Path, handle: int) -> bool:
    """Tell whether a file that is locked now is still an upload, and did not just become a blob."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _gone() -> OciError:
    return OciError(OciCode.BLOB_UPLOAD_UNKNOWN, "there is no such upload")


def _lock(handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        fact = "another request writes to this upload"
        hint = "ask for its state in a moment, then go on from there"
        headers = {"Retry-After": "1"}
        raise OciError(OciCode.UPLOAD_BUSY, fact, hint=hint, headers=headers) from error
