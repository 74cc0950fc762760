"""Backups of a running registry.

::

    TARGET/backup.json
    TARGET/state/<sha256>                the database, the settings and the index key
    TARGET/blobs/<algorithm>/ab/<hex>    the blobs in the database

A backup copies the database as of one moment, then every blob in it. ``backup.json`` lists the
contents and is written last, so a folder without it is not a backup. Blobs never change, so the
next backup into the same folder copies only new ones; on the same file system they are linked,
elsewhere copied and hashed. An interrupted backup leaves the previous one intact. Uploads in
progress are not included.
"""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from expertctl.digest import READ_CHUNK, Digest, hash_file
from expertctl.errors import (
    DigestError,
    ExpertError,
    InvalidPackageError,
    NotFoundError,
    StoreError,
    UsageError,
)
from expertctl.files import (
    make_folders,
    open_regular_file,
    open_staged_file,
    publish_file,
    remove_tree,
    sync_folder,
    write_atomic,
)
from expertctl.schema.strict_json import JsonObject, load_object
from registry_server.registry import BlobDigest, BlobStorage, create_hasher, wrap_disk_errors
from registry_server.settings import ServerSettings

BACKUP_NAME = "backup.json"
STATE_FOLDER = "state"
BLOBS_FOLDER = "blobs"
STATE_FILES = ("registry.db", "registry.toml", "keys/index.pem")
"""Paths in the data folder; links and other names are not backed up."""

BACKUP_FORMAT = 1
_MAX_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class BackupDocument:
    """The document of a backup; ``state`` maps `STATE_FILES` to digests."""

    created: str
    state: dict[str, Digest]
    blobs: int
    bytes: int

    def write(self, target: Path) -> None:
        """Write the document to ``target``, which completes the backup, atomically."""
        document = {
            "format": BACKUP_FORMAT,
            "created": self.created,
            "state": {name: str(digest) for name, digest in self.state.items()},
            "blobs": self.blobs,
            "bytes": self.bytes,
        }
        text = json.dumps(document, indent=2) + "\n"
        write_atomic(target / BACKUP_NAME, text.encode("utf-8"), mode=0o600)

    @classmethod
    def read(cls, target: Path) -> "BackupDocument":
        """Read the document of a backup.

        Raises:
            NotFoundError: when there is no finished backup.
            InvalidPackageError: when the document is damaged, or from a newer version.
        """
        path = target / BACKUP_NAME
        if not path.exists():
            hint = "name the folder that `expertctl registry backup` wrote"
            raise NotFoundError(f"{target}: there is no finished backup here", hint=hint)
        with open_regular_file(path) as stream:
            data = stream.read(_MAX_BYTES + 1)
        return cls._parse(load_object(data, what=str(path), max_bytes=_MAX_BYTES), path)

    @classmethod
    def _parse(cls, document: JsonObject, path: Path) -> "BackupDocument":
        state, created = document.get("state"), document.get("created")
        counts = [document.get("blobs"), document.get("bytes")]
        known = document.get("format") == BACKUP_FORMAT and isinstance(created, str)
        if not known or not isinstance(state, dict) or set(state) != set(STATE_FILES):
            raise InvalidPackageError(str(path), ["not a backup that this version can read"])
        blobs, size = (c if isinstance(c, int) else -1 for c in counts)
        try:
            digests = {name: Digest.parse(str(state[name])) for name in STATE_FILES}
        except ExpertError as error:
            raise InvalidPackageError(str(path), [error.message]) from error
        return cls(str(created), digests, blobs, size)


_LOCK_NAME = "backup.lock"
_STAGING = "staging"


@dataclass(frozen=True, slots=True)
class BackupSummary:
    """The contents of a backup, and how much of them is new."""

    blobs: int
    bytes: int
    new: int
    new_bytes: int


def create_backup(settings: ServerSettings, target: Path) -> BackupSummary:
    """Create or update the backup in ``target``.

    Raises:
        UsageError: when the folder contains something else.
        StoreError: when the registry is damaged, or another backup runs.
        DiskFullError: when there is no room.
    """
    _check_target(settings, target)
    with wrap_disk_errors(), _lock_target(target):
        staging = target / _STAGING
        remove_tree(staging)
        staging.mkdir(mode=0o700)
        _copy_state_files(settings, staging)
        blobs = _copy_blobs(settings, target, staging / STATE_FILES[0])
        state = {name: hash_file(staging / name)[1] for name in STATE_FILES}
        for name, digest in state.items():
            publish_file(staging / name, target / STATE_FOLDER / digest.hex)
        sync_folder(target / STATE_FOLDER)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        BackupDocument(now, state, blobs.blobs, blobs.bytes).write(target)
        remove_tree(staging)
        _prune(target, {digest.hex for digest in state.values()})
    return blobs


