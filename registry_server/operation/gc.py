"""Garbage collection on a running registry: unreferenced blobs and abandoned uploads.

A blob is kept while a manifest of a repository references it, and for a grace period after it was
added to a repository, in which the client can push the manifest. Collection removes, in small write
transactions so that others can write in between:

1. abandoned uploads;
2. links of blobs that no manifest of the repository references;
3. rows of blobs that no repository links;
4. files of blobs without a row.

Each step checks again in its transaction, and files are removed under the write lock under which
uploads add files. A crash can leave files without rows, never rows without files; the next
collection removes them.

`collect_garbage` is for operators: it runs next to the server and writes to the audit log.
"""

import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from sqlalchemy import ColumnElement, Connection, and_, delete, exists, select

from registry_server.access import rights
from registry_server.access.rights import ANONYMOUS
from registry_server.database.connection import Database
from registry_server.database.tables import BLOBS, MANIFEST_LINKS, REPOSITORY_BLOBS, UPLOADS
from registry_server.operation.metrics import GC_ACTION
from registry_server.registry import (
    BlobStorage,
    Registry,
    StoredBlob,
    open_registry,
    wrap_disk_errors,
)
from registry_server.settings import ServerSettings

BATCH = 200
"""Maximum rows or files that one write transaction removes."""

_Item = TypeVar("_Item")
_LINKS, _NAMES = REPOSITORY_BLOBS.c, MANIFEST_LINKS.c


@dataclass(frozen=True, slots=True)
class GarbageSummary:
    """What a collection removed, or would remove."""

    blobs: int
    bytes: int
    """The total size of the blobs."""
    uploads: int


def find_garbage(registry: Registry, *, now: float) -> GarbageSummary:
    """Return what `remove_garbage` would remove; change nothing."""
    limits = registry.settings.limits
    cutoff = now - limits.grace_seconds
    with registry.database.read() as connection:
        garbage = set(
            connection.execute(select(BLOBS.c.digest).where(_unneeded_condition(cutoff))).scalars()
        )
        kept = set(connection.execute(select(BLOBS.c.digest)).scalars()) - garbage
        uploads = _list_stale_uploads(connection, now - limits.upload_seconds)
    files = [
        blob
        for blob in registry.storage.list_blobs()
        if str(blob.digest) in garbage or (blob.modified < cutoff and str(blob.digest) not in kept)
    ]
    strays = _list_stray_files(registry, now - limits.upload_seconds)
    sizes = sum(blob.size for blob in files)
    return GarbageSummary(len(files), sizes, len({*uploads, *(path.name for path in strays)}))


def remove_garbage(registry: Registry, *, now: float) -> GarbageSummary:
    """Remove garbage while the registry is in use.

    Raises:
        StoreError: when the database or the storage fails; the next collection removes the rest.
    """
    limits = registry.settings.limits
    uploads = remove_stale_uploads(registry, now - limits.upload_seconds)
    cutoff = now - limits.grace_seconds
    _collect_links(registry.database, cutoff)
    _collect_rows(registry.database, cutoff)
    removed = _collect_files(registry.database, registry.storage, cutoff)
    return GarbageSummary(len(removed), sum(blob.size for blob in removed), uploads)


def remove_stale_uploads(registry: Registry, cutoff: float) -> int:
    """Remove abandoned uploads, then files that belong to no upload.

    Raises:
        StoreError: when the database or the storage fails; the next collection removes the rest.
    """
    with registry.database.read() as connection:
        stale = _list_stale_uploads(connection, cutoff)
    if stale:  # else do not take the write lock: others would wait for it
        with registry.database.write() as connection:
            stale = _list_stale_uploads(connection, cutoff)
            connection.execute(delete(UPLOADS).where(UPLOADS.c.updated < cutoff))
    strays = _list_stray_files(registry, cutoff)
    with wrap_disk_errors():
        for path in strays:
            path.unlink(missing_ok=True)
    return len({*stale, *(path.name for path in strays)})


def _list_stale_uploads(connection: Connection, cutoff: float) -> list[str]:
    query = select(UPLOADS.c.id).where(UPLOADS.c.updated < cutoff)
    return list(connection.execute(query).scalars())


def _list_stray_files(registry: Registry, cutoff: float) -> list[Path]:
    """Return old files in the upload folder that belong to no upload in progress."""
    with wrap_disk_errors():
        found = sorted(registry.settings.uploads.iterdir())
        old = [path for path in found if _is_old_file(path, cutoff)]
    with registry.database.read() as connection:
        query = select(UPLOADS.c.id).where(UPLOADS.c.updated >= cutoff)
        going_on = set(connection.execute(query).scalars())
    return [path for path in old if path.name not in going_on]


