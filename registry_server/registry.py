"""`Registry`: the shared state of the server: settings, database, blobs, index key and counters.

The index key signs every index document. ``registry init`` creates it once. If it is missing,
damaged, or not the key that signed so far, nothing can be published: clients trust only the key
whose fingerprint they pinned.

Downloads are counted in memory and written from time to time: writing at each request would make
readers wait for writers. The first fetch after a pause is written at once, the following ones
together. A killed process loses unwritten counts, which is acceptable for statistics.

`BlobStorage` keeps one file per blob, named by its digest (sha256, or sha512, which OCI registers
as well), written once and never changed::

    FOLDER/<algorithm>/<first two hex digits>/<hex>

The rest of the server accesses blobs only through its methods. Files are added (`adopt`) and
removed (`remove`) only under the write lock of the database, so garbage collection cannot remove a
blob that was just uploaded again. A file without a row is garbage; a row without a file is damage.
"""

import errno
import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Protocol, Self

from sqlalchemy import Connection, select, update

from expertctl.digest import Digest
from expertctl.errors import (
    DigestError,
    DiskFullError,
    ExpertError,
    NotFoundError,
    SignatureError,
    StoreError,
)
from expertctl.files import make_folders, sync_folder
from expertctl.registry.index_document import INDEX_PAYLOAD_TYPE, MAX_ENVELOPE
from expertctl.trust.dsse import DsseEnvelope
from expertctl.trust.keys import KeyRing, PrivateKey
from registry_server.access.namespaces import check_used_bytes
from registry_server.database.connection import Database
from registry_server.database.tables import BLOBS, NAMESPACES, PACKAGES, RELEASES, SIGNED_FORMS
from registry_server.operation.metrics import RegistryMetrics
from registry_server.settings import DAY, ServerSettings

DIGEST_LENGTHS = {"sha256": 64, "sha512": 128}
"""Algorithm → number of hex digits."""

_HEX = re.compile(r"[0-9a-f]+")


class Hasher(Protocol):
    """The interface of `hashlib` hash objects."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Hash more bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""


@dataclass(frozen=True, slots=True, order=True)
class BlobDigest:
    """``algorithm:hex``; created only by `parse` and `compute`, so it is safe in a file name."""

    algorithm: str
    hex: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a digest of a known algorithm, in lower-case hex.

        Raises:
            DigestError: for any other text.
        """
        algorithm, _, value = text.partition(":")
        if DIGEST_LENGTHS.get(algorithm) != len(value) or not _HEX.fullmatch(value):
            raise DigestError(f"{text[:160]!r} is not a sha256 or sha512 digest")
        return cls(algorithm, value)

    @classmethod
    def compute(cls, data: bytes, *, algorithm: str = "sha256") -> Self:
        """Return the digest of bytes in memory."""
        hasher = create_hasher(algorithm)
        hasher.update(data)
        return cls(algorithm, hasher.hexdigest())

    def __str__(self) -> str:
        """Return ``algorithm:hex``."""
        return f"{self.algorithm}:{self.hex}"


def create_hasher(algorithm: str) -> Hasher:
    """Start hashing with a known algorithm."""
    assert algorithm in DIGEST_LENGTHS
    return hashlib.new(algorithm, usedforsecurity=True)


