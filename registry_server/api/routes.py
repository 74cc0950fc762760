"""The routes of ``/api/v1``: every operation, and the document that describes them."""

from collections.abc import Callable, Coroutine

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from registry_server.api import about, namespaces, packages, people
from registry_server.api.openapi import openapi
from registry_server.api.operation import JSON, Operation
from registry_server.registry import Registry

OPERATIONS = (
    *about.OPERATIONS,
    *packages.OPERATIONS,
    *namespaces.OPERATIONS,
    *people.OPERATIONS,
)
DOCUMENT = "/api/v1/openapi.json"


def routes(registry: Registry) -> list[BaseRoute]:
    """Return the routes of the API."""
    document = msgspec.json.encode(openapi(OPERATIONS, url=registry.settings.public_url))

    async def describe(_: Request) -> Response:
        return Response(document, media_type=JSON)

    paths = dict.fromkeys(operation.path for operation in OPERATIONS)
    return [
        Route(DOCUMENT, describe, methods=["GET"]),
        *(Route(path, _endpoint(path, registry), methods=_methods(path)) for path in paths),
    ]


def _methods(path: str) -> list[str]:
    return [operation.method for operation in OPERATIONS if operation.path == path]


def _endpoint(
    path: str, registry: Registry
) -> Callable[[Request], Coroutine[None, None, Response]]:
    by_method: dict[str, Operation] = {o.method: o for o in OPERATIONS if o.path == path}

    async def endpoint(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await by_method[method].respond(request, registry)

    return endpoint
