"""Identities and rights: who may do what, the repositories that they reach, and the audit log.

This module alone decides:

==========  =====================================================
anonymous   READ in public namespaces
any user    READ in all namespaces
publisher   also PUSH in its own
owner       also DELETE, YANK, MANAGE in its own
admin       all, everywhere
==========  =====================================================

The scopes of a token limit that further, but never below what an anonymous request may do. The
order of the checks hides private namespaces: without the right to read one, the response is the
same as if it did not exist.

The audit log has one row for each change: who made it, from where, and to what. A row is written in
the transaction of its change, so neither exists without the other. Rows contain names, ids and
digests, never secrets.

Names of repositories, tags and digests are parsed strictly by the grammar of the OCI specification.
The row of a repository is created by its first upload or manifest. `authorise_repository` turns a
request into a repository that its user may use.
"""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from sqlalchemy import ColumnElement, Connection, insert, select
from starlette.requests import Request

from expertctl.errors import (
    DigestError,
    ForbiddenError,
    NotFoundError,
    UnauthenticatedError,
    UsageError,
)
from expertctl.reference import NAME_PATTERN, PackageName
from registry_server.access import namespaces
from registry_server.access.namespaces import NamespaceRow
from registry_server.database.tables import AUDIT, NAMESPACES, REPOSITORIES
from registry_server.errors import OciCode, OciError
from registry_server.registry import BlobDigest

MAX_SCOPE_LENGTH = 400
_SCOPE_TARGET = re.compile(rf"({NAME_PATTERN})(?:/([a-z0-9]+(?:[._/-]+[a-z0-9]+)*))?")


class Action(StrEnum):
    """An action that needs a right; rights are granted per action and namespace."""

    READ = "read"
    PUSH = "push"
    DELETE = "delete"
    YANK = "yank"
    MANAGE = "manage"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class TokenScope:
    """A scope of a token: an action, and optionally the namespace or package it applies to.

    As text: ``read``, ``push:acme``, ``push:acme/sql``. ``admin`` covers everything. Each action
    includes reading in the same place.
    """

    action: Action
    namespace: str | None = None
    package: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of a scope.

        Raises:
            UsageError: when it is invalid.
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
        """Return whether this allows ``action``; None means all namespaces, or all packages."""
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
    """Who made a request; ``user_id`` is None if anonymous. ``scopes`` limit the user's rights."""

    user_id: int | None = None
    name: str | None = None
    admin: bool = False
    token_id: str | None = None
    scopes: tuple[TokenScope, ...] = ()
    address: str | None = None
    """The client address, as reported by trusted proxies."""
    expires: float | None = None
    """When the token expires; tokens created with it expire no later."""

    def covers(self, action: Action, namespace: str | None, package: str | None = None) -> bool:
        """Return whether a scope of the token allows ``action`` there."""
        return any(scope.covers(action, namespace, package) for scope in self.scopes)


ANONYMOUS = Identity()


def list_all_scopes(*, admin: bool) -> tuple[TokenScope, ...]:
    """Return the scopes of a token that has all rights of its user."""
    if admin:
        return (TokenScope(Action.ADMIN),)
    return tuple(TokenScope(action) for action in Action if action is not Action.ADMIN)


_ROLE_ACTIONS = {
    "owner": frozenset({Action.PUSH, Action.DELETE, Action.YANK, Action.MANAGE}),
    "publisher": frozenset({Action.PUSH}),
    None: frozenset[Action](),
}
"""In addition to READ, which every user has."""


