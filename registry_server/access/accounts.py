"""Users, their tokens, and the session tokens of container clients.

Admins create and remove users. The row of a removed user is kept, so its name is never reused.

A token authenticates a user; it may be limited to scopes and may expire. Its secret is ``xpt_`` and
256 random bits and is shown only once, when it is created; the database stores the sha256 of it,
which at that length needs neither a salt nor a slow hash. A token is valid until it expires, is
revoked, or its user is removed; every request checks that.

A session token is issued by ``/token`` for five minutes and a few repositories. It contains the id
of the token that requested it, its own scopes and its expiry, protected by a MAC, and is not
stored. It never grants more than that token does now: when the token is revoked or its user is
removed, the session ends too. The MAC key is derived from the index key, so all workers share it,
and access to the database is not enough to forge sessions.
"""

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from sqlalchemy import ColumnElement, Connection, Row, Select, func, insert, select, tuple_, update

from expertctl.errors import ConflictError, ForbiddenError, NotFoundError, UsageError
from expertctl.trust.keys import PrivateKey
from registry_server.access import namespaces, rights
from registry_server.access.namespaces import MAX_NAME, list_solely_owned, validate_name
from registry_server.access.rights import ANONYMOUS, Action, Identity, TokenScope
from registry_server.database.tables import MEMBERS, TOKENS, USERS
from registry_server.errors import SESSION_PREFIX


@dataclass(frozen=True, slots=True)
class UserRow:
    """A user who was not removed."""

    id: int
    name: str
    admin: bool
    created: float


def create_user(connection: Connection, name: str, *, admin: bool = False) -> UserRow:
    """Create a user.

    Raises:
        UsageError: when the name is invalid or reserved.
        ConflictError: when the name is in use, or was used before.
    """
    if name != FIRST_ADMIN:
        validate_name(name, "user")
    taken = connection.execute(select(USERS.c.id).where(USERS.c.name == name)).one_or_none()
    if taken:
        raise ConflictError(f"the name {name!r} is taken", hint="names are never reused")
    values = {"name": name, "admin": admin, "created": time.time()}
    connection.execute(insert(USERS).values(values))
    return get_user(connection, name)


FIRST_ADMIN = "admin"
"""The one reserved word that is a user: the first admin, created with the registry."""


def get_user(connection: Connection, name: str) -> UserRow:
    """Return a user who was not removed.

    Raises:
        NotFoundError: when there is no such user.
    """
    found = _select_users(connection, USERS.c.name == name)
    if not found:
        raise NotFoundError(f"there is no user {name[:MAX_NAME]!r}")
    return found[0]


def list_users(connection: Connection, *, limit: int, after: str = "") -> list[UserRow]:
    """Return the users that come after ``after``, sorted by name."""
    return _select_users(connection, USERS.c.name > after, limit=limit)


def remove_user(connection: Connection, user: UserRow) -> None:
    """Remove a user and all its tokens and roles; its name stays reserved.

    Raises:
        ConflictError: when it is the last admin, or the only owner of a namespace.
    """
    if alone := list_solely_owned(connection, user.id):
        hint = "add another owner first"
        raise ConflictError(f"{user.name} is the only owner of {', '.join(alone[:5])}", hint=hint)
    if user.admin and _count_admins(connection) == 1:
        raise ConflictError(f"{user.name} is the only admin", hint="make another one first")
    now = time.time()
    connection.execute(update(USERS).where(USERS.c.id == user.id).values(removed=now))
    live = (TOKENS.c.user_id == user.id, TOKENS.c.revoked.is_(None))
    connection.execute(update(TOKENS).where(*live).values(revoked=now))
    connection.execute(MEMBERS.delete().where(MEMBERS.c.user_id == user.id))


def _select_users(
    connection: Connection, where: ColumnElement[bool], *, limit: int = 1
) -> list[UserRow]:
    query = select(USERS.c.id, USERS.c.name, USERS.c.admin, USERS.c.created)
    query = query.where(where, USERS.c.removed.is_(None)).order_by(USERS.c.name).limit(limit)
    return [UserRow(*row) for row in connection.execute(query)]


