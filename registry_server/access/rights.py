"""Who asks, as a value, and the actions that rights are about.

Who may do what: the one place that decides.

==========  =====================================================
nobody      READ in public namespaces
any user    READ in all namespaces
publisher   and PUSH in its own
owner       and DELETE, YANK, MANAGE in its own
admin       all, everywhere
==========  =====================================================

The scopes of the token limit that further, but never below what nobody may. The order of the checks
keeps secrets: whoever may not read a namespace gets the same answer as for one that does not exist.

The audit log: one row for every change, who made it, from where, and to what.

Rows are written in the transaction of the change itself, so that there is never one without the
other. Secrets are not written: callers give names, ids and digests.
"""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from sqlalchemy import ColumnElement, Connection, insert, select

from expertctl.errors import ForbiddenError, NotFoundError, UnauthenticatedError, UsageError
from expertctl.reference import NAME_PATTERN
from registry_server.access import namespaces
from registry_server.access.namespaces import NamespaceRow
from registry_server.database.tables import AUDIT, NAMESPACES

MAX_SCOPE_LENGTH = 400
_SCOPE_TARGET = re.compile(rf"({NAME_PATTERN})(?:/([a-z0-9]+(?:[._/-]+[a-z0-9]+)*))?")


class Action(StrEnum):
    """What a request wants to do; rights are given per action and namespace."""

    READ = "read"
    PUSH = "push"
    DELETE = "delete"
    YANK = "yank"
    MANAGE = "manage"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class TokenScope:
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
        match = _SCOPE_TARGET.fullmatch(place) if len(text) <= MAX_SCOPE_LENGTH else None
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
    scopes: tuple[TokenScope, ...] = ()
    address: str | None = None
    """Where the request comes from, as far as trusted proxies tell."""
    expires: float | None = None
    """When the token ends; what is minted with it ends no later."""

    def covers(self, action: Action, namespace: str | None, package: str | None = None) -> bool:
        """Tell whether a scope of the token allows ``action`` there."""
        return any(scope.covers(action, namespace, package) for scope in self.scopes)


ANONYMOUS = Identity()


def list_all_scopes(*, admin: bool) -> tuple[TokenScope, ...]:
    """Return the scopes of a token that is limited by nothing but the rights of its user."""
    if admin:
        return (TokenScope(Action.ADMIN),)
    return tuple(TokenScope(action) for action in Action if action is not Action.ADMIN)


_ROLE_ACTIONS = {
    "owner": frozenset({Action.PUSH, Action.DELETE, Action.YANK, Action.MANAGE}),
    "publisher": frozenset({Action.PUSH}),
    None: frozenset[Action](),
}
"""Beside READ, which every user may."""


def authorise(
    connection: Connection,
    identity: Identity,
    action: Action,
    namespace: str,
    package: str | None = None,
) -> NamespaceRow:
    """Return the namespace when ``identity`` may do ``action`` there.

    Raises:
        UnauthenticatedError: when nobody is named and that would help.
        ForbiddenError: when the token or its user may not.
        NotFoundError: when there is no such namespace.
    """
    row = namespaces.find_namespace(connection, namespace)
    if action is Action.READ and row is not None and row.read == "public":
        return row
    _require_scope(identity, action, namespace, package)
    if row is None:
        raise NotFoundError(f"there is no namespace {namespace[:64]!r}")
    if not has_right(connection, identity, action, row):
        raise ForbiddenError(
            f"{identity.name} may not {action} in {namespace}",
            hint=f"an owner of {namespace} can change that",
        )
    return row


def require_user(identity: Identity) -> None:
    """Demand that somebody is named.

    Raises:
        UnauthenticatedError: when nobody is.
    """
    if identity.user_id is None:
        raise UnauthenticatedError(
            "this needs a token", hint="log in with `expertctl login`, or set EXPERT_TOKEN"
        )


def require_right(identity: Identity, action: Action) -> None:
    """Demand a right that belongs to no namespace, such as ADMIN.

    Raises:
        UnauthenticatedError: when nobody is named.
        ForbiddenError: when the token or its user may not.
    """
    _require_scope(identity, action, None, None)
    if action is Action.ADMIN and not identity.admin:
        raise ForbiddenError(f"{identity.name} is not an admin of this registry")


def has_right(
    connection: Connection, identity: Identity, action: Action, namespace: NamespaceRow
) -> bool:
    """Tell whether the user, whatever the token, may do ``action`` in a namespace."""
    if identity.user_id is None:
        return action is Action.READ and namespace.read == "public"
    if identity.admin or action is Action.READ:
        return True
    role = namespaces.find_role(connection, namespace.id, identity.user_id)
    return action in _ROLE_ACTIONS[role]


def build_readable_filter(identity: Identity) -> ColumnElement[bool]:
    """Return the SQL condition on NAMESPACES for those that ``identity`` may list and search."""
    if identity.covers(Action.READ, None):
        return NAMESPACES.c.id.is_not(None)
    whole = [s.namespace for s in identity.scopes if s.namespace and not s.package]
    return (NAMESPACES.c.read == "public") | NAMESPACES.c.name.in_(whole)


def _require_scope(
    identity: Identity, action: Action, namespace: str | None, package: str | None
) -> None:
    require_user(identity)
    if not identity.covers(action, namespace, package):
        place = f" in {namespace[:64]}" if namespace else ""
        raise ForbiddenError(
            f"this token is not for {action}{place}", hint="use one with that scope"
        )


MAX_TARGET = 400
MAX_DETAIL = 2000


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One change; ``actor`` None: somebody unknown, or the command line of the server itself."""

    id: int
    time: float
    actor: str | None
    token_id: str | None
    address: str | None
    action: str
    target: str
    detail: str


def write_audit_row(
    connection: Connection, identity: Identity, action: str, target: str, detail: str = ""
) -> None:
    """Write who did ``action`` to ``target``."""
    row = {
        "time": time.time(),
        "actor": identity.name,
        "token_id": identity.token_id,
        "address": identity.address,
        "action": action,
        "target": target[:MAX_TARGET],
        "detail": detail[:MAX_DETAIL],
    }
    connection.execute(insert(AUDIT).values(row))


def list_audit_rows(
    connection: Connection, *, limit: int, before: int | None = None
) -> Iterable[AuditRow]:
    """Return the newest entries first, those with an id below ``before`` only."""
    query = select(AUDIT).order_by(AUDIT.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(AUDIT.c.id < before)
    return [AuditRow(**row._mapping) for row in connection.execute(query)]
