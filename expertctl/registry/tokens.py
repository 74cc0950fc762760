"""Access tokens of a registry: made for one use, shown once, taken back by their id."""

import re
from dataclasses import dataclass

from expertctl.errors import UsageError
from expertctl.reference import NAME_PATTERN
from expertctl.registry.answers import answer, pages
from expertctl.registry.api_client import ApiClient
from expertctl.registry.refusal import shown

_ID = re.compile(r"[0-9a-f]{1,64}")
_SCOPE = re.compile(
    rf"admin|(read|push|delete|yank|manage)(:{NAME_PATTERN}(/[a-z0-9]+([._/-]+[a-z0-9]+)*)?)?"
)
_LIFETIME = re.compile(r"([1-9][0-9]{0,4})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True, slots=True)
class Token:
    """A token as it is listed: without its secret."""

    id: str
    name: str
    scopes: tuple[str, ...] = ()
    created: str | None = None
    expires: str | None = None
    last_used: str | None = None


@dataclass(frozen=True, slots=True)
class NewToken(Token):
    """A token with its secret, which the registry shows once."""

    token: str = ""


@dataclass(frozen=True, slots=True)
class _Tokens:
    tokens: tuple[Token, ...]
    next: str | None = None


@dataclass(frozen=True, slots=True)
class Whoami:
    """Whose credentials a registry sees."""

    user: str | None
    admin: bool = False
    token: Token | None = None


def parse_lifetime(text: str) -> int:
    """Read how long a token lives, ``90d`` say, in seconds.

    Raises:
        UsageError: for anything else.
    """
    match = _LIFETIME.fullmatch(text)
    if match is None:
        raise UsageError(f"{text[:40]!r} is not a time to live", hint="write 90d, 12h or 2w")
    return int(match.group(1)) * _SECONDS[match.group(2)]


def whoami(api: ApiClient) -> Whoami:
    """Return whose credentials the registry sees."""
    return answer(api.get("whoami"), Whoami, host=api.address.host)


def tokens(api: ApiClient) -> list[Token]:
    """Return the user's live tokens."""
    return [each for page in pages(api, "tokens", _Tokens) for each in page.tokens]


def new_token(api: ApiClient, name: str, *, scopes: list[str], lifetime: int | None) -> NewToken:
    """Make a token that may do what its scopes say; none: what the user may.

    Raises:
        UsageError: when that is no scope.
    """
    for scope in scopes:
        if not _SCOPE.fullmatch(scope):
            hint = "write read, push:acme, push:acme/sql, yank:acme or admin"
            raise UsageError(f"{shown(scope, 80)!r} is not a scope", hint=hint)
    document = api.post("tokens", {"name": name, "scopes": list(scopes), "expires_in": lifetime})
    return answer(document, NewToken, host=api.address.host)


def revoke_token(api: ApiClient, token_id: str) -> None:
    """Take a token back.

    Raises:
        UsageError: when that is no id.
        NotFoundError: when there is none, or it is somebody else's.
    """
    if not _ID.fullmatch(token_id):
        hint = "`expertctl token list` shows the ids"
        raise UsageError("that is not the id of a token", hint=hint)  # perhaps the token itself
    api.delete(f"tokens/{token_id}")