def _count_admins(connection: Connection) -> int:
    query = select(func.count()).select_from(USERS)
    live = query.where(USERS.c.admin.is_(True), USERS.c.removed.is_(None))
    return connection.execute(live).scalar_one()


TOKEN_PREFIX = "xpt_"  # noqa: S105  # a prefix, not a secret
TOKEN_LENGTH = len(TOKEN_PREFIX) + 43
MAX_SCOPES = 50
MAX_TOKEN_SECONDS = 10 * 366 * 86400
_LAST_USED_RESOLUTION = 60.0
"""Minimum time between two updates of ``last_used``, in seconds."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A token, without its secret."""

    id: str
    user: str
    name: str
    scopes: tuple[TokenScope, ...]
    created: float
    expires: float | None
    last_used: float | None


@dataclass(frozen=True, slots=True)
class MintedToken:
    """A new token with its ``secret``, which is not stored anywhere."""

    token: TokenRow
    secret: str

    def __repr__(self) -> str:
        """Return a representation without the secret, for logs and tracebacks."""
        return f"Minted({self.token!r})"


def make_token_id() -> str:
    """Return the id of a new token, which is random."""
    return secrets.token_hex(8)


def create_token(
    connection: Connection,
    user: UserRow,
    *,
    name: str,
    scopes: tuple[TokenScope, ...],
    expires: float | None = None,
    token_id: str | None = None,
) -> MintedToken:
    """Create a token for ``user``; the caller decides which rights it may have.

    Raises:
        ConflictError: when there is, or was, a token with the id ``token_id``.
    """
    token_id = token_id or make_token_id()
    if connection.execute(select(TOKENS.c.id).where(TOKENS.c.id == token_id)).first():
        raise ConflictError(f"the token {token_id} was made already")
    secret = TOKEN_PREFIX + secrets.token_urlsafe(32)
    token = TokenRow(token_id, user.name, name, scopes, time.time(), expires, None)
    connection.execute(
        insert(TOKENS).values(
            id=token.id,
            user_id=user.id,
            name=name,
            hash=hash_secret(secret),
            scopes=json.dumps([str(scope) for scope in scopes]),
            created=token.created,
            expires=expires,
        )
    )
    return MintedToken(token, secret)


def mint_token(
    connection: Connection,
    identity: Identity,
    user: UserRow,
    *,
    name: str,
    scopes: tuple[TokenScope, ...],
    seconds: int | None,
    token_id: str | None = None,
) -> MintedToken:
    """Create a token with at most the rights and the lifetime of the token of ``identity``.

    Without scopes it gets the scopes of that token.

    Raises:
        ConflictError: when there is, or was, a token with the id ``token_id``.
        ForbiddenError: when a scope exceeds the rights of that token.
        UsageError: when there are too many scopes or the time is out of range.
    """
    if len(scopes) > MAX_SCOPES or (seconds is not None and not 0 < seconds <= MAX_TOKEN_SECONDS):
        raise UsageError(f"a token has at most {MAX_SCOPES} scopes and lives at most 10 years")
    beyond = [str(s) for s in scopes if not _is_within_identity(connection, identity, s)]
    if beyond or not (scopes or identity.scopes):
        named = ", ".join(beyond[:5]) or "nothing"
        raise ForbiddenError(f"this token cannot grant the scope {named}: it does not have it")
    limits = [t for t in (identity.expires, seconds and time.time() + seconds) if t is not None]
    expires = min(limits, default=None)
    chosen = scopes or identity.scopes
    return create_token(
        connection, user, name=name, scopes=chosen, expires=expires, token_id=token_id
    )


def find_identity(connection: Connection, secret: str) -> Identity | None:
    """Return the identity that a secret authenticates; None unless it is a valid token."""
    if not looks_like_token(secret):
        return None
    hashed = hash_secret(secret)
    row = connection.execute(_select_identities(TOKENS.c.hash == hashed)).one_or_none()
    if row is None or not hmac.compare_digest(row.hash, hashed):
        return None
    return _read_identity(row)