AnyDigest = BlobDigest | Digest
_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A file of the storage, as listed."""

    digest: BlobDigest
    size: int
    modified: float
    """When it was added, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class BlobStorage:
    """Stores blobs in a folder; each is complete and durable, or absent."""

    folder: Path

    def path(self, digest: AnyDigest) -> Path:
        """Return the path of a blob, whether it exists or not."""
        algorithm, _, value = str(digest).partition(":")
        return self.folder / algorithm / value[:2] / value

    @contextmanager
    def open(self, digest: AnyDigest) -> Iterator[BinaryIO]:
        """Open a blob for reading, unbuffered.

        Raises:
            NotFoundError: when there is no such blob.
            StoreError: when the disk fails.
        """
        with wrap_disk_errors(), self._open_file(digest) as stream:
            yield stream

    def size(self, digest: AnyDigest) -> int | None:
        """Return the size of a blob in bytes; None if it does not exist."""
        with wrap_disk_errors():
            try:
                return self.path(digest).stat().st_size
            except FileNotFoundError:
                return None

    def adopt(self, temporary: Path, digest: AnyDigest) -> None:
        """Move a file with this digest into the storage: flushed, and on the same file system.

        Raises:
            DiskFullError: when there is no room.
            StoreError: when the disk fails, or the folder of the storage is missing.
        """
        target = self.path(digest)
        with wrap_disk_errors():
            self.folder.stat()  # a new folder would hide the blobs when the disk is back
            make_folders(target.parent)
            temporary.replace(target)
            sync_folder(target.parent)

    def remove(self, digest: AnyDigest) -> None:
        """Remove a blob, if it exists."""
        with wrap_disk_errors():
            self.path(digest).unlink(missing_ok=True)

    def list_blobs(self) -> Iterator[StoredBlob]:
        """List all blobs; ignore other files."""
        with wrap_disk_errors():
            for file in sorted(self.folder.glob("*/??/*")):
                if (digest := _parse_blob_path(file)) and self.path(digest) == file:
                    with suppress(FileNotFoundError):  # removed since it was listed
                        entry = file.stat()
                        yield StoredBlob(digest, entry.st_size, entry.st_mtime)

    def _open_file(self, digest: AnyDigest) -> BinaryIO:
        try:
            return self.path(digest).open("rb", buffering=0)
        except FileNotFoundError as error:
            raise NotFoundError(f"blob {digest} is not in the storage") from error


@contextmanager
def wrap_disk_errors() -> Iterator[None]:
    """Convert errors of the file system; a full disk has its own.

    Raises:
        DiskFullError: when there is no room.
        StoreError: for any other error.
    """
    try:
        yield
    except OSError as error:
        fact = error.strerror or str(error)
        if error.errno in _DISK_FULL_ERRNOS:
            raise DiskFullError(f"the registry's disk is full: {fact}") from error
        raise StoreError(f"the registry's disk fails: {fact}", hint="try again later") from error


def _parse_blob_path(file: Path) -> BlobDigest | None:
    try:
        return BlobDigest.parse(f"{file.parent.parent.name}:{file.name}")
    except DigestError:
        return None


_RESTORE_KEY_HINT = "restore it from a backup: clients have pinned this key and trust no other"


@dataclass(frozen=True, slots=True)
class IndexSigner:
    """The key that signs index documents, and the interval that they state."""

    key: PrivateKey
    interval_days: int

    @property
    def renewal_seconds(self) -> float:
        """The age at which a document is signed again: half of the interval."""
        return self.interval_days * DAY / 2


def create_index_key(path: Path) -> PrivateKey:
    """Create the index key of a new registry.

    Raises:
        UsageError: when there is a key already; it is never overwritten.
    """
    return KeyRing(path.parent).create(path.stem)


def load_index_key(path: Path) -> PrivateKey:
    """Read the index key of a registry.

    Raises:
        StoreError: when it is missing, damaged, or readable by others.
    """
    try:
        return KeyRing(path.parent).read_private(path.stem)
    except ExpertError as error:
        message = f"the registry's index key cannot be used: {error.message}"
        raise StoreError(
            message, hint=error.hint if path.exists() else _RESTORE_KEY_HINT
        ) from error
    except OSError as error:
        message = f"the registry's index key {path} cannot be read: {error.strerror}"
        raise StoreError(message, hint=_RESTORE_KEY_HINT) from error


def check_index_key(path: Path, expected: str) -> None:
    """Check that the key file still exists and contains the key with this id.

    Raises:
        StoreError: when it does not.
    """
    found = load_index_key(path).public.key_id
    if found != expected:
        message = f"{path} holds the key {found}, but this registry signs with {expected}"
        raise StoreError(message, hint=_RESTORE_KEY_HINT)


def check_same_signer(connection: Connection, key: PrivateKey) -> None:
    """Check that this key signed everything that was published so far.

    Raises:
        StoreError: when another key did.
    """
    query = select(PACKAGES.c.index_document).order_by(PACKAGES.c.id).limit(1)
    document = connection.execute(query).scalar_one_or_none()
    if document is None:
        return
    try:
        signed = DsseEnvelope.parse(
            document,
            payload_type=INDEX_PAYLOAD_TYPE,
            max_bytes=MAX_ENVELOPE,
            what="an index document",
        )
    except SignatureError as error:
        raise StoreError(f"the database is damaged: {error.message}") from error
    if signed.key_id != key.public.key_id:
        raise StoreError(
            f"the index key is {key.public.key_id}, but packages were signed by {signed.key_id}",
            hint=_RESTORE_KEY_HINT,
        )