def authorise(
    connection: Connection,
    identity: Identity,
    action: Action,
    namespace: str,
    package: str | None = None,
) -> NamespaceRow:
    """Return the namespace if ``identity`` may do ``action`` there.

    Raises:
        UnauthenticatedError: when the request is anonymous and a login could help.
        ForbiddenError: when the token or its user lacks the right.
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
    """Refuse anonymous requests.

    Raises:
        UnauthenticatedError: when the request is anonymous.
    """
    if identity.user_id is None:
        raise UnauthenticatedError(
            "this needs a token", hint="log in with `expertctl login`, or set EXPERT_TOKEN"
        )


def require_right(identity: Identity, action: Action) -> None:
    """Check a right that does not belong to a namespace, such as ADMIN.

    Raises:
        UnauthenticatedError: when the request is anonymous.
        ForbiddenError: when the token or its user lacks the right.
    """
    _require_scope(identity, action, None, None)
    if action is Action.ADMIN and not identity.admin:
        raise ForbiddenError(f"{identity.name} is not an admin of this registry")


def has_right(
    connection: Connection, identity: Identity, action: Action, namespace: NamespaceRow
) -> bool:
    """Return whether the user, with any token, may do ``action`` in a namespace."""
    if identity.user_id is None:
        return action is Action.READ and namespace.read == "public"
    if identity.admin or action is Action.READ:
        return True
    role = namespaces.find_role(connection, namespace.id, identity.user_id)
    return action in _ROLE_ACTIONS[role]


def build_readable_filter(identity: Identity) -> ColumnElement[bool]:
    """Return the SQL condition for the namespaces that ``identity`` may list and search."""
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
    """A change; ``actor`` is None if anonymous, or made on the command line of the server."""

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
    """Record that ``identity`` did ``action`` to ``target``."""
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
    """Return the entries with an id below ``before``, newest first."""
    query = select(AUDIT).order_by(AUDIT.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(AUDIT.c.id < before)
    return [AuditRow(**row._mapping) for row in connection.execute(query)]


MAX_NAME_LENGTH = 255
MAX_TAG_LENGTH = 128
_NAME_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME_SYNTAX = re.compile(rf"{_NAME_COMPONENT}(?:/{_NAME_COMPONENT})*")
_TAG_SYNTAX = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class RepositoryName:
    """``namespace/rest``; only `parse` makes one."""

    namespace: str
    rest: str

    @classmethod
    def parse(cls, text: str) -> "RepositoryName":
        """Parse the name of a repository.

        Raises:
            OciError: NAME_INVALID.
        """
        namespace, _, rest = text.partition("/")
        if len(text) > MAX_NAME_LENGTH or not _NAME_SYNTAX.fullmatch(text) or not rest:
            hint = "the names of repositories have the form NAMESPACE/NAME"
            raise OciError(OciCode.NAME_INVALID, f"{text[:80]!r} is not a repository", hint=hint)
        return cls(namespace, rest)

    def as_package_name(self) -> PackageName:
        """Return the name as a package name; `expert` namespaces have no other names.

        Raises:
            OciError: NAME_INVALID.
        """
        try:
            return PackageName.parse(str(self))
        except UsageError as error:
            raise OciError(OciCode.NAME_INVALID, error.message, hint=error.hint) from error

    def __str__(self) -> str:
        """Return ``namespace/rest``."""
        return f"{self.namespace}/{self.rest}"


def parse_digest(text: str) -> BlobDigest:
    """Parse a digest.

    Raises:
        OciError: DIGEST_INVALID.
    """
    try:
        return BlobDigest.parse(text)
    except DigestError as error:
        raise OciError(OciCode.DIGEST_INVALID, error.message) from error


def parse_tag(text: str) -> str:
    """Parse a tag.

    Raises:
        OciError: TAG_INVALID.
    """
    if not _TAG_SYNTAX.fullmatch(text):
        raise OciError(OciCode.TAG_INVALID, f"{text[:80]!r} is not a tag")
    return text


def parse_reference(text: str) -> BlobDigest | str:
    """Parse the reference of a manifest: a digest, which contains a colon, or a tag.

    Raises:
        OciError: DIGEST_INVALID or TAG_INVALID.
    """
    return parse_digest(text) if ":" in text else parse_tag(text)


@dataclass(frozen=True, slots=True)
class RepositoryRow:
    """A repository; ``name`` is the full name, ``namespace/…``."""

    id: int
    name: str
    namespace_id: int


def find_repository(connection: Connection, name: str) -> RepositoryRow | None:
    """Return a repository; None if nothing was ever pushed to it."""
    columns = (REPOSITORIES.c.id, REPOSITORIES.c.name, REPOSITORIES.c.namespace_id)
    row = connection.execute(select(*columns).where(REPOSITORIES.c.name == name)).first()
    return None if row is None else RepositoryRow(row[0], row[1], row[2])


def get_or_create_repository(
    connection: Connection, *, name: str, namespace_id: int
) -> RepositoryRow:
    """Return a repository; create it if it does not exist."""
    found = find_repository(connection, name)
    if found is not None:
        return found
    values = {"name": name, "namespace_id": namespace_id, "created": time.time()}
    connection.execute(insert(REPOSITORIES).values(values))
    made = find_repository(connection, name)
    assert made is not None
    return made


@dataclass(frozen=True, slots=True)
class RepositoryAccess:
    """A repository that the user may use; created only by `authorise_repository`."""

    name: RepositoryName
    namespace: NamespaceRow

    @property
    def holds_packages(self) -> bool:
        """Whether it contains only packages, whose tags are versions."""
        return self.namespace.kind == "expert"

    @property
    def path(self) -> str:
        """Return the URL path of the repository."""
        return f"/v2/{self.name}"

    def require_plain_oci(self, what: str) -> None:
        """Refuse operations that packages do not support.

        Raises:
            OciError: UNSUPPORTED in a namespace for packages.
        """
        if self.holds_packages:
            hint = "publish a tag X.Y.Z; a version is withdrawn with `expertctl yank`"
            fact = f"{what} is not supported in {self.name}, which is a package"
            raise OciError(OciCode.UNSUPPORTED, fact, hint=hint)


def authorise_repository(
    connection: Connection, identity: Identity, action: Action, name: RepositoryName
) -> RepositoryAccess:
    """Return the repository if ``identity`` may do ``action`` there.

    Raises:
        UnauthenticatedError: when the request is anonymous and a login could help.
        ForbiddenError: when the token or its user lacks the right.
        NotFoundError: when there is no such namespace.
        OciError: NAME_INVALID when the namespace does not allow the name.
    """
    namespace = authorise(connection, identity, action, name.namespace, name.rest)
    target = RepositoryAccess(name, namespace)
    if target.holds_packages:
        name.as_package_name()
    return target


def can_read(connection: Connection, identity: Identity, name: RepositoryName) -> bool:
    """Return whether ``identity`` may read a repository."""
    try:
        authorise_repository(connection, identity, Action.READ, name)
    except (UnauthenticatedError, ForbiddenError, NotFoundError, OciError):
        return False
    return True


_ESCAPED_COLON = b"%3a"


def current_identity(request: Request) -> Identity:
    """Return the identity that made the request."""
    identity = request.scope.get("state", {}).get("identity", ANONYMOUS)
    assert isinstance(identity, Identity)
    return identity


def read_repository_name(request: Request) -> RepositoryName:
    """Return the repository in the path, which must not be percent-encoded.

    Raises:
        OciError: NAME_INVALID.
    """
    raw: bytes = request.scope.get("raw_path") or b""
    if b"%" in raw.partition(b"?")[0].lower().replace(_ESCAPED_COLON, b""):
        raise OciError(OciCode.NAME_INVALID, "names must not be percent-encoded")
    return RepositoryName.parse(request.path_params["name"])