def looks_like_token(secret: str) -> bool:
    """Return whether a text has the form of a secret."""
    return len(secret) == TOKEN_LENGTH and secret.startswith(TOKEN_PREFIX)


def was_minted(connection: Connection, secret: str) -> bool:
    """Return whether a secret belongs to a token, valid or not."""
    query = select(TOKENS.c.id).where(TOKENS.c.hash == hash_secret(secret))
    return connection.execute(query).first() is not None


def find_identity_by_id(connection: Connection, token_id: str) -> Identity | None:
    """Return the identity of a token by its id, for sessions derived from it."""
    row = connection.execute(_select_identities(TOKENS.c.id == token_id)).one_or_none()
    return None if row is None else _read_identity(row)


def get_token(connection: Connection, token_id: str) -> TokenRow:
    """Return a valid token.

    Raises:
        NotFoundError: when there is no valid token with that id.
    """
    found = _select_tokens(connection, TOKENS.c.id == token_id)
    if not found:
        raise NotFoundError(f"there is no token {token_id[:32]!r}")
    return found[0]


def list_tokens(
    connection: Connection, user: str, *, limit: int, after: str = ""
) -> list[TokenRow]:
    """Return the valid tokens of a user, newest first; ``after`` is the id of the last one seen."""
    where = [USERS.c.name == user]
    if after:
        seen = TOKENS.alias()
        last = select(seen.c.created, seen.c.id).where(seen.c.id == after).scalar_subquery()
        where.append(tuple_(TOKENS.c.created, TOKENS.c.id) < last)
    return _select_tokens(connection, *where)[:limit]


def revoke_token(connection: Connection, token_id: str) -> None:
    """Revoke a token, effective at once."""
    where = (TOKENS.c.id == token_id, TOKENS.c.revoked.is_(None))
    connection.execute(update(TOKENS).where(*where).values(revoked=time.time()))


def mark_used(connection: Connection, token_id: str) -> None:
    """Record that a token was used now, with a resolution of a minute."""
    now = time.time()
    stale = TOKENS.c.last_used.is_(None) | (TOKENS.c.last_used < now - _LAST_USED_RESOLUTION)
    where = (TOKENS.c.id == token_id, stale)
    connection.execute(update(TOKENS).where(*where).values(last_used=now))


