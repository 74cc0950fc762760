"""Manifests as rows: their bytes, and what they name."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, and_, delete, insert, select

from registry_server.database.tables import (
    MANIFEST_LINKS,
    MANIFESTS,
    REPOSITORIES,
    REPOSITORY_BLOBS,
    TAGS,
)
from registry_server.oci.errors import OciCode, OciError
from registry_server.oci.manifest_document import ManifestDocument
from registry_server.storage.blob_digest import BlobDigest

_AT_ONCE = 500
"""How many digests one statement asks for."""


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A manifest as it is served."""

    digest: str
    media_type: str
    content: bytes


def find(connection: Connection, repository_id: int, digest: str) -> StoredManifest | None:
    """Return a manifest of a repository by its digest."""
    columns = (MANIFESTS.c.digest, MANIFESTS.c.media_type, MANIFESTS.c.content)
    own = (MANIFESTS.c.repository_id == repository_id, MANIFESTS.c.digest == digest)
    row = connection.execute(select(*columns).where(*own)).first()
    return None if row is None else StoredManifest(row[0], row[1], row[2])


def look_up(
    connection: Connection, repository: str, reference: BlobDigest | str
) -> StoredManifest | None:
    """Return a manifest by the name of its repository, and its digest or a tag."""
    query = (
        select(MANIFESTS.c.digest, MANIFESTS.c.media_type, MANIFESTS.c.content)
        .join(REPOSITORIES, REPOSITORIES.c.id == MANIFESTS.c.repository_id)
        .where(REPOSITORIES.c.name == repository)
    )
    if isinstance(reference, BlobDigest):
        query = query.where(MANIFESTS.c.digest == str(reference))
    else:
        same = (
            TAGS.c.repository_id == MANIFESTS.c.repository_id,
            TAGS.c.digest == MANIFESTS.c.digest,
        )
        query = query.join(TAGS, and_(*same)).where(TAGS.c.name == reference)
    row = connection.execute(query).first()
    return None if row is None else StoredManifest(row[0], row[1], row[2])


def store(
    connection: Connection,
    *,
    repository_id: int,
    digest: BlobDigest,
    document: ManifestDocument,
    content: bytes,
) -> bool:
    """Keep a manifest and what it names; return whether it is new.

    The caller has checked that the digest is that of the content, and that what the manifest names
    is there (`demand_named`), in the same transaction.
    """
    if find(connection, repository_id, str(digest)) is not None:
        return False
    connection.execute(
        insert(MANIFESTS).values(
            repository_id=repository_id,
            digest=str(digest),
            media_type=document.media_type,
            artifact_type=document.artifact_type,
            subject=None if document.subject is None else str(document.subject),
            annotations=document.annotations,
            size=len(content),
            content=content,
            created=time.time(),
        )
    )
    if rows := _links(repository_id, digest, document):
        connection.execute(insert(MANIFEST_LINKS), rows)
    return True


def demand_named(connection: Connection, repository_id: int, document: ManifestDocument) -> None:
    """Check that the repository has every blob and manifest that a manifest names.

    Raises:
        OciError: MANIFEST_BLOB_UNKNOWN, for the first that it lacks.
    """
    blobs = _present_blobs(connection, repository_id, document.blobs)
    for digest in document.blobs:
        if str(digest) not in blobs:
            raise OciError(OciCode.MANIFEST_BLOB_UNKNOWN, f"blob {digest} was not pushed here")
    manifests = _present_manifests(connection, repository_id, document.manifests)
    for digest in document.manifests:
        if str(digest) not in manifests:
            raise OciError(OciCode.MANIFEST_BLOB_UNKNOWN, f"manifest {digest} was not pushed here")


def remove(connection: Connection, repository_id: int, digest: str) -> bool:
    """Remove a manifest and the tags that point to it; return whether it was there."""
    own = (MANIFESTS.c.repository_id == repository_id, MANIFESTS.c.digest == digest)
    gone = connection.execute(delete(MANIFESTS).where(*own)).rowcount > 0
    connection.execute(
        delete(MANIFEST_LINKS).where(
            MANIFEST_LINKS.c.repository_id == repository_id, MANIFEST_LINKS.c.manifest == digest
        )
    )
    connection.execute(
        delete(TAGS).where(TAGS.c.repository_id == repository_id, TAGS.c.digest == digest)
    )
    return gone


def _links(
    repository_id: int, digest: BlobDigest, document: ManifestDocument
) -> list[dict[str, object]]:
    """Return a row for everything that a manifest names, once each."""
    named = [*((d, "blob") for d in document.blobs), *((d, "manifest") for d in document.manifests)]
    own = {"repository_id": repository_id, "manifest": str(digest)}
    return [{**own, "digest": str(to), "kind": kind} for to, kind in dict(named).items()]


def _present_blobs(
    connection: Connection, repository_id: int, digests: Iterable[BlobDigest]
) -> set[str]:
    found: set[str] = set()
    for part in _parts(digests):
        column = REPOSITORY_BLOBS.c.digest
        own = (REPOSITORY_BLOBS.c.repository_id == repository_id, column.in_(part))
        found.update(connection.execute(select(column).where(*own)).scalars())
    return found


def _present_manifests(
    connection: Connection, repository_id: int, digests: Iterable[BlobDigest]
) -> set[str]:
    found: set[str] = set()
    for part in _parts(digests):
        column = MANIFESTS.c.digest
        own = (MANIFESTS.c.repository_id == repository_id, column.in_(part))
        found.update(connection.execute(select(column).where(*own)).scalars())
    return found


def _parts(digests: Iterable[BlobDigest]) -> list[list[str]]:
    texts = [str(digest) for digest in digests]
    return [texts[start : start + _AT_ONCE] for start in range(0, len(texts), _AT_ONCE)]
