"""The generation server as one ASGI application, and the engine worker behind it.

Middleware handles every request, outermost first: tracing, the request log, limits on sizes, hosts
and origins, CORS, trailing slashes, and authentication. Errors become responses here, in the shape
of the API of the request's path.

`EngineWorker` owns the engine of a worker process, from loading the base to the end of the last
job.

`AuthMiddleware` identifies the caller of each request and checks its rights before any route; it
sets ``scope["state"]["caller"]``. A key comes as ``Authorization: Bearer`` or as ``x-api-key``,
never in a URL. Without keys the server answers only this machine.

A trailing slash, which some clients add, is removed rather than redirected: most clients would turn
a redirected POST into a GET.
"""

import logging
import os
import threading
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from expertctl.engine.request import RunRequest
from expertctl.engine.serving.engine import ServingEngine
from expertctl.errors import (
    WARNING_PREFIX,
    ExpertError,
    IncompatibleError,
    NotFoundError,
    RevokedError,
    StoreError,
    UnknownAddressError,
    UsageError,
)
from expertctl.http.limits import LimitsMiddleware, RequestPolicy, RequestRefusal, build_host_names
from expertctl.http.log import RequestLogMiddleware, RequestRecord, get_route_path
from expertctl.http.operation import JSON_MEDIA_TYPE, OPENAPI_PATH
from expertctl.http.server import build_url, is_loopback
from expertctl.routing.planner import Planner
from expertctl.routing.request import RouteRequest
from expertctl.server import operations, pages
from expertctl.server.anthropic import routes as anthropic
from expertctl.server.metrics import Metrics
from expertctl.server.native import routes as native
from expertctl.server.openai import routes as openai
from expertctl.server.request_body import IGNORED_HEADER
from expertctl.server.responses import (
    RATE_HEADER_NAMES,
    Caller,
    anthropic_rate_headers,
    error_response,
    new_request_id,
    openai_rate_headers,
    uses_anthropic_format,
)
from expertctl.server.service import Readiness, Service, build_service
from expertctl.server.settings import (
    ModelSelection,
    ServeSettings,
    check_alias_base,
    parse_alias_experts,
)
from expertctl.server.streaming import BackpressureLimit
from expertctl.settings import Settings
from expertctl.store.preference import find_working_folder
from expertctl.user_request import UserMessage

if TYPE_CHECKING:
    from expertctl.server.tracing import Tracing


