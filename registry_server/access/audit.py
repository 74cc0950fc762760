"""The audit log: one row for every change, who made it, from where, and to what.

Rows are written in the transaction of the change itself, so that there is never one without the
other. Secrets are not written: callers give names, ids and digests.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, insert, select

from registry_server.access.identity import Identity
from registry_server.database.tables import AUDIT

MAX_TARGET = 400
MAX_DETAIL = 2000


@dataclass(frozen=True, slots=True)
class Entry:
    """One change; ``actor`` None: somebody unknown, or the command line of the server itself."""

    id: int
    time: float
    actor: str | None
    token_id: str | None
    address: str | None
    action: str
    target: str
    detail: str


def record(
    connection: Connection, identity: Identity, action: str, target: str, detail: str = ""
) -> None:
    """Write who did ``action`` to ``target``."""
    row = {
        "time": time.time(),
        "actor": identity.name,
        "token_id": identity.token_id,
        "address": identity.address,
        "action": action,
        "target": target[:MAX_TARGET],
        "detail": detail[:MAX_DETAIL],
    }
    connection.execute(insert(AUDIT).values(row))


def entries(connection: Connection, *, limit: int, before: int | None = None) -> Iterable[Entry]:
    """Return the newest entries first, those with an id below ``before`` only."""
    query = select(AUDIT).order_by(AUDIT.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(AUDIT.c.id < before)
    return [Entry(**row._mapping) for row in connection.execute(query)]
