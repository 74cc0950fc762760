"""Operations on users and tokens, and the audit log."""

from typing import Annotated

from msgspec import Meta
from sqlalchemy import Connection

from expertctl.errors import ForbiddenError, NotFoundError, UsageError
from expertctl.http.operation import Operation
from expertctl.registry.index_document import format_timestamp
from registry_server.access import accounts, rights
from registry_server.access.rights import Action, Identity, TokenScope, list_all_scopes
from registry_server.api.schema import (
    ApiContext,
    ApiInput,
    ApiOutput,
    AuditQuery,
    Line,
    ListQuery,
    Name,
    ScopeText,
    Time,
    TokenId,
    format_optional_time,
)


class TokenFacts(ApiOutput, frozen=True):
    """A token, without its secret."""

    id: str
    name: str
    scopes: list[str]
    created: Time
    expires: Time | None
    last_used: Time | None


class CreatedToken(TokenFacts, frozen=True):
    """A new token with its secret, which is not shown again."""

    token: str


class TokenPage(ApiOutput, frozen=True):
    """A page of tokens, newest first."""

    tokens: list[TokenFacts]
    next: str | None


class TokenRequest(ApiInput, frozen=True):
    """A new token; without scopes it gets those of the token of the request."""

    name: Line
    scopes: Annotated[tuple[ScopeText, ...], Meta(max_length=accounts.MAX_SCOPES)] = ()
    expires_in: Annotated[int, Meta(ge=1, le=accounts.MAX_TOKEN_SECONDS)] | None = None


class TokenPath(ApiInput, frozen=True):
    """Identifies a token."""

    id: TokenId


class CurrentToken(ApiOutput, frozen=True):
    """The token of the request; a session token has the id of the token that requested it."""

    id: str
    name: str
    scopes: list[str]
    expires: Time | None


class CurrentUser(ApiOutput, frozen=True):
    """The user of the request."""

    user: str
    admin: bool
    token: CurrentToken


class UserFacts(ApiOutput, frozen=True):
    """A user."""

    name: str
    admin: bool
    created: Time


class UserPage(ApiOutput, frozen=True):
    """A page of users, sorted by name."""

    users: list[UserFacts]
    next: str | None


class UserRequest(ApiInput, frozen=True):
    """A new user."""

    name: Name
    admin: bool = False


class CreatedUser(ApiOutput, frozen=True):
    """A new user with a first token, which is not shown again."""

    user: UserFacts
    token: str


class UserPath(ApiInput, frozen=True):
    """Identifies a user."""

    name: Name


class AuditEntry(ApiOutput, frozen=True):
    """A change recorded in the audit log."""

    id: int
    time: Time
    actor: str | None
    token_id: str | None
    address: str | None
    action: str
    target: str
    detail: str


class AuditPage(ApiOutput, frozen=True):
    """A page of the audit log, newest first."""

    entries: list[AuditEntry]
    next: str | None


def whoami(context: ApiContext) -> CurrentUser:
    """Return the user and the token of the request."""
    identity = context.identity
    rights.require_user(identity)
    with context.registry.database.read() as connection:
        token = accounts.get_token(connection, identity.token_id or "")
    scopes = [str(scope) for scope in identity.scopes]
    facts = CurrentToken(token.id, token.name, scopes, format_optional_time(identity.expires))
    return CurrentUser(identity.name or "", identity.admin, facts)


def list_users(context: ApiContext, query: ListQuery) -> UserPage:
    """List the users, sorted by name."""
    rights.require_right(context.identity, Action.ADMIN)
    with context.registry.database.read() as connection:
        found = accounts.list_users(connection, limit=query.limit + 1, after=query.cursor)
    shown = found[: query.limit]
    more = shown[-1].name if len(found) > query.limit else None
    return UserPage([_user_facts(user) for user in shown], more)


def create_user(context: ApiContext, body: UserRequest) -> CreatedUser:
    """Create a user, and a first token with all rights of the user."""
    rights.require_right(context.identity, Action.ADMIN)
    with context.registry.database.write() as connection:
        user = accounts.create_user(connection, body.name, admin=body.admin)
        scopes = list_all_scopes(admin=user.admin)
        minted = accounts.create_token(connection, user, name="first", scopes=scopes)
        kind = "admin" if user.admin else ""
        rights.write_audit_row(connection, context.identity, "user.create", user.name, kind)
    return CreatedUser(_user_facts(user), minted.secret)


def remove_user(context: ApiContext, path: UserPath) -> None:
    """Remove a user: tokens and roles end at once; the name stays reserved."""
    rights.require_right(context.identity, Action.ADMIN)
    with context.registry.database.write() as connection:
        accounts.remove_user(connection, accounts.get_user(connection, path.name))
        rights.write_audit_row(connection, context.identity, "user.remove", path.name)


def list_tokens(context: ApiContext, query: ListQuery) -> TokenPage:
    """List the valid tokens of the caller, without their secrets."""
    _require_full_token(context.identity)
    name = context.identity.name or ""
    with context.registry.database.read() as connection:
        found = accounts.list_tokens(connection, name, limit=query.limit + 1, after=query.cursor)
    shown = found[: query.limit]
    more = shown[-1].id if len(found) > query.limit else None
    return TokenPage([_token_facts(token) for token in shown], more)


