"""Garbage collection on a running registry: blobs that nothing names, and uploads that stopped.

A blob is kept while a manifest of a repository names it, and for a period of grace after it came to
a repository: a client has that long to push the manifest. Removing goes from the names to the
bytes, in small write transactions, so that others can write in between:

1. uploads that were not continued;
2. the links of blobs that no manifest of the repository names;
3. the rows of blobs that no repository links;
4. the files of blobs that have no row.

Each step looks again inside its transaction, and a file is removed under the same write lock under
which uploads put files in place. A crash can leave files without rows, never rows without files:
the next collection takes the rest.
"""

import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from sqlalchemy import ColumnElement, Connection, and_, delete, exists, select

from registry_server.database.connection import Database
from registry_server.database.tables import BLOBS, MANIFEST_LINKS, REPOSITORY_BLOBS, UPLOADS
from registry_server.registry import Registry
from registry_server.storage.blobs import BlobStorage, StoredBlob, disk_errors

BATCH = 200
"""How much one write transaction removes."""

_Item = TypeVar("_Item")
_LINKS, _NAMES = REPOSITORY_BLOBS.c, MANIFEST_LINKS.c


@dataclass(frozen=True, slots=True)
class Garbage:
    """What was removed, or would be."""

    blobs: int
    bytes: int
    """Of those blobs."""
    uploads: int


def survey(registry: Registry, *, now: float) -> Garbage:
    """Return what `collect` would remove, and touch nothing."""
    limits = registry.settings.limits
    cutoff = now - limits.grace_seconds
    with registry.database.read() as connection:
        garbage = set(connection.execute(select(BLOBS.c.digest).where(_unneeded(cutoff))).scalars())
        kept = set(connection.execute(select(BLOBS.c.digest)).scalars()) - garbage
        uploads = _stale_uploads(connection, now - limits.upload_seconds)
    files = [
        blob
        for blob in registry.storage.blobs()
        if str(blob.digest) in garbage or (blob.changed < cutoff and str(blob.digest) not in kept)
    ]
    strays = _strays(registry, now - limits.upload_seconds)
    sizes = sum(blob.size for blob in files)
    return Garbage(len(files), sizes, len({*uploads, *(path.name for path in strays)}))


def collect(registry: Registry, *, now: float) -> Garbage:
    """Remove what nothing needs any more, while everything else goes on.

    Raises:
        StoreError: when the database or the storage fails; what is left goes next time.
    """
    limits = registry.settings.limits
    uploads = collect_uploads(registry, now - limits.upload_seconds)
    cutoff = now - limits.grace_seconds
    _collect_links(registry.database, cutoff)
    _collect_rows(registry.database, cutoff)
    removed = _collect_files(registry.database, registry.storage, cutoff)
    return Garbage(len(removed), sum(blob.size for blob in removed), uploads)


def collect_uploads(registry: Registry, cutoff: float) -> int:
    """Forget uploads that were not continued, then remove files that belong to none.

    Raises:
        StoreError: when the database or the storage fails; what is left goes next time.
    """
    with registry.database.read() as connection:
        stale = _stale_uploads(connection, cutoff)
    if stale:  # else no write lock is taken, for which others would wait
        with registry.database.write() as connection:
            stale = _stale_uploads(connection, cutoff)
            connection.execute(delete(UPLOADS).where(UPLOADS.c.updated < cutoff))
    strays = _strays(registry, cutoff)
    with disk_errors():
        for path in strays:
            path.unlink(missing_ok=True)
    return len({*stale, *(path.name for path in strays)})


def _stale_uploads(connection: Connection, cutoff: float) -> list[str]:
    query = select(UPLOADS.c.id).where(UPLOADS.c.updated < cutoff)
    return list(connection.execute(query).scalars())


def _strays(registry: Registry, cutoff: float) -> list[Path]:
    """Return old files in the upload folder that belong to no running upload."""
    with disk_errors():
        found = sorted(registry.settings.uploads.iterdir())
        old = [path for path in found if _is_old_file(path, cutoff)]
    with registry.database.read() as connection:
        query = select(UPLOADS.c.id).where(UPLOADS.c.updated >= cutoff)
        going_on = set(connection.execute(query).scalars())
    return [path for path in old if path.name not in going_on]


def _is_old_file(path: Path, cutoff: float) -> bool:
    try:
        entry = path.lstat()
    except FileNotFoundError:  # it became a blob meanwhile
        return False
    return entry.st_mtime < cutoff and not stat.S_ISDIR(entry.st_mode)


def _collect_links(database: Database, cutoff: float) -> None:
    with database.read() as connection:
        query = select(_LINKS.repository_id, _LINKS.digest).where(_unnamed_link(cutoff))
        found = [(row.repository_id, row.digest) for row in connection.execute(query)]
    for batch in _batches(found):
        with database.write() as connection:
            for repository, digest in batch:
                own = and_(_LINKS.repository_id == repository, _LINKS.digest == digest)
                connection.execute(delete(REPOSITORY_BLOBS).where(own, _unnamed_link(cutoff)))


def _collect_rows(database: Database, cutoff: float) -> None:
    with database.read() as connection:
        query = select(BLOBS.c.digest).where(_unlinked(cutoff))
        found = list(connection.execute(query).scalars())
    for batch in _batches(found):
        with database.write() as connection:
            here = BLOBS.c.digest.in_(batch)
            connection.execute(delete(BLOBS).where(here, _unlinked(cutoff)))


def _collect_files(database: Database, storage: BlobStorage, cutoff: float) -> list[StoredBlob]:
    removed: list[StoredBlob] = []
    for batch in _batches(blob for blob in storage.blobs() if blob.changed < cutoff):
        with database.read() as connection:
            suspects = _without_row(connection, batch)
        if not suspects:  # then no write lock is taken, for which others would wait
            continue
        with database.write() as connection:
            for blob in _without_row(connection, suspects):
                storage.remove(blob.digest)
                removed.append(blob)
    return removed


def _without_row(connection: Connection, blobs: Sequence[StoredBlob]) -> list[StoredBlob]:
    digests = [str(blob.digest) for blob in blobs]
    query = select(BLOBS.c.digest).where(BLOBS.c.digest.in_(digests))
    known = set(connection.execute(query).scalars())
    return [blob for blob in blobs if str(blob.digest) not in known]


def _unnamed_link(cutoff: float) -> ColumnElement[bool]:
    """An old link of a blob that no manifest of the same repository names."""
    return and_(_LINKS.added < cutoff, ~_named())


def _unlinked(cutoff: float) -> ColumnElement[bool]:
    """An old blob that no repository links."""
    linked = exists().where(_LINKS.digest == BLOBS.c.digest)
    return and_(BLOBS.c.created < cutoff, ~linked)


def _unneeded(cutoff: float) -> ColumnElement[bool]:
    """An old blob all of whose links are old, and lead to no manifest."""
    needed = exists().where(_LINKS.digest == BLOBS.c.digest, (_LINKS.added >= cutoff) | _named())
    return and_(BLOBS.c.created < cutoff, ~needed)


def _named() -> ColumnElement[bool]:
    same = and_(_NAMES.repository_id == _LINKS.repository_id, _NAMES.digest == _LINKS.digest)
    return exists().where(same, _NAMES.kind == "blob")


def _batches(items: Iterable[_Item]) -> Iterator[Sequence[_Item]]:
    rest = iter(items)
    while batch := list(islice(rest, BATCH)):
        yield batch
