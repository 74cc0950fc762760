"""Blob uploads: rows that say whose they are and what room they take, files that hold the bytes.

The room is taken in the database before bytes are written, and the bytes become a blob in one
transaction: the file is moved to its place while the write lock is held, and the commit is what
makes it readable. Whatever is interrupted leaves an upload that goes on, or a file that is removed
in time (`registry_server.operation.sweeping`).

The file of an upload says how much of it there is; so it goes on after a restart, hashed again.
"""

import os
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, delete, func, insert, select, update

from expertctl.errors import BudgetError, DiskFullError, TooLargeError
from registry_server.access import namespaces, quota
from registry_server.access.identity import Action, Identity
from registry_server.access.namespaces import NamespaceRow
from registry_server.database.tables import REPOSITORIES, UPLOADS
from registry_server.oci import blobs, repositories
from registry_server.oci.access import Target, authorise
from registry_server.oci.errors import OciCode, OciError
from registry_server.oci.names import RepositoryName
from registry_server.oci.upload_file import RunningHash, UploadFile, new_upload, open_upload
from registry_server.registry import Registry
from registry_server.storage.blob_digest import BlobDigest
from registry_server.storage.blobs import disk_errors

STEP = 64 << 20
"""How much room is taken at once for a body that does not say its length."""

MAX_OPEN = 1000
"""How many uploads of one user go on at once."""

_KEPT_HASHES = 512


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
        self.begun = file.offset
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
        self._folder = registry.settings.uploads
        self._limits = registry.settings.limits
        self._hashes: OrderedDict[str, RunningHash] = OrderedDict()
        self._remembering = threading.Lock()

    def start(self, identity: Identity, name: RepositoryName, algorithm: str) -> OpenUpload:
        """Begin an upload.

        Raises:
            ExpertError: when one may not push there, or the disk is full.
        """
        upload_id = secrets.token_hex(16)
        with self._database.jot() as connection:
            target = authorise(connection, identity, Action.PUSH, name)
            repository = _repository(connection, target)
            now = time.time()
            _demand_few(connection, identity)
            row = {"id": upload_id, "repository_id": repository.id, "user_id": identity.user_id}
            connection.execute(insert(UPLOADS).values(**row, size=0, created=now, updated=now))
            self._demand_disk(0)
            file = new_upload(self._folder / upload_id, algorithm)
        return OpenUpload(name, upload_id, file)

    def draft(self, identity: Identity, name: RepositoryName, algorithm: str) -> OpenUpload:
        """Begin an upload that is small and over with this request, so that it needs no row.

        Raises:
            ExpertError: when one may not push there, or the disk is full.
        """
        with self._database.read() as connection:
            authorise(connection, identity, Action.PUSH, name)
        self._demand_disk(0)
        upload_id = secrets.token_hex(16)
        file = new_upload(self._folder / upload_id, algorithm)
        return OpenUpload(name, upload_id, file, draft=True)

    def open(self, identity: Identity, name: RepositoryName, upload_id: str) -> OpenUpload:
        """Open an upload of this user in this repository to go on with it.

        Raises:
            OciError: BLOB_UPLOAD_UNKNOWN, or when another request writes to it.
            ExpertError: when one may not push there any more.
        """
        with self._database.read() as connection:
            authorise(connection, identity, Action.PUSH, name)
            size = _row_size(connection, identity, name, upload_id)
        with self._remembering:
            running = self._hashes.pop(upload_id, None)
        upload = OpenUpload(name, upload_id, open_upload(self._folder / upload_id, running))
        upload.reserved = max(size, upload.file.offset)
        return upload

    def state(self, identity: Identity, name: RepositoryName, upload_id: str) -> UploadState:
        """Tell how far an upload is.

        Raises:
            OciError: BLOB_UPLOAD_UNKNOWN.
            ExpertError: when one may not push there any more.
        """
        with self._database.read() as connection:
            authorise(connection, identity, Action.PUSH, name)
            _row_size(connection, identity, name, upload_id)
        with disk_errors():
            try:
                offset = (self._folder / upload_id).stat().st_size
            except FileNotFoundError as error:
                raise _unknown() from error
        return UploadState(upload_id, name, offset)

    def reserve(self, upload: OpenUpload, size: int) -> None:
        """Take room for ``size`` bytes in all, before they are written.

        Raises:
            TooLargeError: when no blob may be that large.
            BudgetError: when the quota of the namespace is used up.
            DiskFullError: when the disk is.
        """
        self.demand_size(size)
        more = size - upload.reserved
        if more <= 0:
            return
        self._demand_disk(more)
        with self._database.jot() as connection:
            quota.demand_room(connection, _namespace(connection, upload), more, self._limits)
            _set_size(connection, upload.id, size)
        upload.reserved = size

    def reserve_ahead(self, upload: OpenUpload, size: int) -> None:
        """Take room for ``size`` bytes, and where there is more, for what may follow them.

        Raises:
            BudgetError: as `reserve` does.
        """
        ahead = min(size + STEP, self._limits.blob_bytes)
        try:
            self.reserve(upload, max(size, ahead))
        except BudgetError:
            self.reserve(upload, size)

    def demand_size(self, size: int) -> None:
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
                with self._database.jot() as connection:
                    _set_size(connection, upload.id, upload.file.offset)
            with self._remembering:
                self._hashes[upload.id] = upload.file.hash
                while len(self._hashes) > _KEPT_HASHES:
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
            target = authorise(connection, identity, Action.PUSH, upload.name)
            repository = _repository(connection, target)
            connection.execute(delete(UPLOADS).where(UPLOADS.c.id == upload.id))
            self._enter(connection, target.namespace, digest, upload.file.offset)
            blobs.link(connection, repository.id, digest)
            self._registry.storage.adopt(upload.file.path, digest)
            upload.file.close()  # whatever becomes of the commit, the file is a blob's from here on
        self._registry.metrics.uploads.inc()

    def remove(self, upload: OpenUpload) -> None:
        """Give an upload up."""
        with self._database.jot() as connection:
            connection.execute(delete(UPLOADS).where(UPLOADS.c.id == upload.id))
        upload.file.discard()

    def _enter(
        self, connection: Connection, namespace: NamespaceRow, digest: BlobDigest, size: int
    ) -> None:
        if not blobs.used_in_namespace(connection, namespace.id, digest):
            quota.demand_room(connection, namespace, size, self._limits)
        blobs.enter(connection, digest, size)

    def _demand_disk(self, more: int) -> None:
        demand_disk(self._folder, more, floor=self._limits.free_bytes)


