"""Blob uploads: a row with the owner and the reserved bytes, and a file with the bytes.

Space is reserved in the database before bytes are written. The bytes become a blob in one
transaction: the file is moved to the storage under the write lock, and the commit makes it
readable. An interruption leaves an upload that can be resumed, or a file that is removed later
(`registry_server.app`). The size of the file is the state of an upload, so uploads continue after a
restart; their bytes are then hashed again.

The file is locked while it is open, so only one request of all processes writes to an upload. Bytes
are written and hashed in threads; closing waits for a thread that writes. Bytes left by a request
never change, so their hash stays valid.
"""

import fcntl
import os
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, delete, func, insert, select, update

from expertctl.errors import BudgetError, DiskFullError, TooLargeError
from registry_server.access import namespaces, rights
from registry_server.access.namespaces import NamespaceRow
from registry_server.access.rights import (
    Action,
    Identity,
    RepositoryAccess,
    RepositoryName,
    authorise_repository,
)
from registry_server.database.tables import REPOSITORIES, UPLOADS
from registry_server.errors import OciCode, OciError
from registry_server.oci import blobs
from registry_server.registry import BlobDigest, Hasher, Registry, create_hasher, wrap_disk_errors

_READ_BYTES = 1 << 20


@dataclass(slots=True)
class RunningHash:
    """The hash of the first ``size`` bytes of an upload."""

    algorithm: str
    size: int
    hasher: Hasher

    @classmethod
    def new(cls, algorithm: str) -> "RunningHash":
        """Start without bytes."""
        return cls(algorithm, 0, create_hasher(algorithm))

    def update(self, data: memoryview | bytes) -> None:
        """Hash the next bytes."""
        self.hasher.update(data)
        self.size += len(data)


class UploadFile:
    """The open file of an upload; ``offset`` bytes are written."""

    def __init__(self, path: Path, handle: int, running: RunningHash) -> None:
        """Own a file that is open and locked; use `open_upload_file`."""
        self.path = path
        self.offset = os.fstat(handle).st_size
        self.running_hash = running if running.size <= self.offset else RunningHash.new("sha256")
        self._handle: int | None = handle
        self._writing = threading.Lock()

    @property
    def closed(self) -> bool:
        """Whether the file is closed."""
        return self._handle is None

    def append(self, data: bytes | bytearray) -> None:
        """Write and hash more bytes.

        Raises:
            DiskFullError: when there is no room.
            StoreError: when the disk fails.
        """
        view = memoryview(data)
        with self._writing, wrap_disk_errors():
            done = 0
            while done < len(view):
                done += os.pwrite(self._descriptor(), view[done:], self.offset + done)
            if self.running_hash.size == self.offset:
                self.running_hash.update(view)
            self.offset += len(view)

    def truncate(self, size: int) -> None:
        """Discard the bytes after ``size``."""
        with self._writing, wrap_disk_errors():
            os.ftruncate(self._descriptor(), size)
            self.offset = size
            if self.running_hash.size > size:
                self.running_hash = RunningHash.new(self.running_hash.algorithm)

    def digest(self, algorithm: str) -> BlobDigest:
        """Return the digest of the whole file; bytes not hashed yet are read again."""
        with self._writing, wrap_disk_errors():
            if algorithm != self.running_hash.algorithm:
                self.running_hash = RunningHash.new(algorithm)
            while self.running_hash.size < self.offset:
                piece = os.pread(self._descriptor(), _READ_BYTES, self.running_hash.size)
                if not piece:
                    raise OSError(f"upload {self.path.name} is shorter than it was")
                self.running_hash.update(piece)
            return BlobDigest(algorithm, self.running_hash.hasher.hexdigest())

    def sync(self) -> None:
        """Make the bytes durable, and set the file mode of blobs."""
        with wrap_disk_errors():
            os.fchmod(self._descriptor(), 0o644)
            os.fsync(self._descriptor())

    def close(self) -> None:
        """Unlock and close the file; waits for a thread that writes."""
        with self._writing:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None

    def discard(self) -> None:
        """Remove and close the file."""
        with wrap_disk_errors():
            self.path.unlink(missing_ok=True)
        self.close()

    def _descriptor(self) -> int:
        assert self._handle is not None
        return self._handle