def _is_old_file(path: Path, cutoff: float) -> bool:
    try:
        entry = path.lstat()
    except FileNotFoundError:  # it has become a blob
        return False
    return entry.st_mtime < cutoff and not stat.S_ISDIR(entry.st_mode)


def _collect_links(database: Database, cutoff: float) -> None:
    with database.read() as connection:
        query = select(_LINKS.repository_id, _LINKS.digest).where(_unnamed_link_condition(cutoff))
        found = [(row.repository_id, row.digest) for row in connection.execute(query)]
    for batch in _split_batches(found):
        with database.write() as connection:
            for repository, digest in batch:
                own = and_(_LINKS.repository_id == repository, _LINKS.digest == digest)
                connection.execute(
                    delete(REPOSITORY_BLOBS).where(own, _unnamed_link_condition(cutoff))
                )


def _collect_rows(database: Database, cutoff: float) -> None:
    with database.read() as connection:
        query = select(BLOBS.c.digest).where(_unlinked_condition(cutoff))
        found = list(connection.execute(query).scalars())
    for batch in _split_batches(found):
        with database.write() as connection:
            here = BLOBS.c.digest.in_(batch)
            connection.execute(delete(BLOBS).where(here, _unlinked_condition(cutoff)))


def _collect_files(database: Database, storage: BlobStorage, cutoff: float) -> list[StoredBlob]:
    removed: list[StoredBlob] = []
    for batch in _split_batches(blob for blob in storage.list_blobs() if blob.modified < cutoff):
        with database.read() as connection:
            suspects = _filter_without_row(connection, batch)
        if not suspects:  # do not take the write lock: others would wait for it
            continue
        with database.write() as connection:
            for blob in _filter_without_row(connection, suspects):
                storage.remove(blob.digest)
                removed.append(blob)
    return removed


def _filter_without_row(connection: Connection, blobs: Sequence[StoredBlob]) -> list[StoredBlob]:
    digests = [str(blob.digest) for blob in blobs]
    query = select(BLOBS.c.digest).where(BLOBS.c.digest.in_(digests))
    known = set(connection.execute(query).scalars())
    return [blob for blob in blobs if str(blob.digest) not in known]


def _unnamed_link_condition(cutoff: float) -> ColumnElement[bool]:
    """Match old links of blobs that no manifest of the same repository references."""
    return and_(_LINKS.added < cutoff, ~_named_condition())


def _unlinked_condition(cutoff: float) -> ColumnElement[bool]:
    """Match old blobs that no repository links."""
    linked = exists().where(_LINKS.digest == BLOBS.c.digest)
    return and_(BLOBS.c.created < cutoff, ~linked)


def _unneeded_condition(cutoff: float) -> ColumnElement[bool]:
    """Match old blobs whose links are all old and without a manifest."""
    needed = exists().where(
        _LINKS.digest == BLOBS.c.digest, (_LINKS.added >= cutoff) | _named_condition()
    )
    return and_(BLOBS.c.created < cutoff, ~needed)


def _named_condition() -> ColumnElement[bool]:
    same = and_(_NAMES.repository_id == _LINKS.repository_id, _NAMES.digest == _LINKS.digest)
    return exists().where(same, _NAMES.kind == "blob")


def _split_batches(items: Iterable[_Item]) -> Iterator[Sequence[_Item]]:
    rest = iter(items)
    while batch := list(islice(rest, BATCH)):
        yield batch


def collect_garbage(settings: ServerSettings, *, now: float) -> GarbageSummary:
    """Remove garbage, and write a row to the audit log.

    Raises:
        StoreError: when the registry cannot be opened, or its disk fails.
    """
    with closing(open_registry(settings)) as registry:
        removed = remove_garbage(registry, now=now)
        detail = f"{removed.blobs} blobs, {removed.bytes} bytes, {removed.uploads} uploads"
        with registry.database.write() as connection:
            rights.write_audit_row(connection, ANONYMOUS, GC_ACTION, "blobs", detail)
    return removed


def preview_garbage(settings: ServerSettings, *, now: float) -> GarbageSummary:
    """Return what `collect_garbage` would remove; change nothing."""
    with closing(open_registry(settings)) as registry:
        return find_garbage(registry, now=now)
