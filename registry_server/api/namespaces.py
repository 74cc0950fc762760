"""Namespaces: who owns them, who publishes in them, with which keys, and how much room there is."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType
from sqlalchemy import Connection

from expertctl.schema.shape import shape
from registry_server.access import audit, namespaces, quota, rights
from registry_server.access.identity import Action
from registry_server.access.namespaces import NamespaceRow
from registry_server.api.operation import Context, Operation
from registry_server.api.wire import (
    Input,
    KeyId,
    Kind,
    Name,
    Output,
    Page,
    Quota,
    Read,
    Reason,
    Role,
)
from registry_server.publishing import keys
from registry_server.publishing.namespace_key import namespace_keys

MAX_OWNERS = 20
MAX_PEM = 16 << 10
MAX_STATEMENT = 64 << 10


class KeyFacts(Output, frozen=True):
    """A key that may sign packages of the namespace, or could until it was revoked."""

    key_id: str
    public_key: str
    revoked: bool
    reason: str


class NamespaceFacts(Output, frozen=True):
    """A namespace; ``used`` and ``quota`` are bytes, each blob counted once."""

    name: str
    kind: Kind
    read: Read
    quota: int
    used: int
    owners: list[str]
    publishers: list[str]
    keys: list[KeyFacts]


class NamespacePage(Output, frozen=True):
    """Namespaces by name."""

    namespaces: list[NamespaceFacts]
    next: str | None


class NamespaceWish(Input, frozen=True):
    """What a new namespace shall be; without owners, whoever makes it owns it."""

    name: Name
    kind: Kind = "expert"
    read: Read | None = None
    quota: Quota | None = None
    owners: Annotated[tuple[Name, ...], Meta(max_length=MAX_OWNERS)] = ()


class NamespaceChange(Input, frozen=True):
    """What of a namespace shall change; a quota of null is the default of the registry."""

    read: Read | UnsetType = UNSET
    quota: Quota | UnsetType | None = UNSET


class NamespacePath(Input, frozen=True):
    """Which namespace."""

    namespace: Name


class MemberPath(Input, frozen=True):
    """Which user in which namespace."""

    namespace: Name
    user: Name


class RoleWish(Input, frozen=True):
    """What the user shall be: an owner may publish, yank and manage, a publisher publish."""

    role: Role


class Member(Output, frozen=True):
    """A user with a role in a namespace."""

    user: str
    role: Role


class KeyWish(Input, frozen=True):
    """A public key as PEM text; in ``statement`` an older key of the namespace vouches for it."""

    public_key: Annotated[str, Meta(max_length=MAX_PEM)]
    statement: Annotated[bytes, Meta(max_length=MAX_STATEMENT)] | None = None


class AddedKey(Output, frozen=True):
    """A key of the namespace; ``warnings`` say who will have to decide about it."""

    key_id: str
    vouched_by: str | None
    warnings: list[str]


class KeyPath(Input, frozen=True):
    """Which key of which namespace."""

    namespace: Name
    key_id: KeyId


class ReasonWish(Input, frozen=True):
    """Why."""

    reason: Reason


def list_namespaces(context: Context, query: Page) -> NamespacePage:
    """List the namespaces that one may read, by name."""
    with context.registry.database.read() as connection:
        where = rights.readable(context.identity)
        found = namespaces.listed(connection, where, limit=query.limit + 1, after=query.cursor)
        shown = [_facts(context, connection, row) for row in found[: query.limit]]
    return NamespacePage(shown, shown[-1].name if len(found) > query.limit else None)


def create_namespace(context: Context, body: NamespaceWish) -> NamespaceFacts:
    """Make a namespace; its name can never be given to others."""
    rights.demand(context.identity, Action.ADMIN)
    read = body.read or context.registry.settings.read
    with context.registry.database.write() as connection:
        row = namespaces.create(connection, body.name, kind=body.kind, read=read, quota=body.quota)
        for owner in body.owners or (context.identity.name or "",):
            namespaces.set_member(connection, row, owner, "owner")
        detail = f"{row.kind}, read by {row.read}, quota {row.quota}"
        audit.record(connection, context.identity, "namespace.create", row.name, detail)
        return _facts(context, connection, row)


def show_namespace(context: Context, path: NamespacePath) -> NamespaceFacts:
    """Show one namespace."""
    with context.registry.database.read() as connection:
        row = rights.authorise(connection, context.identity, Action.READ, path.namespace)
        return _facts(context, connection, row)


def change_namespace(
    context: Context, path: NamespacePath, body: NamespaceChange
) -> NamespaceFacts:
    """Change who may read a namespace, as an owner, or its quota, as an admin."""
    with context.registry.database.write() as connection:
        row = rights.authorise(connection, context.identity, Action.MANAGE, path.namespace)
        if body.quota is not UNSET:
            rights.demand(context.identity, Action.ADMIN)
        read = row.read if body.read is UNSET else body.read
        room = row.quota if body.quota is UNSET else body.quota
        namespaces.change(connection, row, read=read, quota=room)
        detail = f"read by {read}, quota {room}"
        audit.record(connection, context.identity, "namespace.change", row.name, detail)
        return _facts(context, connection, namespaces.get(connection, row.name))


def set_member(context: Context, path: MemberPath, body: RoleWish) -> Member:
    """Give a user a role in a namespace."""
    with context.registry.database.write() as connection:
        row = rights.authorise(connection, context.identity, Action.MANAGE, path.namespace)
        namespaces.set_member(connection, row, path.user, body.role)
        detail = f"{path.user} {body.role}"
        audit.record(connection, context.identity, "member.set", row.name, detail)
    return Member(path.user, body.role)


def remove_member(context: Context, path: MemberPath) -> None:
    """Take all roles in a namespace from a user; one owner has to stay."""
    with context.registry.database.write() as connection:
        row = rights.authorise(connection, context.identity, Action.MANAGE, path.namespace)
        namespaces.remove_member(connection, row, path.user)
        audit.record(connection, context.identity, "member.remove", row.name, path.user)


def add_key(context: Context, path: NamespacePath, body: KeyWish) -> AddedKey:
    """Let a key sign packages of a namespace."""
    added = keys.add_key(
        context.registry,
        context.identity,
        namespace=path.namespace,
        public_key=body.public_key.encode(),
        statement=body.statement,
    )
    return AddedKey(added.key_id, added.vouched_by, list(added.warnings))


def revoke_key(context: Context, path: KeyPath, body: ReasonWish) -> None:
    """Revoke a key of a namespace, for good."""
    keys.revoke_key(
        context.registry,
        context.identity,
        namespace=path.namespace,
        key_id=path.key_id,
        reason=body.reason,
    )


_ROOT = "/api/v1/namespaces"
_ONE = f"{_ROOT}/{{namespace}}"
_MEMBER = f"{_ONE}/members/{{user}}"
OPERATIONS = (
    Operation("GET", _ROOT, list_namespaces, "namespaces", anonymous=True),
    Operation("POST", _ROOT, create_namespace, "namespaces", 201, (403, 404, 409)),
    Operation("GET", _ONE, show_namespace, "namespaces", 200, (403, 404), anonymous=True),
    Operation("PATCH", _ONE, change_namespace, "namespaces", 200, (403, 404)),
    Operation("PUT", _MEMBER, set_member, "namespaces", 200, (403, 404, 409)),
    Operation("DELETE", _MEMBER, remove_member, "namespaces", 204, (403, 404, 409)),
    Operation("POST", f"{_ONE}/keys", add_key, "namespaces", 200, (403, 404)),
    Operation("DELETE", f"{_ONE}/keys/{{key_id}}", revoke_key, "namespaces", 204, (403, 404)),
)


def _facts(context: Context, connection: Connection, row: NamespaceRow) -> NamespaceFacts:
    people = namespaces.members(connection, row.id)
    known = namespace_keys(connection, row.id)
    facts = {
        "name": row.name,
        "kind": row.kind,
        "read": row.read,
        "quota": quota.limit(row, context.registry.settings.limits),
        "used": quota.used_bytes(connection, row.id),
        "owners": [name for name, role in people.items() if role == "owner"],
        "publishers": [name for name, role in people.items() if role == "publisher"],
        "keys": [
            KeyFacts(k.key_id, k.key.pem().decode(), k.revoked is not None, k.reason) for k in known
        ],
    }
    return shape(facts, NamespaceFacts)
