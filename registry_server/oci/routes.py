"""All addresses below ``/v2/``.

There is no ``_catalog``: it is not part of the specification, and it would tell names to people who
may not read them; `/api/v1` and the search list what one may see.
"""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from expertctl.errors import UnauthenticatedError
from registry_server.oci import blob_routes, listing_routes, manifest_routes, upload_routes
from registry_server.oci.requests import asker
from registry_server.registry import Registry


def routes(registry: Registry) -> list[BaseRoute]:
    """Return the addresses; uploads before blobs, whose address would also fit."""
    return [
        Route("/v2/", _ping, methods=["GET"]),
        Route("/v2", _ping, methods=["GET"]),
        *upload_routes.routes(registry),
        *blob_routes.routes(registry),
        *manifest_routes.routes(registry),
        *listing_routes.routes(registry),
    ]


async def _ping(request: Request) -> Response:
    """Answer that this is a registry; the refusal of nobody is how clients learn to log in."""
    if asker(request).user_id is None:
        raise UnauthenticatedError("log in first", hint="make a token with `expertctl token new`")
    return JSONResponse({}, headers={"Docker-Distribution-Api-Version": "registry/2.0"})
