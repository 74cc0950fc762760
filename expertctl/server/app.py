"""The generation server as one ASGI application, and the engine worker behind it.

Middleware handles every request, outermost first: tracing, the request log, limits on sizes, hosts
and origins, CORS, trailing slashes, and authentication. Errors become responses here, in the shape
of the API of the request's path.

`EngineWorker` owns the engine of a worker process, from loading the base to the end of the last
job.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Lifespan

from expertctl.engine.request import RunRequest
from expertctl.engine.serving.engine import ServingEngine
from expertctl.engine.text.prompt import UserMessage
from expertctl.errors import (
    WARNING_PREFIX,
    ExpertError,
    IncompatibleError,
    NotFoundError,
    RevokedError,
    UnknownAddressError,
    UsageError,
)
from expertctl.http.operation import OPENAPI_PATH
from expertctl.routing.planner import Planner
from expertctl.routing.request import RouteRequest
from expertctl.server import operations, status_page
from expertctl.server.anthropic import routes as anthropic
from expertctl.server.caller import RATE_HEADER_NAMES
from expertctl.server.middleware import (
    PUBLIC_PATHS,
    AuthMiddleware,
    TrailingSlashMiddleware,
    limit_requests,
    make_request_log,
)
from expertctl.server.model_name import ModelSelection, check_alias_base, parse_alias_experts
from expertctl.server.native import routes as native
from expertctl.server.openai import routes as openai
from expertctl.server.request_body import IGNORED_HEADER
from expertctl.server.responses import error_response
from expertctl.server.service import Readiness, Service, build_service
from expertctl.server.settings import ServeSettings
from expertctl.server.streaming import BackpressureLimit
from expertctl.settings import Settings
from expertctl.store.preference import find_working_folder

if TYPE_CHECKING:
    from expertctl.server.tracing import Tracing


CLIENT_CLOSED_REQUEST = 499
"""The status, in the log only, of a request whose client disconnected before the response."""
_EXPOSED_HEADERS = (
    IGNORED_HEADER,
    *("X-Request-Id", "request-id", "Retry-After", "x-should-retry", "Location"),
    *RATE_HEADER_NAMES,
)
"""The response headers that pages of the allowed origins may read."""
_PUBLIC_PATHS = frozenset({*PUBLIC_PATHS, *status_page.PUBLIC_PATHS, "/"})


def create_app(service: Service, *, lifespan: Lifespan[Starlette] | None = None) -> Starlette:
    """Return the application of a service; the caller opens and closes the engine."""
    app = Starlette(
        routes=_build_routes(service),
        middleware=[
            Middleware(make_request_log, service.metrics),
            Middleware(limit_requests, service.settings),
            *_build_cors_middleware(service.settings),
            Middleware(TrailingSlashMiddleware),
            Middleware(AuthMiddleware, service, _PUBLIC_PATHS),
        ],
        exception_handlers={
            ExpertError: _handle_error,
            HTTPException: _handle_http_error,
            ClientDisconnect: _handle_disconnect,
        },
        lifespan=lifespan,
    )
    if service.tracing is not None:
        _add_tracing(app, service.tracing)
    app.state.service = service
    app.state.patience = BackpressureLimit(seconds=service.settings.behind_seconds)
    app.router.redirect_slashes = False
    return app


def _build_cors_middleware(settings: ServeSettings) -> list[Middleware]:
    """Let pages of the allowed origins read responses and send a key."""
    if not settings.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,  # `limit_requests` refuses other origins earlier
            expose_headers=_EXPOSED_HEADERS,
        )
    ]


def _build_routes(service: Service) -> list[BaseRoute]:
    return [
        *operations.build_health_routes(service),
        *operations.build_openapi_routes(service),
        *openai.build_routes(service),
        *anthropic.build_routes(service),
        *native.build_routes(service),
        *status_page.build_routes(service),
    ]


def _add_tracing(app: Starlette, tracing: "Tracing") -> None:
    """Add the outermost middleware, which records the spans of requests."""
    from expertctl.server.tracing import TracingMiddleware

    app.add_middleware(TracingMiddleware, tracing)


async def _handle_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ExpertError)
    return error_response(error, request.scope)


async def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = ", ".join(sorted(_find_methods(request, request.scope["path"])))
        fact = UsageError(f"{request.method} is not allowed here", hint=f"use {allowed}")
        answer = error_response(fact, request.scope, status=405)
        answer.headers["Allow"] = allowed
        return answer
    return error_response(_unknown_address_error(request), request.scope)


def _unknown_address_error(request: Request) -> UnknownAddressError:
    """Return the error for a path without a route; suggests the path probably meant."""
    path = request.scope["path"]
    fact = f"there is nothing at this address: {request.method} {path[:200]}"
    meant = [one for one in (path.removeprefix("/v1"), f"/v1{path}") if _find_methods(request, one)]
    if meant and meant[0] != path:
        fact += f"; did you mean {meant[0]}? The base URL repeats /v1, or lacks it"
    return UnknownAddressError(fact, hint=f"GET {OPENAPI_PATH} lists all paths")


def _find_methods(request: Request, path: str) -> set[str]:
    """Return the methods of all routes at a path."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    here = [route for route in routes if route.path_regex.match(path)]
    return {method for route in here for method in route.methods or ()}


