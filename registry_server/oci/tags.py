"""Tags: names in a repository that point to manifests."""

import time

from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects.sqlite import insert

from registry_server.database.tables import TAGS


def point(connection: Connection, *, repository_id: int, tag: str, digest: str) -> None:
    """Make a tag point to a manifest, whether it was there or not."""
    values = {"repository_id": repository_id, "name": tag, "digest": digest, "updated": time.time()}
    moved = {"digest": digest, "updated": values["updated"]}
    keys = [TAGS.c.repository_id, TAGS.c.name]
    connection.execute(insert(TAGS).values(values).on_conflict_do_update(keys, set_=moved))


def remove(connection: Connection, repository_id: int, tag: str) -> bool:
    """Remove a tag, not its manifest; return whether it was there."""
    own = (TAGS.c.repository_id == repository_id, TAGS.c.name == tag)
    return connection.execute(delete(TAGS).where(*own)).rowcount > 0


def names(connection: Connection, repository_id: int, *, after: str, limit: int) -> list[str]:
    """Return up to ``limit`` tags behind ``after`` in the order of their bytes."""
    own = (TAGS.c.repository_id == repository_id, TAGS.c.name > after)
    query = select(TAGS.c.name).where(*own).order_by(TAGS.c.name).limit(limit)
    return list(connection.execute(query).scalars())
