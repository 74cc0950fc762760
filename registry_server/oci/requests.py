"""What every OCI request says: who asks, and about which repository."""

from starlette.requests import Request

from registry_server.access.identity import ANONYMOUS, Identity
from registry_server.oci.errors import OciCode, OciError
from registry_server.oci.names import RepositoryName

_ESCAPED_COLON = b"%3a"


def asker(request: Request) -> Identity:
    """Return who asks."""
    identity = request.scope.get("state", {}).get("identity", ANONYMOUS)
    assert isinstance(identity, Identity)
    return identity


def repository_name(request: Request) -> RepositoryName:
    """Return the repository that the address names, which is written in one way only.

    Raises:
        OciError: NAME_INVALID.
    """
    raw: bytes = request.scope.get("raw_path") or b""
    if b"%" in raw.partition(b"?")[0].lower().replace(_ESCAPED_COLON, b""):
        raise OciError(OciCode.NAME_INVALID, "names are not percent-encoded here")
    return RepositoryName.parse(request.path_params["name"])
