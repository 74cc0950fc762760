"""Creating a registry, new or from a backup.

`init_registry` creates the folder, the key, the database, the first admin and, last, the settings:
``registry.toml`` marks a complete registry. If it is interrupted, the next call completes the rest.

`restore_backup` checks all files of a backup; the new registry appears atomically. Clients refuse
index documents older than the last they saw, so the restored ones get revisions that none of the
lost changes can have reached.
"""

import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, select, update

from expertctl.digest import hash_file
from expertctl.errors import (
    DigestError,
    ExpertError,
    InvalidPackageError,
    NotFoundError,
    UsageError,
)
from expertctl.files import make_folders, open_staged_file, remove_tree, sync_folder
from registry_server.access import accounts, rights
from registry_server.access.rights import ANONYMOUS, Action, TokenScope
from registry_server.database.tables import PACKAGES
from registry_server.operation.backup import (
    BLOBS_FOLDER,
    STATE_FILES,
    STATE_FOLDER,
    BackupDocument,
    copy_blob,
    list_known_blobs,
)
from registry_server.publishing.index import rewrite_index
from registry_server.registry import (
    BlobDigest,
    BlobStorage,
    IndexSigner,
    Registry,
    create_index_key,
    open_registry,
    wrap_disk_errors,
)
from registry_server.settings import (
    SERVE_LOCK_NAME,
    SETTINGS_NAME,
    ServerSettings,
    check_settings,
    lock_data_folder,
    read_settings,
    settings_path,
    write_settings,
)

REGISTRY_FILES = {"blobs", "uploads", "keys", SERVE_LOCK_NAME, SETTINGS_NAME}
"""The contents of a data folder, besides the files of the database."""

_ADMIN_SCOPES = (TokenScope(Action.ADMIN),)


@dataclass(frozen=True, slots=True)
class CreatedRegistry:
    """A new registry; ``token`` is shown once and not stored."""

    settings: ServerSettings
    fingerprint: str
    token: str = field(repr=False)


def init_registry(settings: ServerSettings) -> CreatedRegistry:
    """Create a registry, or complete one whose creation was interrupted.

    Raises:
        UsageError: when there is a registry already, or the folder contains something else.
        InvalidPackageError: when the settings are invalid.
    """
    check_settings(settings)
    _check_folder_is_free(settings)
    make_folders(settings.data, mode=0o700)
    settings.data.chmod(0o700)
    with lock_data_folder(settings.data):
        _check_folder_is_free(settings)
        if not settings.index_key.exists():
            create_index_key(settings.index_key)
        with closing(open_registry(settings)) as registry:
            secret = _create_admin_token(registry, "registry.init")
            fingerprint = registry.index_key.public.key_id
        write_settings(settings)
    return CreatedRegistry(settings, fingerprint, secret)


def create_admin_token(data: Path) -> str:
    """Create another token for the first admin; requires write access to the data folder.

    Raises:
        NotFoundError: when there is no registry.
    """
    with closing(open_registry(read_settings(data))) as registry:
        return _create_admin_token(registry, "registry.new_admin_token")


def _check_folder_is_free(settings: ServerSettings) -> None:
    data = settings.data
    if settings_path(data).exists():
        hint = "serve it with `expertctl registry serve`; --new-admin-token makes another token"
        raise UsageError(f"{data}: there is a registry here already", hint=hint)
    if data.exists() and not data.is_dir():
        raise UsageError(f"{data} is not a folder")
    names = [path.name for path in data.iterdir()] if data.exists() else []
    foreign = sorted(name for name in names if not _is_registry_file(name, settings))
    if foreign:
        message = f"{data} is not empty: it holds {', '.join(foreign[:3])}"
        raise UsageError(message, hint="name a new folder")


def _is_registry_file(name: str, settings: ServerSettings) -> bool:
    prefixes = (settings.database.name, f".{SETTINGS_NAME}.")
    return name in REGISTRY_FILES or name.startswith(prefixes)


def _create_admin_token(registry: Registry, action: str) -> str:
    """Create a token with all rights, and its user if there is none yet."""
    with registry.database.write() as connection:
        try:
            user = accounts.get_user(connection, accounts.FIRST_ADMIN)
        except NotFoundError:
            user = accounts.create_user(connection, accounts.FIRST_ADMIN, admin=True)
        minted = accounts.create_token(connection, user, name=action, scopes=_ADMIN_SCOPES)
        rights.write_audit_row(connection, ANONYMOUS, action, user.name, minted.token.id)
    return minted.secret


