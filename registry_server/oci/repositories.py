"""Repositories: rows that come into being with their first upload or manifest."""

import time
from dataclasses import dataclass

from sqlalchemy import Connection, insert, select

from registry_server.database.tables import REPOSITORIES


@dataclass(frozen=True, slots=True)
class Repository:
    """One repository; ``name`` is the whole of it, ``namespace/…``."""

    id: int
    name: str
    namespace_id: int


def find(connection: Connection, name: str) -> Repository | None:
    """Return a repository, None when nothing was ever pushed there."""
    columns = (REPOSITORIES.c.id, REPOSITORIES.c.name, REPOSITORIES.c.namespace_id)
    row = connection.execute(select(*columns).where(REPOSITORIES.c.name == name)).first()
    return None if row is None else Repository(row[0], row[1], row[2])


def find_or_create(connection: Connection, *, name: str, namespace_id: int) -> Repository:
    """Return a repository, made now where there was none."""
    found = find(connection, name)
    if found is not None:
        return found
    values = {"name": name, "namespace_id": namespace_id, "created": time.time()}
    connection.execute(insert(REPOSITORIES).values(values))
    made = find(connection, name)
    assert made is not None
    return made
