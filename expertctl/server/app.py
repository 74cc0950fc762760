"""The generation server as one ASGI application, made from the areas below this folder.

Middleware looks at every request, the outermost first: the log, the limits on sizes, hosts and
pages, and the guard that identifies the caller. An error inside becomes an answer here, in the
shape of the API that was asked.
"""

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Lifespan

from expertctl.errors import ExpertError, UnknownAddressError, UsageError
from expertctl.server import description, health
from expertctl.server.anthropic import routes as anthropic
from expertctl.server.error_bodies import error_response
from expertctl.server.guard import OPEN, Guard, request_limits
from expertctl.server.native import routes as native
from expertctl.server.openai import routes as openai
from expertctl.server.rate_headers import HEADER_NAMES
from expertctl.server.request_log import request_log
from expertctl.server.service import Service
from expertctl.server.settings import ServeSettings
from expertctl.server.sse import Patience
from expertctl.server.status_page import routes as status_page
from expertctl.server.trailing_slash import TrailingSlash
from expertctl.server.unknown_fields import IGNORED_HEADER

if TYPE_CHECKING:
    from expertctl.server.tracing.tracing import Tracing

LEFT = 499
"""The status, in the log alone, of a request whose client went away before the answer."""
_EXPOSED = (
    IGNORED_HEADER,
    *("X-Request-Id", "request-id", "Retry-After", "x-should-retry", "Location"),
    *HEADER_NAMES,
)
"""The headers of answers that pages of the allowed origins may read."""
_OPEN = frozenset({*OPEN, *status_page.OPEN, "/"})


def create_app(service: Service, *, lifespan: Lifespan[Starlette] | None = None) -> Starlette:
    """Return the application of an engine; its owner opens and closes the engine."""
    app = Starlette(
        routes=_routes(service),
        middleware=[
            Middleware(request_log, service.metrics),
            Middleware(request_limits, service.settings),
            *_cross_origin(service.settings),
            Middleware(TrailingSlash),
            Middleware(Guard, service, _OPEN),
        ],
        exception_handlers={
            ExpertError: _refused,
            HTTPException: _unrouted,
            ClientDisconnect: _left,
        },
        lifespan=lifespan,
    )
    if service.tracing is not None:
        _trace(app, service.tracing)
    app.state.service = service
    app.state.patience = Patience(seconds=service.settings.behind_seconds)
    app.router.redirect_slashes = False
    return app


def _cross_origin(settings: ServeSettings) -> list[Middleware]:
    """Let pages of the allowed origins read answers, and send a key."""
    if not settings.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,  # other origins do not come so far: `request_limits`
            expose_headers=_EXPOSED,
        )
    ]


def _routes(service: Service) -> list[BaseRoute]:
    return [
        *health.routes(service),
        *description.routes(service),
        *openai.routes(service),
        *anthropic.routes(service),
        *native.routes(service),
        *status_page.routes(service),
    ]


def _trace(app: Starlette, tracing: "Tracing") -> None:
    """Add the outermost middleware, which makes spans of requests."""
    from expertctl.server.tracing.request_span import TracedRequests

    app.add_middleware(TracedRequests, tracing)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ExpertError)
    return error_response(error, request.scope)


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = ", ".join(sorted(_methods(request, request.scope["path"])))
        fact = UsageError(f"{request.method} is not allowed here", hint=f"it takes {allowed}")
        answer = error_response(fact, request.scope, status=405)
        answer.headers["Allow"] = allowed
        return answer
    return error_response(_unknown_address(request), request.scope)


def _unknown_address(request: Request) -> UnknownAddressError:
    """Return the error for a path that no route has; names the path that was probably meant."""
    path = request.scope["path"]
    fact = f"there is nothing at this address: {request.method} {path[:200]}"
    meant = [one for one in (path.removeprefix("/v1"), f"/v1{path}") if _methods(request, one)]
    if meant and meant[0] != path:
        fact += f"; did you mean {meant[0]}? The base URL has /v1 twice, or lacks it"
    return UnknownAddressError(fact, hint=f"GET {description.DOCUMENT} lists all addresses")


def _methods(request: Request, path: str) -> set[str]:
    """Return the methods of all routes at a path."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    here = [route for route in routes if route.path_regex.match(path)]
    return {method for route in here for method in route.methods or ()}


async def _left(_: Request, __: Exception) -> Response:
    return Response(status_code=LEFT)
