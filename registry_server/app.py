"""The server as one ASGI application, made from the areas below this folder.

What looks at every request is wrapped around it, the outermost first: the log, the limits on
sizes and hosts, and who asks. An error inside becomes an answer here, in one place.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.util import find_spec

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from expertctl.errors import ExpertError, NotFoundError
from registry_server.errors import error_response
from registry_server.oci.errors import OciCode, OciError
from registry_server.registry import Registry, open_registry
from registry_server.settings import ServerSettings

_ROUTES = (
    "operation.health",
    "access.routes",
    "oci.routes",
    "publishing.routes",
    "api.routes",
    "web.routes",
)
_MIDDLEWARE = (
    ("operation.request_log", "RequestLog"),
    ("operation.limits", "RequestLimits"),
    ("access.authentication", "Authentication"),
)


def create_app(settings: ServerSettings) -> Starlette:
    """Open the registry of these settings and return its application.

    Raises:
        NotFoundError: when there is no registry in the data folder.
        StoreError: when it cannot be opened.
    """
    return app_of(open_registry(settings))


def app_of(registry: Registry) -> Starlette:
    """Return the application of an open registry, which it closes when it shuts down."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        registry.close()

    app = Starlette(
        routes=list(_routes(registry)),
        middleware=list(_middleware(registry)),
        exception_handlers={ExpertError: _refused, HTTPException: _unrouted},
        lifespan=lifespan,
    )
    app.state.registry = registry
    app.router.redirect_slashes = False
    return app


def _routes(registry: Registry) -> Iterator[BaseRoute]:
    for name in _ROUTES:
        if find_spec(f"registry_server.{name}"):
            yield from import_module(f"registry_server.{name}").routes(registry)


def _middleware(registry: Registry) -> Iterator[Middleware]:
    for name, kind in _MIDDLEWARE:
        if find_spec(f"registry_server.{name}"):
            state = registry.settings if kind == "RequestLimits" else registry
            yield Middleware(getattr(import_module(f"registry_server.{name}"), kind), state)


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
