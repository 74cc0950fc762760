"""Operations on namespaces: members, publisher keys, read access and quotas."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType
from sqlalchemy import Connection

from expertctl.http.operation import Operation
from expertctl.schema.validation import convert_document
from registry_server.access import namespaces, rights
from registry_server.access import namespaces as namespaces_module
from registry_server.access.namespaces import NamespaceRow
from registry_server.access.rights import Action
from registry_server.api.schema import (
    ApiContext,
    ApiInput,
    ApiOutput,
    KeyId,
    Kind,
    ListQuery,
    Name,
    Quota,
    Read,
    Reason,
    Role,
)
from registry_server.publishing import releases
from registry_server.publishing.index import load_publisher_keys

MAX_OWNERS = 20
MAX_PEM = 16 << 10
MAX_STATEMENT = 64 << 10


class KeyFacts(ApiOutput, frozen=True):
    """A key that may sign packages of the namespace, or could before it was revoked."""

    key_id: str
    public_key: str
    revoked: bool
    reason: str


class NamespaceFacts(ApiOutput, frozen=True):
    """A namespace; ``used`` and ``quota`` are in bytes, and each blob counts once."""

    name: str
    kind: Kind
    read: Read
    quota: int
    used: int
    owners: list[str]
    publishers: list[str]
    keys: list[KeyFacts]


class NamespacePage(ApiOutput, frozen=True):
    """A page of namespaces, sorted by name."""

    namespaces: list[NamespaceFacts]
    next: str | None


class NamespaceRequest(ApiInput, frozen=True):
    """A new namespace; its creator owns it if ``owners`` is empty."""

    name: Name
    kind: Kind = "expert"
    read: Read | None = None
    quota: Quota | None = None
    owners: Annotated[tuple[Name, ...], Meta(max_length=MAX_OWNERS)] = ()


class NamespaceUpdate(ApiInput, frozen=True):
    """Changes to a namespace; a quota of null is the default of the registry."""

    read: Read | UnsetType = UNSET
    quota: Quota | UnsetType | None = UNSET


class NamespacePath(ApiInput, frozen=True):
    """Identifies a namespace."""

    namespace: Name


class MemberPath(ApiInput, frozen=True):
    """Identifies a user in a namespace."""

    namespace: Name
    user: Name


class RoleRequest(ApiInput, frozen=True):
    """The role of a user: owners publish, yank and manage; publishers only publish."""

    role: Role


class MemberFacts(ApiOutput, frozen=True):
    """A user with a role in a namespace."""

    user: str
    role: Role


class KeyRequest(ApiInput, frozen=True):
    """A public key in PEM form; ``statement`` is an endorsement of it by an older key."""

    public_key: Annotated[str, Meta(max_length=MAX_PEM)]
    statement: Annotated[bytes, Meta(max_length=MAX_STATEMENT)] | None = None


class AddedKeyFacts(ApiOutput, frozen=True):
    """A key of the namespace; ``warnings`` say which users must decide whether to trust it."""

    key_id: str
    vouched_by: str | None
    warnings: list[str]


class KeyPath(ApiInput, frozen=True):
    """Identifies a key of a namespace."""

    namespace: Name
    key_id: KeyId


class ReasonRequest(ApiInput, frozen=True):
    """The reason for a change."""

    reason: Reason


def list_namespaces(context: ApiContext, query: ListQuery) -> NamespacePage:
    """List the namespaces that the caller may read, sorted by name."""
    with context.registry.database.read() as connection:
        where = rights.build_readable_filter(context.identity)
        found = namespaces.list_namespaces(
            connection, where, limit=query.limit + 1, after=query.cursor
        )
        shown = [describe_namespace(context, connection, row) for row in found[: query.limit]]
    return NamespacePage(shown, shown[-1].name if len(found) > query.limit else None)


def create_namespace(context: ApiContext, body: NamespaceRequest) -> NamespaceFacts:
    """Create a namespace; its name can never be reused."""
    rights.require_right(context.identity, Action.ADMIN)
    read = body.read or context.registry.settings.read
    with context.registry.database.write() as connection:
        row = namespaces.create_namespace(
            connection, body.name, kind=body.kind, read=read, quota=body.quota
        )
        for owner in body.owners or (context.identity.name or "",):
            namespaces.set_member(connection, row, owner, "owner")
        detail = f"{row.kind}, read by {row.read}, quota {row.quota}"
        rights.write_audit_row(connection, context.identity, "namespace.create", row.name, detail)
        return describe_namespace(context, connection, row)


def show_namespace(context: ApiContext, path: NamespacePath) -> NamespaceFacts:
    """Return a namespace."""
    with context.registry.database.read() as connection:
        row = rights.authorise(connection, context.identity, Action.READ, path.namespace)
        return describe_namespace(context, connection, row)


def change_namespace(
    context: ApiContext, path: NamespacePath, body: NamespaceUpdate
) -> NamespaceFacts:
    """Change who may read a namespace (owners), or its quota (admins)."""
    with context.registry.database.write() as connection:
        row = rights.authorise(connection, context.identity, Action.MANAGE, path.namespace)
        if body.quota is not UNSET:
            rights.require_right(context.identity, Action.ADMIN)
        read = row.read if body.read is UNSET else body.read
        room = row.quota if body.quota is UNSET else body.quota
        namespaces.update_namespace(connection, row, read=read, quota=room)
        detail = f"read by {read}, quota {room}"
        rights.write_audit_row(connection, context.identity, "namespace.change", row.name, detail)
        return describe_namespace(
            context, connection, namespaces.get_namespace(connection, row.name)
        )


def set_member(context: ApiContext, path: MemberPath, body: RoleRequest) -> MemberFacts:
    """Give a user a role in a namespace."""
    with context.registry.database.write() as connection:
        row = rights.authorise(connection, context.identity, Action.MANAGE, path.namespace)
        namespaces.set_member(connection, row, path.user, body.role)
        detail = f"{path.user} {body.role}"
        rights.write_audit_row(connection, context.identity, "member.set", row.name, detail)
    return MemberFacts(path.user, body.role)


def remove_member(context: ApiContext, path: MemberPath) -> None:
    """Remove a user from a namespace; at least one owner must remain."""
    with context.registry.database.write() as connection:
        row = rights.authorise(connection, context.identity, Action.MANAGE, path.namespace)
        namespaces.remove_member(connection, row, path.user)
        rights.write_audit_row(connection, context.identity, "member.remove", row.name, path.user)


def add_key(context: ApiContext, path: NamespacePath, body: KeyRequest) -> AddedKeyFacts:
    """Allow a key to sign packages of a namespace."""
    added = releases.add_key(
        context.registry,
        context.identity,
        namespace=path.namespace,
        public_key=body.public_key.encode(),
        statement=body.statement,
    )
    return AddedKeyFacts(added.key_id, added.vouched_by, list(added.warnings))


def revoke_key(context: ApiContext, path: KeyPath, body: ReasonRequest) -> None:
    """Revoke a key of a namespace permanently."""
    releases.revoke_key(
        context.registry,
        context.identity,
        namespace=path.namespace,
        key_id=path.key_id,
        reason=body.reason,
    )


_NAMESPACES = "/api/v1/namespaces"
_NAMESPACE = f"{_NAMESPACES}/{{namespace}}"
_MEMBER = f"{_NAMESPACE}/members/{{user}}"
OPERATIONS = (
    Operation("GET", _NAMESPACES, list_namespaces, "namespaces", is_public=True),
    Operation("POST", _NAMESPACES, create_namespace, "namespaces", 201, (403, 404, 409)),
    Operation("GET", _NAMESPACE, show_namespace, "namespaces", 200, (403, 404), is_public=True),
    Operation("PATCH", _NAMESPACE, change_namespace, "namespaces", 200, (403, 404)),
    Operation("PUT", _MEMBER, set_member, "namespaces", 200, (403, 404, 409)),
    Operation("DELETE", _MEMBER, remove_member, "namespaces", 204, (403, 404, 409)),
    Operation("POST", f"{_NAMESPACE}/keys", add_key, "namespaces", 200, (403, 404)),
    Operation("DELETE", f"{_NAMESPACE}/keys/{{key_id}}", revoke_key, "namespaces", 204, (403, 404)),
)


def describe_namespace(
    context: ApiContext, connection: Connection, row: NamespaceRow
) -> NamespaceFacts:
    """Return the facts about a namespace that the caller may read."""
    people = namespaces.list_members(connection, row.id)
    known = load_publisher_keys(connection, row.id)
    facts = {
        "name": row.name,
        "kind": row.kind,
        "read": row.read,
        "quota": namespaces_module.get_quota(row, context.registry.settings.limits),
        "used": namespaces_module.get_used_bytes(connection, row.id),
        "owners": [name for name, role in people.items() if role == "owner"],
        "publishers": [name for name, role in people.items() if role == "publisher"],
        "keys": [
            KeyFacts(k.key_id, k.key.pem().decode(), k.revoked is not None, k.reason) for k in known
        ],
    }
    return convert_document(facts, NamespaceFacts)
