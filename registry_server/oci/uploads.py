"""The file of one blob upload while it is open: appended to, hashed as it grows, locked.

One request at a time writes to an upload, over all processes of the server: the file is locked as
long as it is open. Writing and hashing happen in threads; closing waits for the one that writes.
Bytes that a request leaves behind never change, so what was hashed of them stays right.

Blob uploads: rows that say whose they are and what room they take, files that hold the bytes.

The room is taken in the database before bytes are written, and the bytes become a blob in one
transaction: the file is moved to its place while the write lock is held, and the commit is what
makes it readable. Whatever is interrupted leaves an upload that goes on, or a file that is removed
in time (`registry_server.app`).

The file of an upload says how much of it there is; so it goes on after a restart, hashed again.
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
from registry_server.access import namespaces
from registry_server.access.namespaces import NamespaceRow
from registry_server.access.rights import Action, Identity
from registry_server.blob_storage import BlobDigest, Hasher, create_hasher, wrap_disk_errors
from registry_server.database.tables import REPOSITORIES, UPLOADS
from registry_server.errors import OciCode, OciError
from registry_server.oci import blobs, repositories
from registry_server.oci.repositories import RepositoryAccess, RepositoryName, authorise_repository
from registry_server.registry import Registry

_READ_BYTES = 1 << 20


@dataclass(slots=True)
class RunningHash:
    """The hash of the first ``size`` bytes of an upload."""

    algorithm: str
    size: int
    hasher: Hasher

    @classmethod
    def new(cls, algorithm: str) -> "RunningHash":
        """Begin at the beginning."""
        return cls(algorithm, 0, create_hasher(algorithm))

    def update(self, data: memoryview | bytes) -> None:
        """Take in the bytes that come next."""
        self.hasher.update(data)
        self.size += len(data)


class UploadFile:
    """An open upload; ``offset`` bytes of it are on the file system."""

    def __init__(self, path: Path, handle: int, running: RunningHash) -> None:
        """Keep an open and locked file; `open_upload_file` makes one."""
        self.path = path
        self.offset = os.fstat(handle).st_size
        self.running_hash = running if running.size <= self.offset else RunningHash.new("sha256")
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
        with self._writing, wrap_disk_errors():
            done = 0
            while done < len(view):
                done += os.pwrite(self._descriptor(), view[done:], self.offset + done)
            if self.running_hash.size == self.offset:
                self.running_hash.update(view)
            self.offset += len(view)

    def truncate(self, size: int) -> None:
        """Forget what this request wrote behind ``size``."""
        with self._writing, wrap_disk_errors():
            os.ftruncate(self._descriptor(), size)
            self.offset = size
            if self.running_hash.size > size:
                self.running_hash = RunningHash.new(self.running_hash.algorithm)

    def digest(self, algorithm: str) -> BlobDigest:
        """Return the digest of the whole file; what was not hashed as it came is read again."""
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
        """Make the bytes durable, under the mode that blobs have."""
        with wrap_disk_errors():
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
        with wrap_disk_errors():
            self.path.unlink(missing_ok=True)
        self.close()

    def _descriptor(self) -> int:
        assert self._handle is not None
        return self._handle


def open_upload_file(path: Path, running: RunningHash | None = None) -> UploadFile:
    """Open an upload that is there.

    Raises:
        OciError: when it is gone, or another request writes to it.
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
    """Make the file of an upload that begins.

    Raises:
        DiskFullError: when there is no room.
        StoreError: when the disk fails.
    """
    with wrap_disk_errors():
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600)
        _lock_file(handle)
    return UploadFile(path, handle, RunningHash.new(algorithm))


def _is_same_file(path: Path, handle: int) -> bool:
    """Tell whether a file that is locked now is still an upload, and did not just become a blob."""
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
        hint = "ask for its state in a moment, then go on from there"
        headers = {"Retry-After": "1"}
        raise OciError(OciCode.UPLOAD_BUSY, fact, hint=hint, headers=headers) from error


RESERVATION_STEP = 64 << 20
"""How much room is taken at once for a body that does not say its length."""

MAX_OPEN_UPLOADS = 1000
"""How many uploads of one user go on at once."""

_MAX_CACHED_HASHES = 512


@dataclass(frozen=True, slots=True)
class UploadState:
    """An upload that goes on, between requests."""

    id: str
    name: RepositoryName
    offset: int