def hash_secret(secret: str) -> str:
    """Return the hash of a secret that the database stores."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _is_within_identity(connection: Connection, identity: Identity, scope: TokenScope) -> bool:
    """Return whether the token has ``scope`` itself and its user has the right to it."""
    if not identity.covers(scope.action, scope.namespace, scope.package):
        return False
    if scope.action is Action.ADMIN:
        return identity.admin
    if scope.namespace is None or scope.action is Action.READ:
        return True
    namespace = namespaces.find_namespace(connection, scope.namespace)
    return namespace is not None and rights.has_right(connection, identity, scope.action, namespace)


def _select_identities(
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


def _read_identity(row: Row[int, str, bool, str, str, float | None, str]) -> Identity:
    user_id, name, admin, token_id, scopes, expires, _ = row
    parsed = _parse_scopes(scopes)
    return Identity(user_id, name, admin, token_id, parsed, expires=expires)


def _select_tokens(connection: Connection, *where: ColumnElement[bool]) -> list[TokenRow]:
    now = time.time()
    columns = (TOKENS.c.id, USERS.c.name, TOKENS.c.name, TOKENS.c.scopes, TOKENS.c.created)
    query = (
        select(*columns, TOKENS.c.expires, TOKENS.c.last_used)
        .join(USERS, USERS.c.id == TOKENS.c.user_id)
        .where(*where, TOKENS.c.revoked.is_(None))
        .where(TOKENS.c.expires.is_(None) | (TOKENS.c.expires > now))
        .order_by(TOKENS.c.created.desc(), TOKENS.c.id.desc())
    )
    return [
        TokenRow(id_, user, name, _parse_scopes(scopes), created, expires, used)
        for id_, user, name, scopes, created, expires, used in connection.execute(query)
    ]


def _parse_scopes(text: str) -> tuple[TokenScope, ...]:
    return tuple(TokenScope.parse(scope) for scope in json.loads(text))


SESSION_SECONDS = 300
MAX_SESSION_LENGTH = 12_000
_MAC_HASH = hashlib.sha256
_MAC_BYTES = 32
_ENCODED_MAC_LENGTH = 43


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Issues and verifies session tokens."""

    _key: bytes

    @classmethod
    def derive(cls, key: PrivateKey) -> "SessionKey":
        """Derive the session key from the index key."""
        derivation = HKDF(hashes.SHA256(), _MAC_BYTES, salt=None, info=b"expertctl session v1")
        return cls(derivation.derive(key.pem()))

    def __repr__(self) -> str:
        """Return a representation without the key."""
        return "SessionKey()"

    def issue(self, identity: Identity, scopes: Sequence[TokenScope]) -> str:
        """Return a session token for this identity, limited to these scopes."""
        ends = time.time() + SESSION_SECONDS
        ends = ends if identity.expires is None else min(ends, identity.expires)
        fields = [identity.token_id, [str(scope) for scope in scopes], ends]
        payload = _encode_base64(json.dumps(fields, separators=(",", ":")).encode("ascii"))
        return f"{SESSION_PREFIX}{payload}.{_encode_base64(self._mac(payload))}"

    def find(self, connection: Connection, secret: str) -> Identity | None:
        """Return the identity that a session token authenticates; None unless it is valid."""
        if not self.is_authentic(secret):
            return None
        payload = secret.removeprefix(SESSION_PREFIX).partition(".")[0]
        token_id, scopes, ends = json.loads(_decode_base64(payload))
        if ends <= time.time():
            return None
        parent = ANONYMOUS if token_id is None else find_identity_by_id(connection, token_id)
        if parent is None:
            return None
        return replace(parent, scopes=tuple(TokenScope.parse(s) for s in scopes), expires=ends)

    def is_authentic(self, secret: str) -> bool:
        """Return whether this key issued a session token, which may have expired."""
        payload, dot, mac = secret.removeprefix(SESSION_PREFIX).partition(".")
        fits = (
            secret.startswith(SESSION_PREFIX)
            and len(secret) <= MAX_SESSION_LENGTH
            and secret.isascii()
        )
        return (
            fits
            and bool(dot)
            and len(mac) == _ENCODED_MAC_LENGTH
            and self._verify_mac(payload, mac)
        )

    def _mac(self, payload: str) -> bytes:
        return hmac.digest(self._key, payload.encode("ascii"), _MAC_HASH)

    def _verify_mac(self, payload: str, mac: str) -> bool:
        try:
            return hmac.compare_digest(_decode_base64(mac), self._mac(payload))
        except (ValueError, binascii.Error):
            return False


def parse_requested_scopes(texts: Sequence[str]) -> list[TokenScope]:
    """Parse the ``scope`` parameters of the docker token protocol; skip unknown ones.

    ``repository:acme/sql:pull,push`` requests to read from and to push to ``acme/sql``.
    """
    words = [word for text in texts for word in text.split(" ") if word]
    if len(words) > MAX_SCOPES or sum(map(len, words)) > MAX_SESSION_LENGTH // 2:
        raise UsageError("too many scopes are asked for")
    return [scope for word in words for scope in _parse_repository_scope(word)]


_DOCKER_ACTIONS: dict[str, tuple[str, ...]] = {
    "pull": ("read",),
    "push": ("push",),
    "delete": ("delete",),
    "*": ("read", "push", "delete"),
}


def _parse_repository_scope(word: str) -> list[TokenScope]:
    kind, _, rest = word.partition(":")
    name, _, actions = rest.rpartition(":")
    if kind != "repository" or "/" not in name:
        return []
    rights = {known for action in actions.split(",") for known in _DOCKER_ACTIONS.get(action, ())}
    try:
        return [TokenScope.parse(f"{action}:{name}") for action in sorted(rights)]
    except UsageError:
        return []


def _encode_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _decode_base64(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
