"""Who may do what: the one place that decides.

==========  =====================================================
nobody      READ in public namespaces
any user    READ in all namespaces
publisher   and PUSH in its own
owner       and DELETE, YANK, MANAGE in its own
admin       all, everywhere
==========  =====================================================

The scopes of the token limit that further, but never below what nobody may. The order of the checks
keeps secrets: whoever may not read a namespace gets the same answer as for one that does not exist.
"""

from sqlalchemy import ColumnElement, Connection

from expertctl.errors import ForbiddenError, NotFoundError, UnauthenticatedError
from registry_server.access import namespaces
from registry_server.access.identity import Action, Identity
from registry_server.access.namespaces import NamespaceRow
from registry_server.database.tables import NAMESPACES

_BY_ROLE = {
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
    row = namespaces.find(connection, namespace)
    if action is Action.READ and row is not None and row.read == "public":
        return row
    _demand_scope(identity, action, namespace, package)
    if row is None:
        raise NotFoundError(f"there is no namespace {namespace[:64]!r}")
    if not allowed(connection, identity, action, row):
        raise ForbiddenError(
            f"{identity.name} may not {action} in {namespace}",
            hint=f"an owner of {namespace} can change that",
        )
    return row


def demand_user(identity: Identity) -> None:
    """Demand that somebody is named.

    Raises:
        UnauthenticatedError: when nobody is.
    """
    if identity.user_id is None:
        raise UnauthenticatedError(
            "this needs a token", hint="log in with `expertctl login`, or set EXPERT_TOKEN"
        )


def demand(identity: Identity, action: Action) -> None:
    """Demand a right that belongs to no namespace, such as ADMIN.

    Raises:
        UnauthenticatedError: when nobody is named.
        ForbiddenError: when the token or its user may not.
    """
    _demand_scope(identity, action, None, None)
    if action is Action.ADMIN and not identity.admin:
        raise ForbiddenError(f"{identity.name} is not an admin of this registry")


def allowed(
    connection: Connection, identity: Identity, action: Action, namespace: NamespaceRow
) -> bool:
    """Tell whether the user, whatever the token, may do ``action`` in a namespace."""
    if identity.user_id is None:
        return action is Action.READ and namespace.read == "public"
    if identity.admin or action is Action.READ:
        return True
    role = namespaces.role(connection, namespace.id, identity.user_id)
    return action in _BY_ROLE[role]


def readable(identity: Identity) -> ColumnElement[bool]:
    """Return the SQL condition on NAMESPACES for those that ``identity`` may list and search."""
    if identity.covers(Action.READ, None):
        return NAMESPACES.c.id.is_not(None)
    whole = [s.namespace for s in identity.scopes if s.namespace and not s.package]
    return (NAMESPACES.c.read == "public") | NAMESPACES.c.name.in_(whole)


def _demand_scope(
    identity: Identity, action: Action, namespace: str | None, package: str | None
) -> None:
    demand_user(identity)
    if not identity.covers(action, namespace, package):
        place = f" in {namespace[:64]}" if namespace else ""
        raise ForbiddenError(
            f"this token is not for {action}{place}", hint="use one with that scope"
        )
