"""Namespaces: their names, members and quotas.

Names are lower-case ASCII letters, digits and dashes (``expertctl.reference``). Two names are
confusable if they are equal after folding look-alikes: ``1``, ``l`` and ``i``; ``0`` and ``o``;
``rn`` and ``m``; ``vv`` and ``w``; dashes anywhere. Names are never reused, so namespaces cannot be
removed.

The quota covers every blob that a repository of the namespace links, counted once; the manifests;
and the bytes that running uploads have received. Database triggers keep the sum, so reading it
takes the same time for any number of rows. Callers check the quota in the write transaction that
uses it: SQLite has one writer at a time, so concurrent uploads cannot exceed it together.
"""

import re
import time
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, select, update

from expertctl.errors import BudgetError, ConflictError, NotFoundError, StoreError, UsageError
from expertctl.reference import NAME_PATTERN
from registry_server.database.tables import (
    BLOBS,
    MANIFESTS,
    MEMBERS,
    NAMESPACES,
    REPOSITORIES,
    REPOSITORY_BLOBS,
    UPLOADS,
    USERS,
)
from registry_server.settings import RegistryLimits

_LOOK_ALIKES = str.maketrans({"1": "l", "i": "l", "0": "o", "-": None, "_": None, ".": None})
_LOOK_ALIKE_PAIRS = (("rn", "m"), ("vv", "w"))

RESERVED_NAMES = frozenset(
    [
        "account",
        "accounts",
        "admin",
        "administrator",
        "all",
        "anonymous",
        "api",
        "auth",
        "blobs",
        "catalog",
        "docs",
        "everyone",
        "expert",
        "expertctl",
        "experts",
        "favicon",
        "healthz",
        "help",
        "index",
        "keys",
        "latest",
        "library",
        "local",
        "localhost",
        "login",
        "logout",
        "manifests",
        "me",
        "metrics",
        "namespaces",
        "new",
        "none",
        "null",
        "official",
        "packages",
        "public",
        "readyz",
        "registry",
        "robots",
        "root",
        "search",
        "security",
        "settings",
        "signin",
        "signup",
        "starter",
        "static",
        "stats",
        "support",
        "system",
        "tags",
        "test",
        "token",
        "tokens",
        "tuf",
        "uploads",
        "user",
        "users",
        "v1",
        "v2",
        "web",
        "whoami",
        "www",
    ]
)
"""Words that name parts of the registry, or that could be mistaken for its operator."""


def fold_name(name: str) -> str:
    """Return ``name`` with look-alike characters folded."""
    folded = name.translate(_LOOK_ALIKES)
    for pair, single in _LOOK_ALIKE_PAIRS:
        folded = folded.replace(pair, single)
    return folded


RESERVED_SKELETONS = frozenset(fold_name(word) for word in RESERVED_NAMES)


def is_reserved(name: str) -> bool:
    """Return whether ``name`` is a reserved word, or looks like one."""
    return fold_name(name) in RESERVED_SKELETONS


KINDS = ("expert", "oci")
READ_ACCESS = ("public", "token")
ROLES = ("owner", "publisher")
MAX_NAME = 64
_NAME_SYNTAX = re.compile(NAME_PATTERN)
_NAMESPACE_COLUMNS = (
    NAMESPACES.c.id,
    NAMESPACES.c.name,
    NAMESPACES.c.kind,
    NAMESPACES.c.read,
    NAMESPACES.c.quota,
)


@dataclass(frozen=True, slots=True)
class NamespaceRow:
    """A namespace; ``quota`` is None for the default of the registry."""

    id: int
    name: str
    kind: str
    read: str
    quota: int | None


def validate_name(name: str, what: str) -> None:
    """Check that a name has only lower-case letters, digits and single dashes.

    Raises:
        UsageError: when it is invalid.
        ConflictError: when it is a reserved word, or looks like one.
    """
    if len(name) > MAX_NAME or not _NAME_SYNTAX.fullmatch(name):
        hint = "lower-case letters, digits and single dashes, 64 at most"
        raise UsageError(f"{name[:80]!r} is not a name for a {what}", hint=hint)
    if is_reserved(name):
        raise ConflictError(
            f"{name!r} is a reserved word, or looks like one", hint="choose another"
        )


