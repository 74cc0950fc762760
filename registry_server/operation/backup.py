"""Copying a registry while it serves: the database at one moment, then every blob it knows.

Blobs never change, so the next backup into the same folder takes only new ones; on the same file
system a blob is linked, elsewhere copied and hashed on the way. An interrupted backup leaves the
one before it as it was. Uploads that go on are no part of it.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from expertctl.digest import CHUNK, hash_file
from expertctl.durable import make_folders, publish, remove_tree, staged_file, sync_folder
from expertctl.errors import DigestError, StoreError, UsageError
from registry_server.operation.backup_document import (
    BLOBS,
    DOCUMENT_NAME,
    STATE,
    STATE_FILES,
    BackupDocument,
)
from registry_server.settings import ServerSettings
from registry_server.storage.blob_digest import BlobDigest, new_hasher
from registry_server.storage.blobs import BlobStorage, disk_errors

_LOCK_NAME = "backup.lock"
_STAGING = "staging"


@dataclass(frozen=True, slots=True)
class Backup:
    """What a backup holds, and what of it was not there before."""

    blobs: int
    bytes: int
    new: int
    new_bytes: int


def back_up(settings: ServerSettings, target: Path) -> Backup:
    """Make or renew the backup in ``target``.

    Raises:
        UsageError: when something else is in that folder.
        StoreError: when the registry is damaged, or another backup runs.
        DiskFullError: when there is no room.
    """
    _demand_place(settings, target)
    with disk_errors(), _locked(target):
        staging = target / _STAGING
        remove_tree(staging)
        staging.mkdir(mode=0o700)
        _copy_state(settings, staging)
        blobs = _copy_blobs(settings, target, staging / STATE_FILES[0])
        state = {name: hash_file(staging / name)[1] for name in STATE_FILES}
        for name, digest in state.items():
            publish(staging / name, target / STATE / digest.hex)
        sync_folder(target / STATE)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        BackupDocument(now, state, blobs.blobs, blobs.bytes).write(target)
        remove_tree(staging)
        _drop_older(target, {digest.hex for digest in state.values()})
    return blobs


def copy_blob(source: Path, target: Path, digest: BlobDigest) -> None:
    """Copy a blob and hash it on the way; it appears whole or not at all.

    Raises:
        DigestError: when the bytes are not those of the digest.
    """
    make_folders(target.parent, mode=0o700)
    temporary = target.with_name(f".{target.name}.tmp")
    hasher = new_hasher(digest.algorithm)
    try:
        with source.open("rb", buffering=0) as stream, staged_file(temporary) as write:
            while piece := stream.read(CHUNK):
                hasher.update(piece)
                write(memoryview(piece))
        if hasher.hexdigest() != digest.hex:
            raise DigestError(f"{source}: the bytes are not those of {digest}")
        publish(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(target.parent)


def known_blobs(database: Path) -> list[tuple[BlobDigest, int]]:
    """Return digest and size of every blob in a database file.

    Raises:
        StoreError: when it is damaged.
    """
    with _connected(database) as connection:
        rows = connection.execute("SELECT digest, size FROM blobs ORDER BY digest").fetchall()
    return [(BlobDigest.parse(str(digest)), int(size)) for digest, size in rows]


@contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as connection:
            connection.execute("PRAGMA trusted_schema=OFF")
            yield connection
    except sqlite3.Error as error:
        raise StoreError(f"{path}: the database cannot be read: {error}") from error


def _demand_place(settings: ServerSettings, target: Path) -> None:
    if target == settings.data or settings.data in target.parents:
        hint = "name a folder outside of the data folder, at best on another disk"
        raise UsageError(f"{target}: a backup cannot lie in the registry itself", hint=hint)
    with disk_errors():
        make_folders(target, mode=0o700)
        own = {DOCUMENT_NAME, _LOCK_NAME, _STAGING, STATE, BLOBS}
        foreign = sorted({path.name for path in target.iterdir()} - own)
    if foreign:
        message = f"{target} holds {', '.join(foreign[:3])}, which is no part of a backup"
        raise UsageError(message, hint="name a new folder, or that of an earlier backup")


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    try:
        with FileLock(target / _LOCK_NAME, timeout=0, mode=0o600, thread_local=False):
            make_folders(target / STATE, mode=0o700)
            make_folders(target / BLOBS, mode=0o700)
            yield
    except Timeout as error:
        raise StoreError(
            f"{target}: another backup is written there", hint="wait for it"
        ) from error


def _copy_state(settings: ServerSettings, staging: Path) -> None:
    """Copy the database as it is at one moment, then what never changes beside it."""
    for name in STATE_FILES[1:]:
        (staging / name).parent.mkdir(mode=0o700, exist_ok=True)
        with staged_file(staging / name, mode=0o600) as write:
            write(memoryview((settings.data / name).read_bytes()))
    if not settings.database.exists():
        raise StoreError(f"{settings.database} is not there")
    snapshot = staging / STATE_FILES[0]
    with _connected(settings.database) as source, _connected(snapshot) as copy:
        source.backup(copy)
        copy.execute("DELETE FROM uploads")
        copy.execute("PRAGMA journal_mode=DELETE")
    snapshot.chmod(0o600)
    with snapshot.open("rb") as stream:
        os.fsync(stream.fileno())


def _copy_blobs(settings: ServerSettings, target: Path, snapshot: Path) -> Backup:
    source, copies = BlobStorage(settings.blobs), BlobStorage(target / BLOBS)
    known = known_blobs(snapshot)
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
    _forget(snapshot, gone)
    total = sum(size for digest, size in known if digest not in set(gone))
    return Backup(len(known) - len(gone), total, len(new), sum(new))


def _link_or_copy(source: Path, target: Path, digest: BlobDigest) -> None:
    make_folders(target.parent, mode=0o700)
    target.unlink(missing_ok=True)  # of another size: what a crash of the system left
    try:
        os.link(source, target)
    except OSError:
        copy_blob(source, target, digest)
    else:
        sync_folder(target.parent)


def _forget(snapshot: Path, gone: list[BlobDigest]) -> None:
    """Take blobs out of the copy that were collected since; nothing that is needed is.

    Raises:
        StoreError: when a manifest needs one: then it is not garbage that is missing.
    """
    with _connected(snapshot) as copy:
        for digest in map(str, gone):
            query = "SELECT count(*) FROM manifest_links WHERE digest = ?"
            if copy.execute(query, (digest,)).fetchone()[0]:
                hint = "`expertctl registry restore` an older backup, or publish it again"
                raise StoreError(f"blob {digest} is needed and not in the storage", hint=hint)
            copy.execute("DELETE FROM repository_blobs WHERE digest = ?", (digest,))
            copy.execute("DELETE FROM blobs WHERE digest = ?", (digest,))


def _drop_older(target: Path, state: set[str]) -> None:
    """Remove what only earlier backups needed."""
    document = BackupDocument.read(target)
    snapshot = target / STATE / document.state[STATE_FILES[0]].hex
    needed = {digest for digest, _ in known_blobs(snapshot)}
    copies = BlobStorage(target / BLOBS)
    for blob in copies.blobs():
        if blob.digest not in needed:
            copies.remove(blob.digest)
    for path in (target / STATE).iterdir():
        if path.name not in state:
            path.unlink()
