"""Namespaces and their members; their names are never freed, so there is no removing one."""

import re
import time
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, select, update

from expertctl.errors import ConflictError, NotFoundError, UsageError
from expertctl.reference import NAME_PATTERN
from registry_server.access.confusable import is_reserved, skeleton
from registry_server.database.tables import MEMBERS, NAMESPACES, USERS

KINDS = ("expert", "oci")
READS = ("public", "token")
ROLES = ("owner", "publisher")
MAX_NAME = 64
_NAME = re.compile(NAME_PATTERN)
_COLUMNS = (
    NAMESPACES.c.id,
    NAMESPACES.c.name,
    NAMESPACES.c.kind,
    NAMESPACES.c.read,
    NAMESPACES.c.quota,
)


@dataclass(frozen=True, slots=True)
class NamespaceRow:
    """One namespace; ``quota`` None: the default of the registry."""

    id: int
    name: str
    kind: str
    read: str
    quota: int | None


def check_name(name: str, what: str) -> None:
    """Demand a name of lower-case letters, digits and single dashes.

    Raises:
        UsageError: for any other.
        ConflictError: for reserved words and what looks like them.
    """
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        hint = "lower-case letters, digits and single dashes, 64 at most"
        raise UsageError(f"{name[:80]!r} is not a name for a {what}", hint=hint)
    if is_reserved(name):
        raise ConflictError(
            f"{name!r} is a reserved word, or looks like one", hint="choose another"
        )


def create(
    connection: Connection, name: str, *, kind: str, read: str, quota: int | None = None
) -> NamespaceRow:
    """Make a namespace without members.

    Raises:
        UsageError: when the name, kind or read word is none.
        ConflictError: when the name is taken, or looks like one that is.
    """
    check_name(name, "namespace")
    if kind not in KINDS or read not in READS:
        raise UsageError(f"a namespace is {' or '.join(KINDS)}, and read by {' or '.join(READS)}")
    _demand_free(connection, name)
    values = {"name": name, "kind": kind, "read": read, "quota": quota}
    connection.execute(
        insert(NAMESPACES).values(**values, skeleton=skeleton(name), created=time.time())
    )
    return get(connection, name)


def find(connection: Connection, name: str) -> NamespaceRow | None:
    """Return the namespace, None when there is none of that name."""
    row = connection.execute(select(*_COLUMNS).where(NAMESPACES.c.name == name)).one_or_none()
    return _namespace(row) if row else None


def get(connection: Connection, name: str) -> NamespaceRow:
    """Return the namespace.

    Raises:
        NotFoundError: when there is none of that name.
    """
    if (found := find(connection, name)) is None:
        raise NotFoundError(f"there is no namespace {name[:MAX_NAME]!r}")
    return found


def listed(
    connection: Connection, where: ColumnElement[bool], *, limit: int, after: str = ""
) -> list[NamespaceRow]:
    """Return the namespaces for which a condition holds by name, those after ``after`` only."""
    query = select(*_COLUMNS).where(where, NAMESPACES.c.name > after)
    return [_namespace(row) for row in connection.execute(query.order_by("name").limit(limit))]


def change(
    connection: Connection, namespace: NamespaceRow, *, read: str, quota: int | None
) -> None:
    """Set who may read a namespace, and its quota."""
    where = NAMESPACES.c.id == namespace.id
    connection.execute(update(NAMESPACES).where(where).values(read=read, quota=quota))


def role(connection: Connection, namespace_id: int, user_id: int) -> str | None:
    """Return what a user is in a namespace: ``owner``, ``publisher`` or nothing."""
    query = select(MEMBERS.c.role).where(
        MEMBERS.c.namespace_id == namespace_id, MEMBERS.c.user_id == user_id
    )
    return connection.execute(query).scalar_one_or_none()