class OpenUpload:
    """An upload that one request writes to."""

    def __init__(
        self, name: RepositoryName, upload_id: str, file: UploadFile, *, draft: bool = False
    ) -> None:
        """Keep the open file; `begun` is where this request began to write."""
        self.name = name
        self.id = upload_id
        self.file = file
        self.draft = draft
        """Whether it has no row, and ends with the request."""
        self.start_offset = file.offset
        self.reserved = file.offset
        """Up to here there is room in the quota."""

    @property
    def state(self) -> UploadState:
        """What the client is told."""
        return UploadState(self.id, self.name, self.file.offset)


class Uploads:
    """All uploads of a registry; every method blocks, so async code calls them in threads."""

    def __init__(self, registry: Registry) -> None:
        """Remember no hash yet."""
        self._registry = registry
        self._database = registry.database
        self._directory = registry.settings.uploads
        self._limits = registry.settings.limits
        self._hashes: OrderedDict[str, RunningHash] = OrderedDict()
        self._hashes_lock = threading.Lock()

    def start(self, identity: Identity, name: RepositoryName, algorithm: str) -> OpenUpload:
        """Begin an upload.

        Raises:
            ExpertError: when one may not push there, or the disk is full.
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
        """Begin an upload that is small and over with this request, so that it needs no row.

        Raises:
            ExpertError: when one may not push there, or the disk is full.
        """
        with self._database.read() as connection:
            authorise_repository(connection, identity, Action.PUSH, name)
        self._require_free_space(0)
        upload_id = secrets.token_hex(16)
        file = create_upload_file(self._directory / upload_id, algorithm)
        return OpenUpload(name, upload_id, file, draft=True)

    def open(self, identity: Identity, name: RepositoryName, upload_id: str) -> OpenUpload:
        """Open an upload of this user in this repository to go on with it.

        Raises:
            OciError: BLOB_UPLOAD_UNKNOWN, or when another request writes to it.
            ExpertError: when one may not push there any more.
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
        """Tell how far an upload is.

        Raises:
            OciError: BLOB_UPLOAD_UNKNOWN.
            ExpertError: when one may not push there any more.
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
        """Take room for ``size`` bytes in all, before they are written.

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
        """Take room for ``size`` bytes, and where there is more, for what may follow them.

        Raises:
            BudgetError: as `reserve` does.
        """
        ahead = min(size + RESERVATION_STEP, self._limits.blob_bytes)
        try:
            self.reserve(upload, max(size, ahead))
        except BudgetError:
            self.reserve(upload, size)

    def check_blob_size(self, size: int) -> None:
        """Refuse what is larger than a blob may be.

        Raises:
            TooLargeError: when it is.
        """
        if size > self._limits.blob_bytes:
            raise TooLargeError(f"a blob has at most {self._limits.blob_bytes} bytes")

    def pause(self, upload: OpenUpload) -> None:
        """End what one request does with an upload that is not finished.

        Bytes without room in the quota are forgotten, room without bytes is given back.
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
        """Make a blob of an upload: when this returns, it is durable and readable.

        Raises:
            OciError: DIGEST_INVALID when the bytes are others; the upload is gone then.
            ExpertError: when one may not push any more, or there is no room.
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
            upload.file.close()  # whatever becomes of the commit, the file is a blob's from here on
        self._registry.metrics.uploads.inc()

    def remove(self, upload: OpenUpload) -> None:
        """Give an upload up."""
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
    """Demand that ``arrived`` bytes leave the disk with the free space that must stay.

    Raises:
        DiskFullError: when they would not.
    """
    with wrap_disk_errors():
        state = os.statvfs(folder)
    if state.f_bavail * state.f_frsize - needed_bytes < min_free_bytes:
        hint = "make room in the registry's data folder, or run `expertctl registry gc`"
        raise DiskFullError("the registry's disk is full", hint=hint)


def _get_or_create_repository(
    connection: Connection, target: RepositoryAccess
) -> repositories.RepositoryRow:
    return repositories.get_or_create_repository(
        connection, name=str(target.name), namespace_id=target.namespace.id
    )


def _check_open_uploads(connection: Connection, identity: Identity) -> None:
    own = UPLOADS.c.user_id == identity.user_id
    count = connection.execute(select(func.count()).select_from(UPLOADS).where(own)).scalar_one()
    if count >= MAX_OPEN_UPLOADS:
        hint = "finish or cancel some; those that nobody goes on with are removed in time"
        raise BudgetError(f"{count} uploads of {identity.name} go on already", hint=hint)


def _load_reserved_size(
    connection: Connection, identity: Identity, name: RepositoryName, upload_id: str
) -> int:
    """Find an upload by its id, its repository and its user, all three."""
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
