"""Making a registry out of a backup: everything is checked on the way, and appears at once.

Clients remember the revisions of the index documents that they saw, and refuse older ones. So those
of the restored registry get revisions that none of the lost changes can have reached.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, select, update

from expertctl.digest import hash_file
from expertctl.durable import make_folders, remove_tree, staged_file, sync_folder
from expertctl.errors import (
    DigestError,
    ExpertError,
    InvalidPackageError,
    UsageError,
)
from registry_server.database.tables import PACKAGES
from registry_server.operation.backup import copy_blob, known_blobs
from registry_server.operation.backup_document import BLOBS, STATE, STATE_FILES, BackupDocument
from registry_server.publishing.index import rewrite_index
from registry_server.publishing.index_key import IndexSigner
from registry_server.registry import open_registry
from registry_server.settings_file import read_settings
from registry_server.storage.blob_digest import BlobDigest
from registry_server.storage.blobs import BlobStorage, disk_errors

MAX_PROBLEMS = 20
CHANGES_A_SECOND = 10
"""More changes per second than a package gets, on average over the time since a backup."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What is in a registry that was restored."""

    blobs: int
    bytes: int


def restore(backup: Path, data: Path) -> Restored:
    """Make the registry of a backup in a folder that is not there, or empty.

    Raises:
        NotFoundError: when there is no finished backup.
        UsageError: when the folder is in use.
        InvalidPackageError: when anything of the backup is damaged; nothing is restored then.
        DiskFullError: when there is no room.
    """
    document = BackupDocument.read(backup)
    _demand_empty(data)
    with disk_errors():
        make_folders(data.parent)
        with _staging(data) as folder:
            _copy_state(backup, folder, document)
            blobs = _known(backup, folder)
            _copy_blobs(backup, folder, blobs)
            _check(backup, folder, _changes_since(backup, document.created))
            folder.replace(data)  # which may be there and empty
            sync_folder(data.parent)
    return Restored(len(blobs), sum(size for _, size in blobs))


def _demand_empty(data: Path) -> None:
    if data.exists() and (not data.is_dir() or any(data.iterdir())):
        raise UsageError(f"{data} is not an empty folder", hint="name a new one")


@contextmanager
def _staging(data: Path) -> Iterator[Path]:
    """Lend a folder beside the wanted one; whatever is left of it at the end goes."""
    folder = data.parent / f".{data.name}.{secrets.token_hex(6)}.restoring"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        remove_tree(folder)


def _copy_state(backup: Path, folder: Path, document: BackupDocument) -> None:
    problems = []
    for name, digest in document.state.items():
        source = backup / STATE / digest.hex
        if not source.is_file():
            problems.append(f"{name} is missing")
        elif hash_file(source)[1] != digest:
            problems.append(f"{name} is damaged")
        else:
            make_folders((folder / name).parent, mode=0o700)
            with staged_file(folder / name, mode=0o600) as write:
                write(memoryview(source.read_bytes()))
    _refuse(backup, problems)


def _known(backup: Path, folder: Path) -> list[tuple[BlobDigest, int]]:
    try:
        return known_blobs(folder / STATE_FILES[0])
    except ExpertError as error:
        raise InvalidPackageError(str(backup), [error.message]) from error


def _copy_blobs(backup: Path, folder: Path, blobs: list[tuple[BlobDigest, int]]) -> None:
    source, target = BlobStorage(backup / BLOBS), BlobStorage(folder / BLOBS)
    problems = []
    for digest, size in blobs:
        found = source.size(digest)
        if found is None:
            problems.append(f"blob {digest} is missing")
        elif found != size:
            problems.append(f"blob {digest} has {found} bytes instead of {size}")
        else:
            try:
                copy_blob(source.path(digest), target.path(digest), digest)
            except DigestError:
                problems.append(f"blob {digest} is damaged")
    _refuse(backup, problems)


def _changes_since(backup: Path, created: str) -> int:
    """Return how often a package may have changed after the backup, at most."""
    try:
        passed = datetime.now(UTC) - datetime.fromisoformat(created).astimezone(UTC)
    except ValueError as error:
        raise InvalidPackageError(str(backup), [f"{created[:40]!r} is no time"]) from error
    return CHANGES_A_SECOND * max(0, int(passed.total_seconds()) + 1)


def _check(backup: Path, folder: Path, changes: int) -> None:
    """Open the restored registry once, before anybody sees it, and renew its index documents."""
    try:
        registry = open_registry(read_settings(folder))
        try:
            registry.check_integrity()
            with registry.database.write() as connection:
                _outdo(connection, registry.index_signer, changes)
        finally:
            registry.close()
    except ExpertError as error:
        raise InvalidPackageError(str(backup), [error.message]) from error


def _outdo(connection: Connection, signer: IndexSigner, changes: int) -> None:
    """Renew every index document, its revision above any that so many changes could have given."""
    query = select(PACKAGES.c.id, PACKAGES.c.updated).order_by(PACKAGES.c.id)
    for package, updated in connection.execute(query).all():
        own = update(PACKAGES).where(PACKAGES.c.id == package)
        connection.execute(own.values(revision=PACKAGES.c.revision + changes))
        rewrite_index(connection, package, signer=signer, now=updated)


def _refuse(backup: Path, problems: list[str]) -> None:
    if problems:
        more = len(problems) - MAX_PROBLEMS
        shown = problems[:MAX_PROBLEMS] + ([f"{more} more"] if more > 0 else [])
        hint = "nothing was restored; take another backup"
        raise InvalidPackageError(str(backup), shown, hint=hint)
