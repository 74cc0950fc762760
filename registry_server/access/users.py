"""Users: made and removed by admins. A removed one stays as a row, so its name is never free."""

import time
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, func, insert, select, update

from expertctl.errors import ConflictError, NotFoundError
from registry_server.access.namespaces import MAX_NAME, check_name, owned_alone
from registry_server.database.tables import MEMBERS, TOKENS, USERS


@dataclass(frozen=True, slots=True)
class User:
    """One live user."""

    id: int
    name: str
    admin: bool
    created: float


def create(connection: Connection, name: str, *, admin: bool = False) -> User:
    """Make a user.

    Raises:
        UsageError: when it is no name, or a reserved word.
        ConflictError: when somebody has or had the name.
    """
    if name != FIRST_ADMIN:
        check_name(name, "user")
    taken = connection.execute(select(USERS.c.id).where(USERS.c.name == name)).one_or_none()
    if taken:
        raise ConflictError(f"the name {name!r} is taken", hint="names are never free again")
    values = {"name": name, "admin": admin, "created": time.time()}
    connection.execute(insert(USERS).values(values))
    return get(connection, name)


FIRST_ADMIN = "admin"
"""The one reserved word that is a user: whoever made the registry."""


def get(connection: Connection, name: str) -> User:
    """Return a live user.

    Raises:
        NotFoundError: when there is none of that name.
    """
    found = _select(connection, USERS.c.name == name)
    if not found:
        raise NotFoundError(f"there is no user {name[:MAX_NAME]!r}")
    return found[0]


def listed(connection: Connection, *, limit: int, after: str = "") -> list[User]:
    """Return live users by name, those after ``after`` only."""
    return _select(connection, USERS.c.name > after, limit=limit)


def remove(connection: Connection, user: User) -> None:
    """Remove a user: all its tokens and roles end now, its name stays taken.

    Raises:
        ConflictError: when it is the last admin, or the only owner of a namespace.
    """
    if alone := owned_alone(connection, user.id):
        hint = "make somebody else an owner first"
        raise ConflictError(f"{user.name} is the only owner of {', '.join(alone[:5])}", hint=hint)
    if user.admin and _admins(connection) == 1:
        raise ConflictError(f"{user.name} is the only admin", hint="make another one first")
    now = time.time()
    connection.execute(update(USERS).where(USERS.c.id == user.id).values(removed=now))
    live = (TOKENS.c.user_id == user.id, TOKENS.c.revoked.is_(None))
    connection.execute(update(TOKENS).where(*live).values(revoked=now))
    connection.execute(MEMBERS.delete().where(MEMBERS.c.user_id == user.id))


def _select(connection: Connection, where: ColumnElement[bool], *, limit: int = 1) -> list[User]:
    query = select(USERS.c.id, USERS.c.name, USERS.c.admin, USERS.c.created)
    query = query.where(where, USERS.c.removed.is_(None)).order_by(USERS.c.name).limit(limit)
    return [User(*row) for row in connection.execute(query)]


def _admins(connection: Connection) -> int:
    query = select(func.count()).select_from(USERS)
    live = query.where(USERS.c.admin.is_(True), USERS.c.removed.is_(None))
    return connection.execute(live).scalar_one()