def copy_blob(source: Path, target: Path, digest: BlobDigest) -> None:
    """Copy and hash a blob, atomically.

    Raises:
        DigestError: when the bytes do not match the digest.
    """
    make_folders(target.parent, mode=0o700)
    temporary = target.with_name(f".{target.name}.tmp")
    hasher = create_hasher(digest.algorithm)
    try:
        with source.open("rb", buffering=0) as stream, open_staged_file(temporary) as write:
            while piece := stream.read(READ_CHUNK):
                hasher.update(piece)
                write(memoryview(piece))
        if hasher.hexdigest() != digest.hex:
            raise DigestError(f"{source}: the bytes are not those of {digest}")
        publish_file(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(target.parent)


def list_known_blobs(database: Path) -> list[tuple[BlobDigest, int]]:
    """Return the digest and size of every blob in a database file.

    Raises:
        StoreError: when it is damaged.
    """
    with _connect(database) as connection:
        rows = connection.execute("SELECT digest, size FROM blobs ORDER BY digest").fetchall()
    return [(BlobDigest.parse(str(digest)), int(size)) for digest, size in rows]


@contextmanager
def _connect(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as connection:
            connection.execute("PRAGMA trusted_schema=OFF")
            yield connection
    except sqlite3.Error as error:
        raise StoreError(f"{path}: the database cannot be read: {error}") from error


def _check_target(settings: ServerSettings, target: Path) -> None:
    if target == settings.data or settings.data in target.parents:
        hint = "name a folder outside of the data folder, at best on another disk"
        raise UsageError(f"{target}: a backup cannot lie in the registry itself", hint=hint)
    with wrap_disk_errors():
        make_folders(target, mode=0o700)
        own = {BACKUP_NAME, _LOCK_NAME, _STAGING, STATE_FOLDER, BLOBS_FOLDER}
        foreign = sorted({path.name for path in target.iterdir()} - own)
    if foreign:
        message = f"{target} holds {', '.join(foreign[:3])}, which does not belong to a backup"
        raise UsageError(message, hint="name a new folder, or that of an earlier backup")


@contextmanager
def _lock_target(target: Path) -> Iterator[None]:
    try:
        with FileLock(target / _LOCK_NAME, timeout=0, mode=0o600, thread_local=False):
            make_folders(target / STATE_FOLDER, mode=0o700)
            make_folders(target / BLOBS_FOLDER, mode=0o700)
            yield
    except Timeout as error:
        raise StoreError(
            f"{target}: another backup is written there", hint="wait for it"
        ) from error


def _copy_state_files(settings: ServerSettings, staging: Path) -> None:
    """Copy the database as of one moment, then the settings and the index key."""
    for name in STATE_FILES[1:]:
        (staging / name).parent.mkdir(mode=0o700, exist_ok=True)
        with open_staged_file(staging / name, mode=0o600) as write:
            write(memoryview((settings.data / name).read_bytes()))
    if not settings.database.exists():
        raise StoreError(f"{settings.database} is not there")
    snapshot = staging / STATE_FILES[0]
    with _connect(settings.database) as source, _connect(snapshot) as copy:
        source.backup(copy)
        copy.execute("DELETE FROM uploads")
        copy.execute("PRAGMA journal_mode=DELETE")
    snapshot.chmod(0o600)
    with snapshot.open("rb") as stream:
        os.fsync(stream.fileno())


def _copy_blobs(settings: ServerSettings, target: Path, snapshot: Path) -> BackupSummary:
    source, copies = BlobStorage(settings.blobs), BlobStorage(target / BLOBS_FOLDER)
    known = list_known_blobs(snapshot)
    new: list[int] = []
    gone: list[BlobDigest] = []
    for digest, size in known:
        if copies.size(digest) == size:
            continue
        if source.size(digest) is None:
            gone.append(digest)
            continue
        _link_or_copy(source.path(digest), copies.path(digest), digest)
        new.append(size)
    _drop_missing_blobs(snapshot, gone)
    total = sum(size for digest, size in known if digest not in set(gone))
    return BackupSummary(len(known) - len(gone), total, len(new), sum(new))


def _link_or_copy(source: Path, target: Path, digest: BlobDigest) -> None:
    make_folders(target.parent, mode=0o700)
    target.unlink(missing_ok=True)  # of another size: left by a system crash
    try:
        os.link(source, target)
    except OSError:
        copy_blob(source, target, digest)
    else:
        sync_folder(target.parent)


def _drop_missing_blobs(snapshot: Path, gone: list[BlobDigest]) -> None:
    """Delete blobs from the copied database that were collected since.

    Raises:
        StoreError: when a manifest references one, so it was not garbage.
    """
    with _connect(snapshot) as copy:
        for digest in map(str, gone):
            query = "SELECT count(*) FROM manifest_links WHERE digest = ?"
            if copy.execute(query, (digest,)).fetchone()[0]:
                hint = "`expertctl registry restore` an older backup, or publish it again"
                raise StoreError(f"blob {digest} is needed and not in the storage", hint=hint)
            copy.execute("DELETE FROM repository_blobs WHERE digest = ?", (digest,))
            copy.execute("DELETE FROM blobs WHERE digest = ?", (digest,))


def _prune(target: Path, state: set[str]) -> None:
    """Remove files that only earlier backups needed."""
    document = BackupDocument.read(target)
    snapshot = target / STATE_FOLDER / document.state[STATE_FILES[0]].hex
    needed = {digest for digest, _ in list_known_blobs(snapshot)}
    copies = BlobStorage(target / BLOBS_FOLDER)
    for blob in copies.list_blobs():
        if blob.digest not in needed:
            copies.remove(blob.digest)
    for path in (target / STATE_FOLDER).iterdir():
        if path.name not in state:
            path.unlink()