def create_token(context: ApiContext, body: TokenRequest) -> CreatedToken:
    """Create a token with at most the rights and the lifetime of the token of the request."""
    return create_token_once(context, body, accounts.make_token_id())


def create_token_once(context: ApiContext, body: TokenRequest, token_id: str) -> CreatedToken:
    """Create a token as `create_token` does, with an id that no token had before.

    Raises:
        ConflictError: when there is, or was, a token with this id.
    """
    identity = context.identity
    rights.require_user(identity)
    if not body.name.isprintable():
        raise UsageError("the name of a token is one printable line")
    scopes = tuple(dict.fromkeys(TokenScope.parse(text) for text in body.scopes))
    with context.registry.database.write() as connection:
        user = accounts.get_user(connection, identity.name or "")
        minted = accounts.mint_token(
            connection,
            identity,
            user,
            name=body.name,
            scopes=scopes,
            seconds=body.expires_in,
            token_id=token_id,
        )
        facts = _token_facts(minted.token)
        rights.write_audit_row(
            connection, identity, "token.create", facts.id, " ".join(facts.scopes)
        )
    return CreatedToken(
        facts.id,
        facts.name,
        facts.scopes,
        facts.created,
        facts.expires,
        facts.last_used,
        minted.secret,
    )


def show_revocable_token(context: ApiContext, path: TokenPath) -> TokenFacts:
    """Return a token that the caller may revoke."""
    rights.require_user(context.identity)
    with context.registry.database.read() as connection:
        _check_may_revoke(connection, context.identity, path.id)
        return _token_facts(accounts.get_token(connection, path.id))


def revoke_token(context: ApiContext, path: TokenPath) -> None:
    """Revoke a token: the caller's own, or any token as an admin."""
    identity = context.identity
    rights.require_user(identity)
    with context.registry.database.write() as connection:
        _check_may_revoke(connection, identity, path.id)
        accounts.revoke_token(connection, path.id)
        rights.write_audit_row(connection, identity, "token.revoke", path.id)


def list_audit(context: ApiContext, query: AuditQuery) -> AuditPage:
    """List who changed what, and from where, newest first."""
    rights.require_right(context.identity, Action.ADMIN)
    before = int(query.cursor) if query.cursor else None
    with context.registry.database.read() as connection:
        found = list(rights.list_audit_rows(connection, limit=query.limit + 1, before=before))
    shown = found[: query.limit]
    more = str(shown[-1].id) if len(found) > query.limit else None
    return AuditPage([_audit_entry(entry) for entry in shown], more)


OPERATIONS = (
    Operation("GET", "/api/v1/whoami", whoami, "people"),
    Operation("GET", "/api/v1/users", list_users, "people", errors=(403,)),
    Operation("POST", "/api/v1/users", create_user, "people", 201, errors=(403, 409)),
    Operation("DELETE", "/api/v1/users/{name}", remove_user, "people", 204, (403, 404, 409)),
    Operation("GET", "/api/v1/tokens", list_tokens, "people", errors=(403,)),
    Operation("POST", "/api/v1/tokens", create_token, "people", 201, errors=(403,)),
    Operation("DELETE", "/api/v1/tokens/{id}", revoke_token, "people", 204, errors=(404,)),
    Operation("GET", "/api/v1/audit", list_audit, "people", errors=(403,)),
)


def _require_full_token(identity: Identity) -> None:
    """Refuse a token with fewer rights than its user: it must not manage other tokens."""
    rights.require_user(identity)
    if not identity.covers(Action.MANAGE, None):
        raise ForbiddenError("this token lacks some rights of its user")


def _check_may_revoke(connection: Connection, identity: Identity, token_id: str) -> None:
    """Allow each token to revoke itself; reveal others only to users who may revoke them."""
    token = accounts.get_token(connection, token_id)
    own = token.user == identity.name and identity.covers(Action.MANAGE, None)
    admin = identity.admin and identity.covers(Action.ADMIN, None)
    itself = token.id == identity.token_id and token.scopes == identity.scopes
    if not (own or admin or itself):
        raise NotFoundError(f"there is no token {token_id!r}")


def _user_facts(user: accounts.UserRow) -> UserFacts:
    return UserFacts(user.name, user.admin, format_timestamp(user.created))


def _token_facts(token: accounts.TokenRow) -> TokenFacts:
    scopes = [str(scope) for scope in token.scopes]
    created, expires = format_timestamp(token.created), format_optional_time(token.expires)
    return TokenFacts(
        token.id, token.name, scopes, created, expires, format_optional_time(token.last_used)
    )


def _audit_entry(entry: rights.AuditRow) -> AuditEntry:
    return AuditEntry(
        entry.id,
        format_timestamp(entry.time),
        entry.actor,
        entry.token_id,
        entry.address,
        entry.action,
        entry.target,
        entry.detail,
    )
