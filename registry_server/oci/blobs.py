"""Which blobs there are, and through which repositories they can be read.

A blob is readable only where it was uploaded or mounted: that the storage has it lets no other
repository read it.
"""

import time

from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects.sqlite import insert

from registry_server.database.tables import BLOBS, REPOSITORIES, REPOSITORY_BLOBS
from registry_server.storage.blob_digest import BlobDigest


def linked_size(connection: Connection, repository: str, digest: BlobDigest) -> int | None:
    """Return the size of a blob of a repository, None when it is not linked there."""
    query = (
        select(BLOBS.c.size)
        .join(REPOSITORY_BLOBS, REPOSITORY_BLOBS.c.digest == BLOBS.c.digest)
        .join(REPOSITORIES, REPOSITORIES.c.id == REPOSITORY_BLOBS.c.repository_id)
        .where(REPOSITORIES.c.name == repository, BLOBS.c.digest == str(digest))
    )
    size: int | None = connection.execute(query).scalar()
    return size


def repositories_with(connection: Connection, digest: BlobDigest, *, limit: int) -> list[str]:
    """Return the names of repositories that link a blob, in order."""
    query = (
        select(REPOSITORIES.c.name)
        .join(REPOSITORY_BLOBS, REPOSITORY_BLOBS.c.repository_id == REPOSITORIES.c.id)
        .where(REPOSITORY_BLOBS.c.digest == str(digest))
        .order_by(REPOSITORIES.c.name)
        .limit(limit)
    )
    return list(connection.execute(query).scalars())


def used_in_namespace(connection: Connection, namespace_id: int, digest: BlobDigest) -> bool:
    """Tell whether a repository of the namespace links a blob, so that it costs nothing again."""
    query = (
        select(REPOSITORY_BLOBS.c.digest)
        .join(REPOSITORIES, REPOSITORIES.c.id == REPOSITORY_BLOBS.c.repository_id)
        .where(
            REPOSITORIES.c.namespace_id == namespace_id, REPOSITORY_BLOBS.c.digest == str(digest)
        )
        .limit(1)
    )
    return connection.execute(query).first() is not None


def enter(connection: Connection, digest: BlobDigest, size: int) -> None:
    """Enter a blob that lies in the storage; one that is known stays as it is."""
    values = {"digest": str(digest), "size": size, "created": time.time()}
    connection.execute(insert(BLOBS).values(values).on_conflict_do_nothing())


def link(connection: Connection, repository_id: int, digest: BlobDigest) -> None:
    """Let a blob be read through a repository; done again, its time of grace begins anew."""
    values = {"repository_id": repository_id, "digest": str(digest), "added": time.time()}
    keys = [REPOSITORY_BLOBS.c.repository_id, REPOSITORY_BLOBS.c.digest]
    again = {"added": values["added"]}
    query = insert(REPOSITORY_BLOBS).values(values).on_conflict_do_update(keys, set_=again)
    connection.execute(query)


def unlink(connection: Connection, repository_id: int, digest: BlobDigest) -> bool:
    """Take a blob from a repository; return whether it was there. Its bytes are garbage later."""
    own = (
        REPOSITORY_BLOBS.c.repository_id == repository_id,
        REPOSITORY_BLOBS.c.digest == str(digest),
    )
    return connection.execute(delete(REPOSITORY_BLOBS).where(*own)).rowcount > 0