MAX_PENDING_DOWNLOADS = 1000
"""Number of counted manifests at which all counts are written."""

FLUSH_SECONDS = 10.0
"""Minimum time between two writes of fewer counts, in seconds."""

ManifestFetch = tuple[str, str]
"""A repository, and a package digest fetched from it."""


class DownloadCounter:
    """Counts fetches of manifests until they are written to the database."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with all counts at zero."""
        self._pending: Counter[ManifestFetch] = Counter()
        self._lock = Lock()
        self._clock = clock
        self._last_flush: float | None = None

    def count(self, repository: str, digest: str) -> bool:
        """Count a fetch; return whether it is time to `flush`."""
        with self._lock:
            self._pending[repository, digest] += 1
            return len(self._pending) >= MAX_PENDING_DOWNLOADS or self._is_flush_due()

    def flush(self, database: Database) -> None:
        """Write the counts; if that fails, they are kept."""
        taken = self._take_pending()
        try:
            if taken:
                with database.write_relaxed() as connection:
                    for (repository, digest), times in sorted(taken.items()):
                        _add_downloads(connection, repository, digest, times)
        except BaseException:
            with self._lock:
                self._pending.update(taken)
            raise

    def _is_flush_due(self) -> bool:
        return self._last_flush is None or self._clock() - self._last_flush >= FLUSH_SECONDS

    def _take_pending(self) -> Counter[ManifestFetch]:
        with self._lock:
            self._last_flush = self._clock()
            taken, self._pending = self._pending, Counter()
            return taken


def _add_downloads(connection: Connection, repository: str, digest: str, times: int) -> None:
    """Add fetches of packages to their downloads; ignore fetches of other artifacts."""
    namespace, _, name = repository.partition("/")
    release = (
        select(SIGNED_FORMS.c.release_id)
        .join(RELEASES, RELEASES.c.id == SIGNED_FORMS.c.release_id)
        .join(PACKAGES, PACKAGES.c.id == RELEASES.c.package_id)
        .join(NAMESPACES, NAMESPACES.c.id == PACKAGES.c.namespace_id)
        .where(NAMESPACES.c.name == namespace, PACKAGES.c.name == name)
        .where(SIGNED_FORMS.c.package_digest == digest)
    )
    connection.execute(
        update(RELEASES)
        .where(RELEASES.c.id.in_(release))
        .values(downloads=RELEASES.c.downloads + times)
    )


@dataclass(frozen=True, slots=True)
class Registry:
    """An open registry."""

    settings: ServerSettings
    database: Database
    storage: BlobStorage
    index_key: PrivateKey
    metrics: RegistryMetrics = field(default_factory=RegistryMetrics)
    downloads: DownloadCounter = field(default_factory=DownloadCounter)

    @property
    def index_signer(self) -> IndexSigner:
        """The key that signs index documents, and the interval that they state."""
        return IndexSigner(self.index_key, self.settings.index_interval_days)

    def close(self) -> None:
        """Write the remaining counts, and close the database."""
        self.downloads.flush(self.database)
        self.database.close()

    def check_integrity(self) -> None:
        """Check the database, its sums, and that every blob in it exists with the right size.

        Raises:
            StoreError: when anything is damaged or missing.
        """
        self.database.check_integrity()
        with self.database.read() as connection:
            check_used_bytes(connection)
            rows = connection.execute(select(BLOBS.c.digest, BLOBS.c.size)).all()
        for digest, size in rows:
            if self.storage.size(BlobDigest.parse(digest)) != size:
                raise StoreError(f"blob {digest} is missing or has another size than {size}")


def open_registry(settings: ServerSettings) -> Registry:
    """Open an existing registry; migrate its tables.

    Raises:
        StoreError: when its key or its database cannot be used.
        DiskFullError: when there is no room.
    """
    key = load_index_key(settings.index_key)
    with wrap_disk_errors():
        make_folders(settings.uploads, mode=0o700)
        make_folders(settings.blobs, mode=0o700)
    database = Database.open(settings.database)
    try:
        with database.read() as connection:
            check_same_signer(connection, key)
    except StoreError:
        database.close()
        raise
    return Registry(settings, database, BlobStorage(settings.blobs), key)
