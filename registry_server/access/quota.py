"""How many bytes a namespace uses, and whether there is room for more.

What counts: every blob that a repository of the namespace links, once however many link it; the
manifests; and the bytes that running uploads have received. Triggers of the database count them as
rows come and go, so that asking costs the same however many there are. Callers ask inside the write
transaction in which they take the room: SQLite lets one writer in at a time, so uploads side by
side cannot overshoot together.
"""

from sqlalchemy import Connection, func, select

from expertctl.errors import BudgetError, StoreError
from registry_server.access.namespaces import NamespaceRow
from registry_server.database.tables import (
    BLOBS,
    MANIFESTS,
    NAMESPACES,
    REPOSITORIES,
    REPOSITORY_BLOBS,
    UPLOADS,
)
from registry_server.settings import Limits


def demand_room(
    connection: Connection, namespace: NamespaceRow, extra_bytes: int, limits: Limits
) -> None:
    """Demand that ``extra_bytes`` more fit into the quota of the namespace.

    Raises:
        BudgetError: when they do not.
    """
    quota = limit(namespace, limits)
    used = used_bytes(connection, namespace.id)
    if used + extra_bytes > quota:
        raise BudgetError(
            f"{namespace.name} uses {used} of {quota} bytes; {extra_bytes} more do not fit",
            hint="an admin of the registry can raise the quota of the namespace",
        )


def limit(namespace: NamespaceRow, limits: Limits) -> int:
    """Return the quota of a namespace: its own, or the default."""
    return limits.quota_bytes if namespace.quota is None else namespace.quota


def used_bytes(connection: Connection, namespace_id: int) -> int:
    """Return the unique bytes of a namespace, running uploads included."""
    query = select(NAMESPACES.c.used).where(NAMESPACES.c.id == namespace_id)
    used: int = connection.execute(query).scalar_one()
    return used


def check_used(connection: Connection) -> None:
    """Count all bytes of all namespaces anew.

    Raises:
        StoreError: when a namespace uses other than was counted.
    """
    rows = connection.execute(select(NAMESPACES.c.id, NAMESPACES.c.name, NAMESPACES.c.used))
    for namespace_id, name, used in rows.all():
        if used != (found := _counted_anew(connection, namespace_id)):
            raise StoreError(f"{name} uses {found} bytes, and {used} were counted")


def _counted_anew(connection: Connection, namespace_id: int) -> int:
    own = select(REPOSITORIES.c.id).where(REPOSITORIES.c.namespace_id == namespace_id)
    linked = select(REPOSITORY_BLOBS.c.digest).where(REPOSITORY_BLOBS.c.repository_id.in_(own))
    parts = (
        select(func.coalesce(func.sum(BLOBS.c.size), 0)).where(BLOBS.c.digest.in_(linked)),
        select(func.coalesce(func.sum(MANIFESTS.c.size), 0)).where(
            MANIFESTS.c.repository_id.in_(own)
        ),
        select(func.coalesce(func.sum(UPLOADS.c.size), 0)).where(UPLOADS.c.repository_id.in_(own)),
    )
    return sum(connection.execute(part).scalar_one() for part in parts)