def open_upload_file(path: Path, running: RunningHash | None = None) -> UploadFile:
    """Open the file of an existing upload.

    Raises:
        OciError: when it does not exist, or another request writes to it.
        StoreError: when the disk fails.
    """
    with wrap_disk_errors():
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise _upload_unknown() from error
        _lock_file(handle)
        if not _is_same_file(path, handle):
            os.close(handle)
            raise _upload_unknown()
    return UploadFile(path, handle, running or RunningHash.new("sha256"))


def create_upload_file(path: Path, algorithm: str) -> UploadFile:
    """Create the file of a new upload.

    Raises:
        DiskFullError: when there is no room.
        StoreError: when the disk fails.
    """
    with wrap_disk_errors():
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600)
        _lock_file(handle)
    return UploadFile(path, handle, RunningHash.new(algorithm))


def _is_same_file(path: Path, handle: int) -> bool:
    """Return whether a locked file is still an upload, and did not just become a blob."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _upload_unknown() -> OciError:
    return OciError(OciCode.BLOB_UPLOAD_UNKNOWN, "there is no such upload")


def _lock_file(handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        fact = "another request writes to this upload"
        hint = "request its state in a moment, then continue from there"
        headers = {"Retry-After": "1"}
        raise OciError(OciCode.UPLOAD_BUSY, fact, hint=hint, headers=headers) from error


RESERVATION_STEP = 64 << 20
"""Bytes reserved at a time for a body of unknown length."""

MAX_OPEN_UPLOADS = 1000
"""Maximum uploads of a user in progress."""

_MAX_CACHED_HASHES = 512


@dataclass(frozen=True, slots=True)
class UploadState:
    """The state of an upload between requests."""

    id: str
    name: RepositoryName
    offset: int


class OpenUpload:
    """An upload to which a request writes."""

    def __init__(
        self, name: RepositoryName, upload_id: str, file: UploadFile, *, draft: bool = False
    ) -> None:
        """Own the open file; ``begun`` is the offset at which this request starts to write."""
        self.name = name
        self.id = upload_id
        self.file = file
        self.draft = draft
        """Whether it has no row and ends with the request."""
        self.start_offset = file.offset
        self.reserved = file.offset
        """The bytes that are reserved in the quota."""

    @property
    def state(self) -> UploadState:
        """The state for the response."""
        return UploadState(self.id, self.name, self.file.offset)


class Uploads:
    """The uploads of a registry; methods block, so async code calls them in threads."""

    def __init__(self, registry: Registry) -> None:
        """Start without hashes in memory."""
        self._registry = registry
        self._database = registry.database
        self._directory = registry.settings.uploads
        self._limits = registry.settings.limits
        self._hashes: OrderedDict[str, RunningHash] = OrderedDict()
        self._hashes_lock = threading.Lock()

    def start(self, identity: Identity, name: RepositoryName, algorithm: str) -> OpenUpload:
        """Start an upload.

        Raises:
            ExpertError: when the user may not push there, or the disk is full.
        """
        upload_id = secrets.token_hex(16)
        with self._database.write_relaxed() as connection:
            target = authorise_repository(connection, identity, Action.PUSH, name)
            repository = _get_or_create_repository(connection, target)
            now = time.time()
            _check_open_uploads(connection, identity)
            row = {"id": upload_id, "repository_id": repository.id, "user_id": identity.user_id}
            connection.execute(insert(UPLOADS).values(**row, size=0, created=now, updated=now))
            self._require_free_space(0)
            file = create_upload_file(self._directory / upload_id, algorithm)
        return OpenUpload(name, upload_id, file)

    def start_draft(self, identity: Identity, name: RepositoryName, algorithm: str) -> OpenUpload:
        """Start an upload that is small and ends with this request, so it needs no row.

        Raises:
            ExpertError: when the user may not push there, or the disk is full.
        """
        with self._database.read() as connection:
            authorise_repository(connection, identity, Action.PUSH, name)
        self._require_free_space(0)
        upload_id = secrets.token_hex(16)
        file = create_upload_file(self._directory / upload_id, algorithm)
        return OpenUpload(name, upload_id, file, draft=True)

    def open(self, identity: Identity, name: RepositoryName, upload_id: str) -> OpenUpload:
        """Open an upload of this user in this repository to continue it.

        Raises:
            OciError: BLOB_UPLOAD_UNKNOWN, or BLOB_UPLOAD_BUSY when another request writes to it.
            ExpertError: when the user may no longer push there.
        """
        with self._database.read() as connection:
            authorise_repository(connection, identity, Action.PUSH, name)
            size = _load_reserved_size(connection, identity, name, upload_id)
        with self._hashes_lock:
            running = self._hashes.pop(upload_id, None)
        upload = OpenUpload(name, upload_id, open_upload_file(self._directory / upload_id, running))
        upload.reserved = max(size, upload.file.offset)
        return upload

    def state(self, identity: Identity, name: RepositoryName, upload_id: str) -> UploadState:
        """Return the state of an upload.

        Raises:
            OciError: BLOB_UPLOAD_UNKNOWN.
            ExpertError: when the user may no longer push there.
        """
        with self._database.read() as connection:
            authorise_repository(connection, identity, Action.PUSH, name)
            _load_reserved_size(connection, identity, name, upload_id)
        with wrap_disk_errors():
            try:
                offset = (self._directory / upload_id).stat().st_size
            except FileNotFoundError as error:
                raise _upload_row_unknown() from error
        return UploadState(upload_id, name, offset)

    def reserve(self, upload: OpenUpload, size: int) -> None:
        """Reserve ``size`` bytes in total, before they are written.

        Raises:
            TooLargeError: when no blob may be that large.
            BudgetError: when the quota of the namespace is used up.
            DiskFullError: when the disk is.
        """
        self.check_blob_size(size)
        more = size - upload.reserved
        if more <= 0:
            return
        self._require_free_space(more)
        with self._database.write_relaxed() as connection:
            namespaces.require_quota(
                connection, _get_namespace(connection, upload), more, self._limits
            )
            _set_size(connection, upload.id, size)
        upload.reserved = size

    def reserve_ahead(self, upload: OpenUpload, size: int) -> None:
        """Reserve ``size`` bytes, and some of what may follow if there is space.

        Raises:
            BudgetError: as `reserve` does.
        """
        ahead = min(size + RESERVATION_STEP, self._limits.blob_bytes)
        try:
            self.reserve(upload, max(size, ahead))
        except BudgetError:
            self.reserve(upload, size)

    def check_blob_size(self, size: int) -> None:
        """Check the size of a blob.

        Raises:
            TooLargeError: when it is too large.
        """
        if size > self._limits.blob_bytes:
            raise TooLargeError(f"a blob has at most {self._limits.blob_bytes} bytes")

    def pause(self, upload: OpenUpload) -> None:
        """End the use of an unfinished upload by a request.

        Unreserved bytes are discarded; unused reservations are released.
        """
        if upload.file.closed:
            return
        if upload.draft:
            upload.file.discard()
            return
        try:
            if upload.file.offset > upload.reserved:
                upload.file.truncate(upload.reserved)
            if upload.reserved != upload.file.offset:
                with self._database.write_relaxed() as connection:
                    _set_size(connection, upload.id, upload.file.offset)
            with self._hashes_lock:
                self._hashes[upload.id] = upload.file.running_hash
                while len(self._hashes) > _MAX_CACHED_HASHES:
                    self._hashes.popitem(last=False)
        finally:
            upload.file.close()

    def finish(self, identity: Identity, upload: OpenUpload, digest: BlobDigest) -> None:
        """Turn an upload into a blob; on return it is durable and readable.

        Raises:
            OciError: DIGEST_INVALID when the digest differs; the upload is removed.
            ExpertError: when the user may no longer push, or there is no space.
        """
        found = upload.file.digest(digest.algorithm)
        if found != digest:
            self.remove(upload)
            raise OciError(OciCode.DIGEST_INVALID, f"the bytes that came have the digest {found}")
        upload.file.sync()
        with self._database.write() as connection:
            target = authorise_repository(connection, identity, Action.PUSH, upload.name)
            repository = _get_or_create_repository(connection, target)
            connection.execute(delete(UPLOADS).where(UPLOADS.c.id == upload.id))
            self._insert_blob(connection, target.namespace, digest, upload.file.offset)
            blobs.link_blob(connection, repository.id, digest)
            self._registry.storage.adopt(upload.file.path, digest)
            upload.file.close()  # from here on the file belongs to a blob, even if the commit fails
        self._registry.metrics.uploads.inc()

    def remove(self, upload: OpenUpload) -> None:
        """Cancel an upload."""
        with self._database.write_relaxed() as connection:
            connection.execute(delete(UPLOADS).where(UPLOADS.c.id == upload.id))
        upload.file.discard()

    def _insert_blob(
        self, connection: Connection, namespace: NamespaceRow, digest: BlobDigest, size: int
    ) -> None:
        if not blobs.is_used_in_namespace(connection, namespace.id, digest):
            namespaces.require_quota(connection, namespace, size, self._limits)
        blobs.insert_blob(connection, digest, size)

    def _require_free_space(self, needed_bytes: int) -> None:
        require_free_space(self._directory, needed_bytes, min_free_bytes=self._limits.free_bytes)


def require_free_space(folder: Path, needed_bytes: int, *, min_free_bytes: int) -> None:
    """Check that the disk keeps its minimum free space after ``arrived`` bytes.

    Raises:
        DiskFullError: when it does not.
    """
    with wrap_disk_errors():
        state = os.statvfs(folder)
    if state.f_bavail * state.f_frsize - needed_bytes < min_free_bytes:
        hint = "make room in the registry's data folder, or run `expertctl registry gc`"
        raise DiskFullError("the registry's disk is full", hint=hint)


def _get_or_create_repository(
    connection: Connection, target: RepositoryAccess
) -> rights.RepositoryRow:
    return rights.get_or_create_repository(
        connection, name=str(target.name), namespace_id=target.namespace.id
    )


def _check_open_uploads(connection: Connection, identity: Identity) -> None:
    own = UPLOADS.c.user_id == identity.user_id
    count = connection.execute(select(func.count()).select_from(UPLOADS).where(own)).scalar_one()
    if count >= MAX_OPEN_UPLOADS:
        hint = "finish or cancel some; abandoned ones are removed later"
        raise BudgetError(f"{identity.name} has {count} uploads in progress already", hint=hint)


def _load_reserved_size(
    connection: Connection, identity: Identity, name: RepositoryName, upload_id: str
) -> int:
    """Return the reserved bytes of an upload with this id, repository and user."""
    query = (
        select(UPLOADS.c.size)
        .join(REPOSITORIES, REPOSITORIES.c.id == UPLOADS.c.repository_id)
        .where(
            UPLOADS.c.id == upload_id,
            UPLOADS.c.user_id == identity.user_id,
            REPOSITORIES.c.name == str(name),
        )
    )
    size: int | None = connection.execute(query).scalar()
    if size is None:
        raise _upload_row_unknown()
    return size


def _get_namespace(connection: Connection, upload: OpenUpload) -> NamespaceRow:
    return namespaces.get_namespace(connection, upload.name.namespace)


def _set_size(connection: Connection, upload_id: str, size: int) -> None:
    own = UPLOADS.c.id == upload_id
    connection.execute(update(UPLOADS).where(own).values(size=size, updated=time.time()))


def _upload_row_unknown() -> OciError:
    return OciError(OciCode.BLOB_UPLOAD_UNKNOWN, "there is no such upload")