def members(connection: Connection, namespace_id: int) -> dict[str, str]:
    """Return the role of each member by name, without removed users."""
    query = (
        select(USERS.c.name, MEMBERS.c.role)
        .join(USERS, USERS.c.id == MEMBERS.c.user_id)
        .where(MEMBERS.c.namespace_id == namespace_id, USERS.c.removed.is_(None))
        .order_by(USERS.c.name)
    )
    return {name: role for name, role in connection.execute(query)}


def set_member(connection: Connection, namespace: NamespaceRow, user: str, role: str) -> None:
    """Give a user a role in a namespace, instead of the one before.

    Raises:
        UsageError: when the role is none.
        NotFoundError: when there is no such user.
        ConflictError: when the namespace would be without an owner.
    """
    if role not in ROLES:
        raise UsageError(f"{role[:40]!r} is not a role", hint=f"roles are {' and '.join(ROLES)}")
    user_id = _live_user(connection, user)
    if role != "owner":
        _demand_other_owner(connection, namespace, user)
    _leave(connection, namespace.id, user_id)
    values = {"namespace_id": namespace.id, "user_id": user_id, "role": role}
    connection.execute(insert(MEMBERS).values(values))


def remove_member(connection: Connection, namespace: NamespaceRow, user: str) -> None:
    """Take away the role of a user in a namespace.

    Raises:
        NotFoundError: when the user is no member.
        ConflictError: when the namespace would be without an owner.
    """
    if user not in members(connection, namespace.id):
        raise NotFoundError(f"{user[:MAX_NAME]!r} is not a member of {namespace.name}")
    _demand_other_owner(connection, namespace, user)
    _leave(connection, namespace.id, _live_user(connection, user))


def owned_alone(connection: Connection, user_id: int) -> list[str]:
    """Return the namespaces whose only owner is this user."""
    live = (
        select(MEMBERS.c.namespace_id, func.count().label("owners"))
        .join(USERS, USERS.c.id == MEMBERS.c.user_id)
        .where(MEMBERS.c.role == "owner", USERS.c.removed.is_(None))
        .group_by(MEMBERS.c.namespace_id)
        .subquery()
    )
    query = (
        select(NAMESPACES.c.name)
        .join(live, live.c.namespace_id == NAMESPACES.c.id)
        .join(MEMBERS, MEMBERS.c.namespace_id == NAMESPACES.c.id)
        .where(live.c.owners == 1, MEMBERS.c.user_id == user_id, MEMBERS.c.role == "owner")
        .order_by(NAMESPACES.c.name)
    )
    return list(connection.execute(query).scalars())


def _namespace(row: Row[int, str, str, str, int | None]) -> NamespaceRow:
    return NamespaceRow(*row)


def _demand_free(connection: Connection, name: str) -> None:
    query = select(NAMESPACES.c.name).where(NAMESPACES.c.skeleton == skeleton(name))
    taken = connection.execute(query.limit(1)).scalar_one_or_none()
    if taken == name:
        raise ConflictError(f"the name {name!r} is taken")
    if taken is not None:
        raise ConflictError(f"{name!r} looks like {taken!r}, which is taken", hint="choose another")


def _live_user(connection: Connection, name: str) -> int:
    query = select(USERS.c.id).where(USERS.c.name == name, USERS.c.removed.is_(None))
    user_id: int | None = connection.execute(query).scalar_one_or_none()
    if user_id is None:
        raise NotFoundError(f"there is no user {name[:MAX_NAME]!r}")
    return user_id


def _demand_other_owner(connection: Connection, namespace: NamespaceRow, user: str) -> None:
    owners = {n for n, r in members(connection, namespace.id).items() if r == "owner"}
    if owners == {user}:
        hint = "make somebody else an owner first"
        raise ConflictError(f"{user} is the only owner of {namespace.name}", hint=hint)


def _leave(connection: Connection, namespace_id: int, user_id: int) -> None:
    where = (MEMBERS.c.namespace_id == namespace_id, MEMBERS.c.user_id == user_id)
    connection.execute(delete(MEMBERS).where(*where))