MAX_REPORTED_PROBLEMS = 20
CHANGES_PER_SECOND = 10
"""An upper bound of the changes of a package per second, averaged since the backup."""


@dataclass(frozen=True, slots=True)
class RestoreSummary:
    """The contents of a restored registry."""

    blobs: int
    bytes: int


def restore_backup(backup: Path, data: Path) -> RestoreSummary:
    """Restore a backup to a folder that is empty or does not exist.

    Raises:
        NotFoundError: when there is no finished backup.
        UsageError: when the folder is in use.
        InvalidPackageError: when a part of the backup is damaged; then nothing is restored.
        DiskFullError: when there is no room.
    """
    document = BackupDocument.read(backup)
    _check_empty(data)
    with wrap_disk_errors():
        make_folders(data.parent)
        with _staging_folder(data) as folder:
            _copy_state(backup, folder, document)
            blobs = _load_known_blobs(backup, folder)
            _copy_blobs(backup, folder, blobs)
            _check_and_renew(backup, folder, _estimate_changes(backup, document.created))
            folder.replace(data)  # which may exist and be empty
            sync_folder(data.parent)
    return RestoreSummary(len(blobs), sum(size for _, size in blobs))


def _check_empty(data: Path) -> None:
    if data.exists() and (not data.is_dir() or any(data.iterdir())):
        raise UsageError(f"{data} is not an empty folder", hint="name a new one")


@contextmanager
def _staging_folder(data: Path) -> Iterator[Path]:
    """Provide a folder next to the target; remove it at the end if it still exists."""
    folder = data.parent / f".{data.name}.{secrets.token_hex(6)}.restoring"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        remove_tree(folder)


def _copy_state(backup: Path, folder: Path, document: BackupDocument) -> None:
    problems = []
    for name, digest in document.state.items():
        source = backup / STATE_FOLDER / digest.hex
        if not source.is_file():
            problems.append(f"{name} is missing")
        elif hash_file(source)[1] != digest:
            problems.append(f"{name} is damaged")
        else:
            make_folders((folder / name).parent, mode=0o700)
            with open_staged_file(folder / name, mode=0o600) as write:
                write(memoryview(source.read_bytes()))
    _raise_problems(backup, problems)


def _load_known_blobs(backup: Path, folder: Path) -> list[tuple[BlobDigest, int]]:
    try:
        return list_known_blobs(folder / STATE_FILES[0])
    except ExpertError as error:
        raise InvalidPackageError(str(backup), [error.message]) from error


def _copy_blobs(backup: Path, folder: Path, blobs: list[tuple[BlobDigest, int]]) -> None:
    source, target = BlobStorage(backup / BLOBS_FOLDER), BlobStorage(folder / BLOBS_FOLDER)
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
    _raise_problems(backup, problems)


def _estimate_changes(backup: Path, created: str) -> int:
    """Return the maximum number of changes of a package since the backup."""
    try:
        passed = datetime.now(UTC) - datetime.fromisoformat(created).astimezone(UTC)
    except ValueError as error:
        raise InvalidPackageError(str(backup), [f"{created[:40]!r} is not a time"]) from error
    return CHANGES_PER_SECOND * max(0, int(passed.total_seconds()) + 1)


def _check_and_renew(backup: Path, folder: Path, changes: int) -> None:
    """Open the restored registry before it is published, and renew its index documents."""
    try:
        registry = open_registry(read_settings(folder))
        try:
            registry.check_integrity()
            with registry.database.write() as connection:
                _raise_revisions(connection, registry.index_signer, changes)
        finally:
            registry.close()
    except ExpertError as error:
        raise InvalidPackageError(str(backup), [error.message]) from error


def _raise_revisions(connection: Connection, signer: IndexSigner, changes: int) -> None:
    """Renew every index document, with revisions above those of ``changes`` lost changes."""
    query = select(PACKAGES.c.id, PACKAGES.c.updated).order_by(PACKAGES.c.id)
    for package, updated in connection.execute(query).all():
        own = update(PACKAGES).where(PACKAGES.c.id == package)
        connection.execute(own.values(revision=PACKAGES.c.revision + changes))
        rewrite_index(connection, package, signer=signer, now=updated)


def _raise_problems(backup: Path, problems: list[str]) -> None:
    if problems:
        more = len(problems) - MAX_REPORTED_PROBLEMS
        shown = problems[:MAX_REPORTED_PROBLEMS] + ([f"{more} more"] if more > 0 else [])
        hint = "nothing was restored; take another backup"
        raise InvalidPackageError(str(backup), shown, hint=hint)
