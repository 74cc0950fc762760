"""Tokens: secrets that stand for a user, perhaps limited to scopes and a time.

A secret is ``xpt_`` and 256 random bits. It is shown once, when it is minted; the database has its
sha256, which needs no salt and no slow hash at that length. A token ends when it expires, is
revoked, or its user is removed; that is looked at with every request.
"""

import hashlib
import hmac
import json
import secrets
import time
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, Row, Select, insert, select, update

from expertctl.errors import ForbiddenError, NotFoundError, UsageError
from registry_server.access import namespaces, rights
from registry_server.access.identity import Action, Identity, Scope
from registry_server.access.users import User
from registry_server.database.tables import TOKENS, USERS

PREFIX = "xpt_"
LENGTH = len(PREFIX) + 43
MAX_SCOPES = 50
MAX_SECONDS = 10 * 366 * 86400
_USED_GRAIN = 60.0
"""How often ``last_used`` is worth a write, in seconds."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token, without its secret."""

    id: str
    user: str
    name: str
    scopes: tuple[Scope, ...]
    created: float
    expires: float | None
    last_used: float | None


@dataclass(frozen=True, slots=True)
class Minted:
    """A new token; ``secret`` is nowhere else."""

    token: Token
    secret: str

    def __repr__(self) -> str:
        """Return a text without the secret, for logs and tracebacks."""
        return f"Minted({self.token!r})"


def create(
    connection: Connection,
    user: User,
    *,
    name: str,
    scopes: tuple[Scope, ...],
    expires: float | None = None,
) -> Minted:
    """Make a token for ``user``; what it may be is for the caller to decide (see `mint`)."""
    secret = PREFIX + secrets.token_urlsafe(32)
    token = Token(secrets.token_hex(8), user.name, name, scopes, time.time(), expires, None)
    connection.execute(
        insert(TOKENS).values(
            id=token.id,
            user_id=user.id,
            name=name,
            hash=digest(secret),
            scopes=json.dumps([str(scope) for scope in scopes]),
            created=token.created,
            expires=expires,
        )
    )
    return Minted(token, secret)


def mint(
    connection: Connection,
    identity: Identity,
    user: User,
    *,
    name: str,
    scopes: tuple[Scope, ...],
    seconds: int | None,
) -> Minted:
    """Make a token for oneself that may do no more, and lives no longer, than the one used.

    Without scopes it gets those of the token used.

    Raises:
        ForbiddenError: when a scope goes beyond the token used.
        UsageError: when there are too many scopes or the time is out of range.
    """
    if len(scopes) > MAX_SCOPES or (seconds is not None and not 0 < seconds <= MAX_SECONDS):
        raise UsageError(f"a token has at most {MAX_SCOPES} scopes and lives at most 10 years")
    beyond = [str(s) for s in scopes if not _within(connection, identity, s)]
    if beyond or not (scopes or identity.scopes):
        named = ", ".join(beyond[:5]) or "nothing"
        raise ForbiddenError(f"this token cannot give the scope {named}: it has less itself")
    limits = [t for t in (identity.expires, seconds and time.time() + seconds) if t is not None]
    expires = min(limits, default=None)
    chosen = scopes or identity.scopes
    return create(connection, user, name=name, scopes=chosen, expires=expires)


def find(connection: Connection, secret: str) -> Identity | None:
    """Return whom a secret stands for now; None for anything that is not a living token."""
    if not is_well_formed(secret):
        return None
    hashed = digest(secret)
    row = connection.execute(_identities(TOKENS.c.hash == hashed)).one_or_none()
    if row is None or not hmac.compare_digest(row.hash, hashed):
        return None
    return _identity(row)


def is_well_formed(secret: str) -> bool:
    """Tell whether a text has the form of a secret."""
    return len(secret) == LENGTH and secret.startswith(PREFIX)


def was_minted(connection: Connection, secret: str) -> bool:
    """Tell whether a secret is or was one of a token, living or not."""
    query = select(TOKENS.c.id).where(TOKENS.c.hash == digest(secret))
    return connection.execute(query).first() is not None