def create_namespace(
    connection: Connection, name: str, *, kind: str, read: str, quota: int | None = None
) -> NamespaceRow:
    """Create a namespace without members.

    Raises:
        UsageError: when the name, the kind or the read access is invalid.
        ConflictError: when the name is taken, or looks like one that is taken.
    """
    validate_name(name, "namespace")
    if kind not in KINDS or read not in READ_ACCESS:
        raise UsageError(
            f"a namespace is {' or '.join(KINDS)}, and read by {' or '.join(READ_ACCESS)}"
        )
    _check_name_is_free(connection, name)
    values = {"name": name, "kind": kind, "read": read, "quota": quota}
    connection.execute(
        insert(NAMESPACES).values(**values, skeleton=fold_name(name), created=time.time())
    )
    return get_namespace(connection, name)


def find_namespace(connection: Connection, name: str) -> NamespaceRow | None:
    """Return the namespace with a name; None if there is none."""
    row = connection.execute(
        select(*_NAMESPACE_COLUMNS).where(NAMESPACES.c.name == name)
    ).one_or_none()
    return _read_row(row) if row else None


def get_namespace(connection: Connection, name: str) -> NamespaceRow:
    """Return the namespace.

    Raises:
        NotFoundError: when there is no such namespace.
    """
    if (found := find_namespace(connection, name)) is None:
        raise NotFoundError(f"there is no namespace {name[:MAX_NAME]!r}")
    return found


def list_namespaces(
    connection: Connection, where: ColumnElement[bool], *, limit: int, after: str = ""
) -> list[NamespaceRow]:
    """Return the namespaces that match a condition and come after ``after``, sorted by name."""
    query = select(*_NAMESPACE_COLUMNS).where(where, NAMESPACES.c.name > after)
    return [_read_row(row) for row in connection.execute(query.order_by("name").limit(limit))]


def update_namespace(
    connection: Connection, namespace: NamespaceRow, *, read: str, quota: int | None
) -> None:
    """Set who may read a namespace, and its quota."""
    where = NAMESPACES.c.id == namespace.id
    connection.execute(update(NAMESPACES).where(where).values(read=read, quota=quota))


def find_role(connection: Connection, namespace_id: int, user_id: int) -> str | None:
    """Return the role of a user in a namespace: ``owner``, ``publisher`` or None."""
    query = select(MEMBERS.c.role).where(
        MEMBERS.c.namespace_id == namespace_id, MEMBERS.c.user_id == user_id
    )
    return connection.execute(query).scalar_one_or_none()


def list_members(connection: Connection, namespace_id: int) -> dict[str, str]:
    """Return the role of each member, sorted by name, without removed users."""
    query = (
        select(USERS.c.name, MEMBERS.c.role)
        .join(USERS, USERS.c.id == MEMBERS.c.user_id)
        .where(MEMBERS.c.namespace_id == namespace_id, USERS.c.removed.is_(None))
        .order_by(USERS.c.name)
    )
    return {name: role for name, role in connection.execute(query)}


def list_roles(connection: Connection, user_id: int, where: ColumnElement[bool]) -> dict[str, str]:
    """Return the role of a user in each namespace for which ``where`` holds, sorted by name."""
    query = (
        select(NAMESPACES.c.name, MEMBERS.c.role)
        .join(NAMESPACES, NAMESPACES.c.id == MEMBERS.c.namespace_id)
        .where(MEMBERS.c.user_id == user_id, where)
        .order_by(NAMESPACES.c.name)
    )
    return {name: role for name, role in connection.execute(query)}


def set_member(connection: Connection, namespace: NamespaceRow, user: str, role: str) -> None:
    """Give a user a role in a namespace; it replaces the previous role.

    Raises:
        UsageError: when the role is invalid.
        NotFoundError: when there is no such user.
        ConflictError: when the namespace would have no owner left.
    """
    if role not in ROLES:
        raise UsageError(f"{role[:40]!r} is not a role", hint=f"roles are {' and '.join(ROLES)}")
    user_id = _get_active_user_id(connection, user)
    if role != "owner":
        _check_another_owner(connection, namespace, user)
    _delete_membership(connection, namespace.id, user_id)
    values = {"namespace_id": namespace.id, "user_id": user_id, "role": role}
    connection.execute(insert(MEMBERS).values(values))


