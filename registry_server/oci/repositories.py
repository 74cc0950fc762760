"""Repositories: names, rows, and access.

Names, tags and digests are parsed strictly by the grammar of the OCI specification. The row of a
repository is created by its first upload or manifest. `authorise_repository` turns a request into a
repository that its user may use.
"""

import re
import time
from dataclasses import dataclass

from sqlalchemy import Connection, insert, select
from starlette.requests import Request

from expertctl.errors import (
    DigestError,
    ForbiddenError,
    NotFoundError,
    UnauthenticatedError,
    UsageError,
)
from expertctl.reference import PackageName
from registry_server.access import rights
from registry_server.access.namespaces import NamespaceRow
from registry_server.access.rights import ANONYMOUS, Action, Identity
from registry_server.blob_storage import BlobDigest
from registry_server.database.tables import REPOSITORIES
from registry_server.errors import OciCode, OciError

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
    namespace = rights.authorise(connection, identity, action, name.namespace, name.rest)
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
