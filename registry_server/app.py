"""The server as one ASGI application, made from the areas below this folder.

What looks at every request is wrapped around it, the outermost first: the log, the limits on
sizes and hosts, and who asks. An error inside becomes an answer here, in one place.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from expertctl.errors import ExpertError, NotFoundError, UsageError
from registry_server.access import routes as access
from registry_server.access.authentication import Authentication
from registry_server.api import routes as api
from registry_server.errors import error_response
from registry_server.oci import routes as oci
from registry_server.oci.errors import OciCode, OciError
from registry_server.operation import health
from registry_server.operation.limits import request_limits
from registry_server.operation.request_log import request_log
from registry_server.operation.sweeping import sweeping
from registry_server.publishing import routes as publishing
from registry_server.registry import Registry, open_registry
from registry_server.settings import ServerSettings
from registry_server.web import routes as web


def create_app(settings: ServerSettings) -> Starlette:
    """Open the registry of these settings and return its application.

    Raises:
        StoreError: when there is no registry in the data folder, or it cannot be opened.
    """
    return app_of(open_registry(settings))


def app_of(registry: Registry) -> Starlette:
    """Return the application of an open registry, which it closes when it shuts down."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            async with sweeping(registry):
                yield
        finally:
            registry.close()

    app = Starlette(
        routes=_routes(registry),
        middleware=[
            Middleware(request_log, registry),
            Middleware(request_limits, registry.settings),
            Middleware(Authentication, registry),
        ],
        exception_handlers={
            ExpertError: _refused,
            HTTPException: _unrouted,
            ClientDisconnect: _left,
        },
        lifespan=lifespan,
    )
    app.state.registry = registry
    app.router.redirect_slashes = False
    return app


def _routes(registry: Registry) -> list[BaseRoute]:
    """Return all addresses; the pages last, since theirs are the most general."""
    return [
        *health.routes(registry),
        *access.routes(registry),
        *oci.routes(registry),
        *publishing.routes(registry),
        *api.routes(registry),
        *web.routes(registry),
    ]


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ExpertError)
    registry: Registry = request.app.state.registry
    return error_response(error, request.scope, registry.settings)


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        fact = f"{request.method} is not allowed here"
        allowed = (error.headers or {}).get("Allow", "")
        return await _refused(
            request, OciError(OciCode.UNSUPPORTED, fact, headers={"Allow": allowed})
        )
    return await _refused(request, NotFoundError("there is nothing at this address"))


async def _left(request: Request, _: Exception) -> Response:
    """A body that stops, or whose chunks are malformed, is no fault of the server."""
    return await _refused(request, UsageError("the body of the request did not come whole"))
