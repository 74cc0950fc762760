"""``/tuf/targets/index/<ns>/<name>.json``: the signed index document of a package.

The bytes are those that the last change of the package wrote; their digest is the ETag, so a client
that has them is told so and gets nothing.
"""

import hashlib

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from expertctl.errors import NotFoundError, UsageError
from expertctl.reference import PackageName
from registry_server.access import rights
from registry_server.access.identity import Action, Identity
from registry_server.publishing.index import signed_index
from registry_server.registry import Registry


def routes(registry: Registry) -> list[BaseRoute]:
    """Return the address of index documents."""

    async def index(request: Request) -> Response:
        name = _asked(request.path_params["namespace"], request.path_params["name"])
        known = request.headers.get("if-none-match", "")

        def read() -> Response:
            return _answer(read_index(registry, request.state.identity, name), known)

        return await run_in_threadpool(read)  # hashing a large document also takes a while

    return [Route("/tuf/targets/index/{namespace}/{name}.json", index, methods=["GET"])]


def read_index(registry: Registry, identity: Identity, name: PackageName) -> bytes:
    """Return the signed index document of a package.

    Raises:
        UnauthenticatedError: when nobody is named and the namespace is not public.
        ForbiddenError: when the token may not read there.
        NotFoundError: when there is no such package.
    """
    with registry.database.read() as connection:
        rights.authorise(connection, identity, Action.READ, name.namespace, name.name)
        envelope = signed_index(connection, name)
    if envelope is None:
        raise NotFoundError(f"there is no package {name}")
    return envelope


def _asked(namespace: str, name: str) -> PackageName:
    try:
        return PackageName.parse(f"{namespace}/{name}")
    except UsageError as error:
        raise NotFoundError("there is no index document at this address") from error


def _answer(envelope: bytes, known: str) -> Response:
    etag = f'"sha256:{hashlib.sha256(envelope).hexdigest()}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache", "Vary": "Authorization"}
    if etag in {tag.strip().removeprefix("W/") for tag in known.split(",")} or known == "*":
        return Response(status_code=304, headers=headers)
    return Response(envelope, headers=headers, media_type="application/json")
