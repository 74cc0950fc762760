"""From a request to a repository that its user may use in this way."""

from dataclasses import dataclass

from sqlalchemy import Connection

from expertctl.errors import ForbiddenError, NotFoundError, UnauthenticatedError
from registry_server.access import rights
from registry_server.access.identity import Action, Identity
from registry_server.access.namespaces import NamespaceRow
from registry_server.oci.errors import OciCode, OciError
from registry_server.oci.names import RepositoryName


@dataclass(frozen=True, slots=True)
class Target:
    """A repository that the user may use: only `authorise` makes one."""

    name: RepositoryName
    namespace: NamespaceRow

    @property
    def for_packages(self) -> bool:
        """Whether only packages live here, and tags are versions."""
        return self.namespace.kind == "expert"

    @property
    def path(self) -> str:
        """Return where the repository lies below the host."""
        return f"/v2/{self.name}"

    def demand_oci(self, what: str) -> None:
        """Refuse what plain OCI knows and packages do not.

        Raises:
            OciError: UNSUPPORTED in a namespace of packages.
        """
        if self.for_packages:
            hint = "publish a tag X.Y.Z; a version is withdrawn with `expertctl yank`"
            fact = f"{what} is not done in {self.name}, which is a package"
            raise OciError(OciCode.UNSUPPORTED, fact, hint=hint)


def authorise(
    connection: Connection, identity: Identity, action: Action, name: RepositoryName
) -> Target:
    """Return the repository when ``identity`` may do ``action`` there.

    Raises:
        UnauthenticatedError: when nobody is named and that would help.
        ForbiddenError: when the token or its user may not.
        NotFoundError: when there is no such namespace.
        OciError: NAME_INVALID when the namespace has no such names.
    """
    namespace = rights.authorise(connection, identity, action, name.namespace, name.rest)
    target = Target(name, namespace)
    if target.for_packages:
        name.package()
    return target


def may_read(connection: Connection, identity: Identity, name: RepositoryName) -> bool:
    """Tell whether one may read a repository, without saying why not."""
    try:
        authorise(connection, identity, Action.READ, name)
    except (UnauthenticatedError, ForbiddenError, NotFoundError, OciError):
        return False
    return True
