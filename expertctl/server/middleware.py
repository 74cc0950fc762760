"""ASGI middleware of the generation server: limits, request log, trailing slashes, API keys.

`AuthMiddleware` identifies the caller of each request and checks its rights before any route; it
sets ``scope["state"]["caller"]``. A key comes as ``Authorization: Bearer`` or as ``x-api-key``,
never in a URL. Without keys the server answers only this machine.

A trailing slash, which some clients add, is removed rather than redirected: most clients would turn
a redirected POST into a GET.
"""

import logging
import time
from collections.abc import Collection
from datetime import UTC, datetime

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertctl.errors import (
    ExpertError,
    InvalidPackageError,
    StoreError,
    UnauthenticatedError,
)
from expertctl.http.address import build_url, is_loopback
from expertctl.http.limits import LimitsMiddleware, RequestPolicy, RequestRefusal, build_host_names
from expertctl.http.log import RequestLogMiddleware, RequestRecord, get_route_path
from expertctl.http.operation import JSON_MEDIA_TYPE
from expertctl.server.caller import Caller, anthropic_rate_headers, openai_rate_headers
from expertctl.server.metrics import Metrics
from expertctl.server.responses import error_response, new_request_id, uses_anthropic_format
from expertctl.server.service import Service
from expertctl.server.settings import ServeSettings, is_exposed


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


LOG = logging.getLogger("expertctl.server")

LARGE_BODIES_BYTES = 256 << 20
"""Maximum bytes of large bodies held at once."""
PUBLIC_PATHS = frozenset({"/health", "/healthz", "/readyz", "/version", "/openapi.json"})
"""Paths that need neither a key nor a ready engine; they reveal nothing secret."""


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
            caller = self._identify_caller(Headers(scope=scope))
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

    def _identify_caller(self, headers: Headers) -> Caller:
        """Return the caller; one stat of the key file is cheaper here than a thread switch."""
        keys = self._service.keys
        if not (keys.are_required or is_exposed(self._service.settings)):
            return Caller(manages=True)
        try:
            key = keys.find(_read_secret(headers), now=time.time())
        except InvalidPackageError as error:  # clients must not learn where the file is
            LOG.error(error.message)
            raise StoreError("the API keys of this server cannot be read") from error
        if key is None:
            raise UnauthenticatedError(
                "an API key is required: it is missing, wrong, expired or revoked",
                hint="send it as `Authorization: Bearer KEY` or as `x-api-key`",
            )
        return Caller(
            id=key.id,
            name=key.name,
            requests_per_minute=key.requests_per_minute,
            tokens_per_minute=key.tokens_per_minute,
            manages=key.manages,
        )

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
    """Return the allowed origins; own pages count under every local name of this machine."""
    secure = settings.certificate is not None
    names = ("localhost", "127.0.0.1", "::1") if is_loopback(settings.host) else ()
    own = {build_url(name, settings.port, secure=secure) for name in names}
    return frozenset({settings.public_url, *own, *settings.allowed_origins})


def _refusal_response(refusal: RequestRefusal, scope: Scope) -> Response:
    return error_response(refusal.error, scope, status=refusal.status)