class TrailingSlashMiddleware:
    """ASGI middleware that removes one trailing slash from the path."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap ``app``; the path has already been checked."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        path = scope.get("path", "")
        if scope["type"] == "http" and path.endswith("/") and path.rstrip("/"):
            scope = {**scope, "path": path[:-1]}
            if raw := scope.get("raw_path"):
                scope["raw_path"] = raw[:-1]
        await self._app(scope, receive, send)


REQUEST_LOG = logging.getLogger("expertctl.server.requests")


def make_request_log(app: ASGIApp, metrics: Metrics) -> RequestLogMiddleware:
    """Wrap the application in the request log."""
    return RequestLogMiddleware(app, ServerRequestObserver(metrics))


class ServerRequestObserver:
    """Counts and logs requests; no text of a prompt or an answer is logged."""

    log = REQUEST_LOG
    id_headers: tuple[str, ...] = ("X-Request-Id", "request-id")
    """OpenAI's clients read the first, Anthropic's the second."""

    def __init__(self, metrics: Metrics) -> None:
        """Count in ``metrics``."""
        self._metrics = metrics

    def new_id(self) -> str:
        """Return a new request id."""
        return new_request_id()

    def request_started(self) -> None:
        """Count a request that has started."""
        self._metrics.running.inc()

    def request_finished(self, scope: Scope, exchange: RequestRecord) -> None:
        """Count and log a request that has ended."""
        self._metrics.running.dec()
        self._metrics.count_request(
            method=scope["method"],
            route=get_route_path(scope),
            status=exchange.status,
            seconds=exchange.seconds,
        )
        caller, client = scope["state"].get("caller"), scope.get("client")
        fields = exchange.fields(scope) | {
            "caller": caller.id if isinstance(caller, Caller) else None,
            "address": str(client[0]) if client else None,
        }
        REQUEST_LOG.info("request", extra={"fields": fields})

    def build_error_response(self, scope: Scope, exchange: RequestRecord) -> Response:
        """Return the response to a request that failed because of a bug."""
        hint = f"report request {exchange.id} to the operator of this server"
        return error_response(
            ExpertError("the server failed to answer this request", hint=hint), scope
        )


LARGE_BODIES_BYTES = 256 << 20
"""Maximum bytes of large bodies held at once."""


def limit_requests(app: ASGIApp, settings: ServeSettings) -> LimitsMiddleware:
    """Limit the requests to an application: own and allowed web origins only, JSON bodies only."""
    bounds = RequestPolicy(
        names=build_host_names(settings.host, settings.public_url) | set(settings.allowed_hosts),
        accepts_addresses=not is_loopback(settings.host),
        origins=_list_origins(settings),
        open_methods=frozenset(),
        body_limit=lambda _: settings.body_bytes,
        large_bodies=max(settings.body_bytes, LARGE_BODIES_BYTES),
        media_type=JSON_MEDIA_TYPE,
        build_response=_refusal_response,
        server_label="this server",
        host_hint="start with --url, the public URL, or with --allow-host NAME",
        origin_hint="send the request from that site's server, or start with --allow-origin ORIGIN",
        name_prefix=b"/v1/models/",
    )
    return LimitsMiddleware(app, bounds)


class AuthMiddleware:
    """ASGI middleware that identifies the caller or refuses the request."""

    def __init__(self, app: ASGIApp, service: Service, public_paths: Collection[str]) -> None:
        """Leave ``public_paths`` open to all; refuse other paths until the engine is ready."""
        self._app, self._service, self._public_paths = app, service, frozenset(public_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http" or scope["path"] in self._public_paths:
            await self._app(scope, receive, send)
            return
        try:
            caller = self._service.identify_caller(_read_secret(Headers(scope=scope)))
            send = self._add_limit_headers(caller, scope, send)
            self._service.quotas.count_request(caller)
            self._require_ready()
        except ExpertError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), "caller": caller}
        await self._app(scope, receive, send)

    def _add_limit_headers(self, caller: Caller, scope: Scope, send: Send) -> Send:
        """Wrap ``send`` to add the caller's rate-limit headers to the response."""
        if caller.requests_per_minute is None and caller.tokens_per_minute is None:
            return send
        speaks_anthropic = uses_anthropic_format(scope)

        async def with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                limits = self._service.quotas.get_limits(caller)
                headers = MutableHeaders(scope=message)
                if speaks_anthropic:
                    headers.update(dict(anthropic_rate_headers(limits, now=datetime.now(UTC))))
                else:
                    headers.update(dict(openai_rate_headers(limits)))
            await send(message)

        return with_limits

    def _require_ready(self) -> None:
        readiness = self._service.readiness
        if readiness.state == "loading":
            raise StoreError("the base is being loaded", hint="poll /readyz until it is ready")
        if not readiness.is_ready:
            raise StoreError("the server is shutting down")


def _read_secret(headers: Headers) -> str:
    """Return the request's secret; empty if there is none, or two that differ."""
    shown = set(headers.getlist("x-api-key"))
    for value in headers.getlist("authorization"):
        scheme, _, secret = value.partition(" ")
        shown.add(secret.strip() if scheme.lower() == "bearer" else "")
    return shown.pop() if len(shown) == 1 else ""


def _list_origins(settings: ServeSettings) -> frozenset[str]:
    """Return the allowed origins; own pages count under every name of this server."""
    secure = settings.certificate is not None
    names = ("localhost", "127.0.0.1", "::1") if is_loopback(settings.host) else ()
    own_names = (*names, *settings.allowed_hosts)
    own = {build_url(name, settings.port, secure=secure) for name in own_names}
    return frozenset({settings.public_url, *own, *settings.allowed_origins})


def _refusal_response(refusal: RequestRefusal, scope: Scope) -> Response:
    return error_response(refusal.error, scope, status=refusal.status)


CLIENT_CLOSED_REQUEST = 499
"""The status, in the log only, of a request whose client disconnected before the response."""
_EXPOSED_HEADERS = (
    IGNORED_HEADER,
    *("X-Request-Id", "request-id", "Retry-After", "x-should-retry", "Location"),
    *RATE_HEADER_NAMES,
)
"""The response headers that pages of the allowed origins may read."""
_PUBLIC_PATHS = operations.PUBLIC_PATHS | pages.PUBLIC_PATHS


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
        *pages.build_routes(service),
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
        tell, on_failure = _log_engine_message, self._handle_engine_failure
        self._engine = ServingEngine(planner, settings.engine, tell=tell, on_failure=on_failure)
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
        LOG.info(
            "stopping after %d running requests; Ctrl-C again ends them now", self._engine.job_count
        )
        threading.Thread(target=self.close, kwargs={"seconds": seconds}, daemon=True).start()

    def cancel_soon(self) -> None:
        """Cancel current jobs in a thread: what they have written is their answer."""
        threading.Thread(target=self._engine.cancel_all, daemon=True).start()

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