async def _handle_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


LOG = logging.getLogger("expertctl.server")
EXIT_DELAY_SECONDS = 1.0
_ANY_PROMPT = "?"
"""A placeholder: a plan of named experts does not depend on the prompt."""
NotifyReady = Callable[[ExpertError | None], None]
"""Called with None once jobs are accepted, or with the error that prevents it."""


class EngineWorker:
    """Owns the engine of a worker process."""

    def __init__(self, settings: ServeSettings, home: Settings) -> None:
        """Open the planner; the engine is not loaded yet."""
        planner = Planner.open(home, notify=LOG.info, folder=find_working_folder())
        self._engine = ServingEngine(
            planner,
            settings.engine,
            tell=_log_engine_message,
            on_failure=self._handle_engine_failure,
        )
        self._readiness = Readiness("loading")
        self._service = build_service(self._engine, planner, settings, readiness=self._readiness)
        self._close_lock = threading.Lock()
        self._load_thread: threading.Thread | None = None

    def build_app(self, lifespan: Lifespan[Starlette]) -> Starlette:
        """Return the application; it answers only public paths before the engine is ready."""
        app = create_app(self._service, lifespan=lifespan)
        app.state.opening = self
        return app

    def start(self, notify: NotifyReady) -> None:
        """Load the base and warm up in a thread, then call ``notify``."""
        self._load_thread = threading.Thread(target=self._load_engine, args=(notify,), daemon=True)
        self._load_thread.start()

    def close_soon(self, *, seconds: float) -> None:
        """Start closing in a thread."""
        threading.Thread(target=self.close, kwargs={"seconds": seconds}, daemon=True).start()

    def close(self, *, seconds: float) -> None:
        """Accept no more jobs; give running ones ``seconds`` to end, and wait for them."""
        with self._close_lock:
            if self._readiness.state == "ready":
                self._readiness.state = "ending"
                self._engine.close(seconds=seconds)

    def shut_down(self) -> None:
        """Close at once, after all requests are answered, and send the last spans."""
        self.close(seconds=0)
        if self._service.tracing is not None:
            self._service.tracing.close()

    def _load_engine(self, notify: NotifyReady) -> None:
        try:
            if self._service.tracing is not None:
                self._service.tracing.open()
            self._engine.start()
            self._check_aliases()
        except ExpertError as error:
            self._readiness.state = "failed"
            notify(error)
            return
        except Exception:  # even after a bug, the parent must learn that loading ended
            LOG.exception("loading failed")
            self._readiness.state = "failed"
            notify(ExpertError("the server failed to load", hint="see its log"))
            return
        if self._readiness.state != "failed":  # the engine may have ended meanwhile
            self._readiness.state = "ready"
        notify(None)

    def _check_aliases(self) -> None:
        service = self._service
        if aliases := service.settings.aliases:
            bases = {base.name for base in service.planner.bases.list_bases()}
            check_alias_base(aliases, base=self._engine.base_name, bases=bases)
            for alias, model in aliases.items():
                self._check_plan(alias, parse_alias_experts(alias, model))

    def _check_plan(self, alias: str, choice: ModelSelection | None) -> None:
        """Check that the base can answer with the experts of an alias, if it names any.

        A revoked expert only logs a warning: other models are still served.

        Raises:
            NotFoundError: when a required expert is not installed.
            IncompatibleError: when they do not fit the base or each other.
        """
        if choice is None:
            return
        route = RouteRequest(prompt=_ANY_PROMPT)
        message = UserMessage(prompt=_ANY_PROMPT)
        try:
            request = RunRequest(message=message, route=route, experts=choice.force)
            self._engine.plan(request).result()
        except RevokedError as error:
            LOG.warning("requests for the alias %s are refused: %s", alias, error.message)
        except (UsageError, NotFoundError, IncompatibleError) as error:
            raise type(error)(f"the alias {alias}: {error.message}", hint=error.hint) from error

    def _handle_engine_failure(self) -> None:
        """Exit the broken worker after a moment, so that its clients still get their errors."""
        self._readiness.state = "failed"
        threading.Timer(EXIT_DELAY_SECONDS, os._exit, (1,)).start()


def _log_engine_message(message: str) -> None:
    """Log an engine message; lines after the first are the traceback of a bug."""
    first, *trace = message.splitlines()
    if trace:
        LOG.error(first, extra={"fields": {"trace": trace}})
    elif first.startswith(WARNING_PREFIX):
        LOG.warning(first.removeprefix(WARNING_PREFIX))
    else:
        LOG.info(first)