def find_by_id(connection: Connection, token_id: str) -> Identity | None:
    """Return whom a token stands for now, by its id; for what was derived from it."""
    row = connection.execute(_identities(TOKENS.c.id == token_id)).one_or_none()
    return None if row is None else _identity(row)


def get(connection: Connection, token_id: str) -> Token:
    """Return a living token.

    Raises:
        NotFoundError: when there is none with that id.
    """
    found = _tokens(connection, TOKENS.c.id == token_id)
    if not found:
        raise NotFoundError(f"there is no token {token_id[:32]!r}")
    return found[0]


def listed(connection: Connection, user: str, *, limit: int, after: str = "") -> list[Token]:
    """Return the living tokens of a user by id, those after ``after`` only."""
    return _tokens(connection, USERS.c.name == user, TOKENS.c.id > after)[:limit]


def revoke(connection: Connection, token_id: str) -> None:
    """End a token now."""
    where = (TOKENS.c.id == token_id, TOKENS.c.revoked.is_(None))
    connection.execute(update(TOKENS).where(*where).values(revoked=time.time()))


def touch(connection: Connection, token_id: str) -> None:
    """Remember that a token was used now, to the minute."""
    now = time.time()
    stale = TOKENS.c.last_used.is_(None) | (TOKENS.c.last_used < now - _USED_GRAIN)
    where = (TOKENS.c.id == token_id, stale)
    connection.execute(update(TOKENS).where(*where).values(last_used=now))


def digest(secret: str) -> str:
    """Return what the database has of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _within(connection: Connection, identity: Identity, scope: Scope) -> bool:
    """Tell whether the token used has ``scope`` itself, and its user the right to it."""
    if not identity.covers(scope.action, scope.namespace, scope.package):
        return False
    if scope.action is Action.ADMIN:
        return identity.admin
    if scope.namespace is None or scope.action is Action.READ:
        return True
    namespace = namespaces.find(connection, scope.namespace)
    return namespace is not None and rights.allowed(connection, identity, scope.action, namespace)


def _identities(
    where: ColumnElement[bool],
) -> Select[int, str, bool, str, str, float | None, str]:
    now = time.time()
    alive = (
        TOKENS.c.revoked.is_(None),
        USERS.c.removed.is_(None),
        TOKENS.c.expires.is_(None) | (TOKENS.c.expires > now),
    )
    columns = (USERS.c.id, USERS.c.name, USERS.c.admin, TOKENS.c.id.label("token"))
    query = select(*columns, TOKENS.c.scopes, TOKENS.c.expires, TOKENS.c.hash)
    return query.join(USERS, USERS.c.id == TOKENS.c.user_id).where(where, *alive)


def _identity(row: Row[int, str, bool, str, str, float | None, str]) -> Identity:
    user_id, name, admin, token_id, scopes, expires, _ = row
    parsed = _scopes(scopes)
    return Identity(user_id, name, admin, token_id, parsed, expires=expires)


def _tokens(connection: Connection, *where: ColumnElement[bool]) -> list[Token]:
    now = time.time()
    columns = (TOKENS.c.id, USERS.c.name, TOKENS.c.name, TOKENS.c.scopes, TOKENS.c.created)
    query = (
        select(*columns, TOKENS.c.expires, TOKENS.c.last_used)
        .join(USERS, USERS.c.id == TOKENS.c.user_id)
        .where(*where, TOKENS.c.revoked.is_(None))
        .where(TOKENS.c.expires.is_(None) | (TOKENS.c.expires > now))
        .order_by(TOKENS.c.id)
    )
    return [
        Token(id_, user, name, _scopes(scopes), created, expires, used)
        for id_, user, name, scopes, created, expires, used in connection.execute(query)
    ]


def _scopes(text: str) -> tuple[Scope, ...]:
    return tuple(Scope.parse(scope) for scope in json.loads(text))
