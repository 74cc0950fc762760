"""Who asks, as a value, and the actions that rights are about."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from expertctl.errors import UsageError
from expertctl.reference import NAME_PATTERN

MAX_SCOPE = 400
_PLACE = re.compile(rf"({NAME_PATTERN})(?:/([a-z0-9]+(?:[._/-]+[a-z0-9]+)*))?")


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

    Text: ``read``, ``push:acme``, ``push:acme/sql``. ``admin`` covers everything. Whoever may do
    something in a place may read there too.
    """

    action: Action
    namespace: str | None = None
    package: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text of a scope.

        Raises:
            UsageError: when it is none.
        """
        word, colon, place = text.partition(":")
        match = _PLACE.fullmatch(place) if len(text) <= MAX_SCOPE else None
        known = word in set(Action) and not (colon and word == Action.ADMIN)
        if not known or (colon and match is None):
            hint = f"scopes are {', '.join(Action)}; all but admin may end in :namespace[/package]"
            raise UsageError(f"{text[:80]!r} is not a scope", hint=hint)
        if match is None:
            return cls(Action(word))
        return cls(Action(word), match.group(1), match.group(3))

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        place = f"{self.namespace}/{self.package}" if self.package else self.namespace
        return f"{self.action}:{place}" if place else str(self.action)

    def covers(self, action: Action, namespace: str | None, package: str | None) -> bool:
        """Tell whether this allows ``action`` there; None: in all namespaces, or all packages."""
        if self.action is Action.ADMIN:
            return True
        if self.action is not action and action is not Action.READ:
            return False
        everywhere = self.namespace is None
        return everywhere or (
            self.namespace == namespace and self.package in {None, package or "*"}
        )


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
    expires: float | None = None
    """When the token ends; what is minted with it ends no later."""

    def covers(self, action: Action, namespace: str | None, package: str | None = None) -> bool:
        """Tell whether a scope of the token allows ``action`` there."""
        return any(scope.covers(action, namespace, package) for scope in self.scopes)


ANONYMOUS = Identity()


def all_scopes(*, admin: bool) -> tuple[Scope, ...]:
    """Return the scopes of a token that is limited by nothing but the rights of its user."""
    if admin:
        return (Scope(Action.ADMIN),)
    return tuple(Scope(action) for action in Action if action is not Action.ADMIN)
