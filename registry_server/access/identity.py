"""Who asks, as a value, and the actions that rights are about."""

from dataclasses import dataclass
from enum import StrEnum


class Action(StrEnum):
    """What a request wants to do; rights are given per action and namespace."""

    READ = "read"
    PUSH = "push"
    DELETE = "delete"
    YANK = "yank"
    MANAGE = "manage"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Scope:
    """A limit of a token: an action, and perhaps the namespace or package that it is for.

    Text: ``read``, ``push:acme``, ``push:acme/sql``. ``admin`` covers everything.
    """

    action: Action
    namespace: str | None = None
    package: str | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks; ``user_id`` None: nobody known. ``scopes`` limit what rights allow."""

    user_id: int | None = None
    name: str | None = None
    admin: bool = False
    token_id: str | None = None
    scopes: tuple[Scope, ...] = ()
    address: str | None = None
    """Where the request comes from, as far as trusted proxies tell."""


ANONYMOUS = Identity()
