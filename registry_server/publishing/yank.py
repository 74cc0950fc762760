"""Yanking: a version that nobody should newly choose, with the reason; and the way back.

A yanked version stays in the index and can be pulled: users who locked it still get it, resolvers
skip it.
"""

import time

from sqlalchemy import Connection, select, update

from expertctl.errors import NotFoundError, UsageError
from expertctl.reference import PackageName
from registry_server.access import audit, rights
from registry_server.access.identity import Action, Identity
from registry_server.database.tables import RELEASES
from registry_server.publishing.index import package_id, rewrite_index
from registry_server.registry import Registry

MAX_REASON = 500


def yank(
    registry: Registry, identity: Identity, *, name: PackageName, version: str, reason: str
) -> None:
    """Yank a version; one that is yanked gets the new reason.

    Raises:
        UsageError: when the reason is empty, too long or not printable.
        NotFoundError: when there is no such version.
    """
    text = reason_of(reason)
    _change(registry, identity, name=name, version=version, reason=text)


def unyank(registry: Registry, identity: Identity, *, name: PackageName, version: str) -> None:
    """Take a yank back; a version that is not yanked stays so.

    Raises:
        NotFoundError: when there is no such version.
    """
    _change(registry, identity, name=name, version=version, reason=None)


def reason_of(text: str) -> str:
    """Return a reason that may be shown to people.

    Raises:
        UsageError: when it is empty, too long or not printable.
    """
    reason = text.strip()
    if not (0 < len(reason) <= MAX_REASON and reason.isprintable()):
        hint = f"one line of 1 to {MAX_REASON} printable characters"
        raise UsageError("the reason is empty, too long or not printable", hint=hint)
    return reason


def _change(
    registry: Registry, identity: Identity, *, name: PackageName, version: str, reason: str | None
) -> None:
    now = time.time()
    with registry.database.write() as connection:
        package, release, before = _find(connection, identity, name, version)
        if before == reason:
            return
        yanked = None if reason is None else now
        connection.execute(
            update(RELEASES)
            .where(RELEASES.c.id == release)
            .values(yanked=yanked, yank_reason=reason)
        )
        rewrite_index(connection, package, signer=registry.index_signer, now=now)
        action = "unyank" if reason is None else "yank"
        audit.record(connection, identity, action, f"{name}@{version}", reason or "")


def _find(
    connection: Connection, identity: Identity, name: PackageName, version: str
) -> tuple[int, int, str | None]:
    """Return the ids of the package and the release, and the reason of its yank, None for none."""
    namespace = rights.authorise(connection, identity, Action.YANK, name.namespace, name.name)
    package = package_id(connection, namespace, name.name)
    query = select(RELEASES.c.id, RELEASES.c.yanked, RELEASES.c.yank_reason).where(
        RELEASES.c.package_id == package, RELEASES.c.version == version
    )
    row = connection.execute(query).one_or_none()
    if package is None or row is None:
        raise NotFoundError(f"there is no {name}@{version[:80]} to yank")
    return package, row.id, None if row.yanked is None else row.yank_reason or ""