def demand_disk(folder: Path, more: int, *, floor: int) -> None:
    """Demand that ``more`` bytes leave the disk with the free space that must stay.

    Raises:
        DiskFullError: when they would not.
    """
    with disk_errors():
        state = os.statvfs(folder)
    if state.f_bavail * state.f_frsize - more < floor:
        hint = "make room in the registry's data folder, or run `expertctl registry gc`"
        raise DiskFullError("the registry's disk is full", hint=hint)


def _repository(connection: Connection, target: Target) -> repositories.Repository:
    return repositories.find_or_create(
        connection, name=str(target.name), namespace_id=target.namespace.id
    )


def _demand_few(connection: Connection, identity: Identity) -> None:
    own = UPLOADS.c.user_id == identity.user_id
    count = connection.execute(select(func.count()).select_from(UPLOADS).where(own)).scalar_one()
    if count >= MAX_OPEN:
        hint = "finish or cancel some; those that nobody goes on with are removed in time"
        raise BudgetError(f"{count} uploads of {identity.name} go on already", hint=hint)


def _row_size(
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
        raise _unknown()
    return size


def _namespace(connection: Connection, upload: OpenUpload) -> NamespaceRow:
    return namespaces.get(connection, upload.name.namespace)


def _set_size(connection: Connection, upload_id: str, size: int) -> None:
    own = UPLOADS.c.id == upload_id
    connection.execute(update(UPLOADS).where(own).values(size=size, updated=time.time()))


def _unknown() -> OciError:
    return OciError(OciCode.BLOB_UPLOAD_UNKNOWN, "there is no such upload")