def remove_member(connection: Connection, namespace: NamespaceRow, user: str) -> None:
    """Remove the role of a user in a namespace.

    Raises:
        NotFoundError: when the user is not a member.
        ConflictError: when the namespace would have no owner left.
    """
    if user not in list_members(connection, namespace.id):
        raise NotFoundError(f"{user[:MAX_NAME]!r} is not a member of {namespace.name}")
    _check_another_owner(connection, namespace, user)
    _delete_membership(connection, namespace.id, _get_active_user_id(connection, user))


def list_solely_owned(connection: Connection, user_id: int) -> list[str]:
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


def _read_row(row: Row[int, str, str, str, int | None]) -> NamespaceRow:
    return NamespaceRow(*row)


def _check_name_is_free(connection: Connection, name: str) -> None:
    query = select(NAMESPACES.c.name).where(NAMESPACES.c.skeleton == fold_name(name))
    taken = connection.execute(query.limit(1)).scalar_one_or_none()
    if taken == name:
        raise ConflictError(f"the name {name!r} is taken")
    if taken is not None:
        raise ConflictError(f"{name!r} looks like {taken!r}, which is taken", hint="choose another")


def _get_active_user_id(connection: Connection, name: str) -> int:
    query = select(USERS.c.id).where(USERS.c.name == name, USERS.c.removed.is_(None))
    user_id: int | None = connection.execute(query).scalar_one_or_none()
    if user_id is None:
        raise NotFoundError(f"there is no user {name[:MAX_NAME]!r}")
    return user_id


def _check_another_owner(connection: Connection, namespace: NamespaceRow, user: str) -> None:
    owners = {n for n, r in list_members(connection, namespace.id).items() if r == "owner"}
    if owners == {user}:
        hint = "add another owner first"
        raise ConflictError(f"{user} is the only owner of {namespace.name}", hint=hint)


def _delete_membership(connection: Connection, namespace_id: int, user_id: int) -> None:
    where = (MEMBERS.c.namespace_id == namespace_id, MEMBERS.c.user_id == user_id)
    connection.execute(delete(MEMBERS).where(*where))


def require_quota(
    connection: Connection, namespace: NamespaceRow, added_bytes: int, limits: RegistryLimits
) -> None:
    """Check that ``extra_bytes`` more fit into the quota of the namespace.

    Raises:
        BudgetError: when they do not.
    """
    quota = get_quota(namespace, limits)
    used = get_used_bytes(connection, namespace.id)
    if used + added_bytes > quota:
        raise BudgetError(
            f"{namespace.name} uses {used} of {quota} bytes; {added_bytes} more do not fit",
            hint="an admin of the registry can raise the quota of the namespace",
        )


def get_quota(namespace: NamespaceRow, limits: RegistryLimits) -> int:
    """Return the quota of a namespace in bytes: its own, or the default."""
    return limits.quota_bytes if namespace.quota is None else namespace.quota


def get_used_bytes(connection: Connection, namespace_id: int) -> int:
    """Return the unique bytes of a namespace, including running uploads."""
    query = select(NAMESPACES.c.used).where(NAMESPACES.c.id == namespace_id)
    used: int = connection.execute(query).scalar_one()
    return used


def check_used_bytes(connection: Connection) -> None:
    """Recount the bytes of all namespaces.

    Raises:
        StoreError: when a sum differs from the stored one.
    """
    rows = connection.execute(select(NAMESPACES.c.id, NAMESPACES.c.name, NAMESPACES.c.used))
    for namespace_id, name, used in rows.all():
        if used != (found := _recount_bytes(connection, namespace_id)):
            raise StoreError(f"{name} uses {found} bytes, and {used} were counted")


def _recount_bytes(connection: Connection, namespace_id: int) -> int:
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
