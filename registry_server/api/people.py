"""Users, their tokens, and the log of what they changed."""

from typing import Annotated

from msgspec import Meta
from sqlalchemy import Connection

from expertctl.errors import ForbiddenError, NotFoundError, UsageError
from registry_server.access import audit, rights, tokens, users
from registry_server.access.identity import Action, Identity, Scope, all_scopes
from registry_server.api.operation import Context, Operation
from registry_server.api.wire import (
    Input,
    Line,
    LogPage,
    Name,
    Output,
    Page,
    ScopeText,
    Time,
    TokenId,
    moment,
    perhaps,
)


class TokenFacts(Output, frozen=True):
    """A token, without its secret."""

    id: str
    name: str
    scopes: list[str]
    created: Time
    expires: Time | None
    last_used: Time | None


class NewToken(TokenFacts, frozen=True):
    """A token with its secret, which is shown this once."""

    token: str


class TokenPage(Output, frozen=True):
    """Tokens by their id."""

    tokens: list[TokenFacts]
    next: str | None


class TokenWish(Input, frozen=True):
    """What a new token shall be; without scopes it gets those of the token that asks."""

    name: Line
    scopes: Annotated[tuple[ScopeText, ...], Meta(max_length=tokens.MAX_SCOPES)] = ()
    expires_in: Annotated[int, Meta(ge=1, le=tokens.MAX_SECONDS)] | None = None


class TokenPath(Input, frozen=True):
    """Which token."""

    id: TokenId


class WhoamiToken(Output, frozen=True):
    """The token that asks; a session of a container client has the id of the one it came from."""

    id: str
    name: str
    scopes: list[str]
    expires: Time | None


class Whoami(Output, frozen=True):
    """Who asks."""

    user: str
    admin: bool
    token: WhoamiToken


class UserFacts(Output, frozen=True):
    """A user."""

    name: str
    admin: bool
    created: Time


class UserPage(Output, frozen=True):
    """Users by name."""

    users: list[UserFacts]
    next: str | None


class UserWish(Input, frozen=True):
    """What a new user shall be."""

    name: Name
    admin: bool = False


class NewUser(Output, frozen=True):
    """A user and a first token, which is shown this once."""

    user: UserFacts
    token: str


class UserPath(Input, frozen=True):
    """Which user."""

    name: Name


class AuditEntry(Output, frozen=True):
    """One change."""

    id: int
    time: Time
    actor: str | None
    token_id: str | None
    address: str | None
    action: str
    target: str
    detail: str


class AuditPage(Output, frozen=True):
    """Changes, the newest first."""

    entries: list[AuditEntry]
    next: str | None


def whoami(context: Context) -> Whoami:
    """Say who asks, and with which token."""
    identity = context.identity
    rights.demand_user(identity)
    with context.registry.database.read() as connection:
        token = tokens.get(connection, identity.token_id or "")
    scopes = [str(scope) for scope in identity.scopes]
    facts = WhoamiToken(token.id, token.name, scopes, perhaps(identity.expires))
    return Whoami(identity.name or "", identity.admin, facts)


def list_users(context: Context, query: Page) -> UserPage:
    """List the users, by name."""
    rights.demand(context.identity, Action.ADMIN)
    with context.registry.database.read() as connection:
        found = users.listed(connection, limit=query.limit + 1, after=query.cursor)
    shown = found[: query.limit]
    more = shown[-1].name if len(found) > query.limit else None
    return UserPage([_user(user) for user in shown], more)


def create_user(context: Context, body: UserWish) -> NewUser:
    """Make a user, and a first token that may do all that the user may."""
    rights.demand(context.identity, Action.ADMIN)
    with context.registry.database.write() as connection:
        user = users.create(connection, body.name, admin=body.admin)
        scopes = all_scopes(admin=user.admin)
        minted = tokens.create(connection, user, name="first", scopes=scopes)
        kind = "admin" if user.admin else ""
        audit.record(connection, context.identity, "user.create", user.name, kind)
    return NewUser(_user(user), minted.secret)


def remove_user(context: Context, path: UserPath) -> None:
    """Remove a user: tokens and roles end at once, the name stays taken."""
    rights.demand(context.identity, Action.ADMIN)
    with context.registry.database.write() as connection:
        users.remove(connection, users.get(connection, path.name))
        audit.record(connection, context.identity, "user.remove", path.name)


def list_tokens(context: Context, query: Page) -> TokenPage:
    """List one's own living tokens, without their secrets."""
    _demand_unlimited(context.identity)
    name = context.identity.name or ""
    with context.registry.database.read() as connection:
        found = tokens.listed(connection, name, limit=query.limit + 1, after=query.cursor)
    shown = found[: query.limit]
    more = shown[-1].id if len(found) > query.limit else None
    return TokenPage([_token(token) for token in shown], more)


def create_token(context: Context, body: TokenWish) -> NewToken:
    """Make a token that may do no more, and lives no longer, than the one that asks."""
    identity = context.identity
    rights.demand_user(identity)
    if not body.name.isprintable():
        raise UsageError("the name of a token is one printable line")
    scopes = tuple(dict.fromkeys(Scope.parse(text) for text in body.scopes))
    with context.registry.database.write() as connection:
        user = users.get(connection, identity.name or "")
        minted = tokens.mint(
            connection, identity, user, name=body.name, scopes=scopes, seconds=body.expires_in
        )
        facts = _token(minted.token)
        audit.record(connection, identity, "token.create", facts.id, " ".join(facts.scopes))
    return NewToken(
        facts.id,
        facts.name,
        facts.scopes,
        facts.created,
        facts.expires,
        facts.last_used,
        minted.secret,
    )


def revoke_token(context: Context, path: TokenPath) -> None:
    """End a token at once: one's own, or as an admin anybody's."""
    identity = context.identity
    rights.demand_user(identity)
    with context.registry.database.write() as connection:
        _demand_revocable(connection, identity, path.id)
        tokens.revoke(connection, path.id)
        audit.record(connection, identity, "token.revoke", path.id)


def list_audit(context: Context, query: LogPage) -> AuditPage:
    """List what was changed, by whom and from where, the newest first."""
    rights.demand(context.identity, Action.ADMIN)
    before = int(query.cursor) if query.cursor else None
    with context.registry.database.read() as connection:
        found = list(audit.entries(connection, limit=query.limit + 1, before=before))
    shown = found[: query.limit]
    more = str(shown[-1].id) if len(found) > query.limit else None
    return AuditPage([_entry(entry) for entry in shown], more)


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


def _demand_unlimited(identity: Identity) -> None:
    """A token that was made for one thing must not look after the others of its user."""
    rights.demand_user(identity)
    if not identity.covers(Action.MANAGE, None):
        raise ForbiddenError("this token is for less than all that its user may")


def _demand_revocable(connection: Connection, identity: Identity, token_id: str) -> None:
    """Every token may end itself; whether another exists is told only to users who may end it."""
    token = tokens.get(connection, token_id)
    own = token.user == identity.name and identity.covers(Action.MANAGE, None)
    admin = identity.admin and identity.covers(Action.ADMIN, None)
    itself = token.id == identity.token_id and token.scopes == identity.scopes
    if not (own or admin or itself):
        raise NotFoundError(f"there is no token {token_id!r}")


def _user(user: users.User) -> UserFacts:
    return UserFacts(user.name, user.admin, moment(user.created))


def _token(token: tokens.Token) -> TokenFacts:
    scopes = [str(scope) for scope in token.scopes]
    created, expires = moment(token.created), perhaps(token.expires)
    return TokenFacts(token.id, token.name, scopes, created, expires, perhaps(token.last_used))


def _entry(entry: audit.Entry) -> AuditEntry:
    return AuditEntry(
        entry.id,
        moment(entry.time),
        entry.actor,
        entry.token_id,
        entry.address,
        entry.action,
        entry.target,
        entry.detail,
    )
