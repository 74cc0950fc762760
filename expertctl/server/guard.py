"""Identifies the caller of each request and checks its rights, before any route.

Sets ``scope["state"]["caller"]``. A key comes as ``Authorization: Bearer`` or as ``x-api-key``,
never in an address. Without keys the server answers this machine alone.
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
from expertctl.http.limits import Bounds, Refusal, RequestLimits, names_of
from expertctl.http.listening import is_loopback, url_of
from expertctl.server.api_keys import ApiKey
from expertctl.server.body import JSON
from expertctl.server.caller import Caller
from expertctl.server.error_bodies import answers_anthropic, error_response
from expertctl.server.exposure import is_exposed
from expertctl.server.rate_headers import anthropic_headers, openai_headers
from expertctl.server.service import Service
from expertctl.server.settings import ServeSettings

LOG = logging.getLogger("expertctl.server")

LARGE_BODIES = 256 << 20
"""Most bytes of large bodies that are held at once."""
OPEN = frozenset({"/health", "/healthz", "/readyz", "/version", "/openapi.json"})
"""Paths that need neither a key nor an engine; they show nothing secret."""


def request_limits(app: ASGIApp, settings: ServeSettings) -> RequestLimits:
    """Guard the application: of web pages only its own may send requests, and only JSON is read."""
    bounds = Bounds(
        names=names_of(settings.host, settings.public_url) | set(settings.allowed_hosts),
        addresses=not is_loopback(settings.host),
        origins=_origins(settings),
        open_methods=frozenset(),
        body_limit=lambda _: settings.body_bytes,
        large_bodies=max(settings.body_bytes, LARGE_BODIES),
        media_type=JSON,
        refuse=_refused,
        whose="this server",
        host_hint="give --url the address that users see, or --allow-host NAME",
        origin_hint="ask from a server of that site, or start with --allow-origin ORIGIN",
        named_below=b"/v1/models/",
    )
    return RequestLimits(app, bounds)


class Guard:
    """ASGI middleware that identifies the caller, or refuses the request."""

    def __init__(self, app: ASGIApp, service: Service, open_paths: Collection[str]) -> None:
        """Let anybody have ``open_paths``; refuse all else until the engine is ready."""
        self._app, self._service, self._open = app, service, frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection."""
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        try:
            caller = self._caller(Headers(scope=scope))
        except ExpertError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        send = self._with_limits(caller, scope, send)
        try:
            self._service.quotas.enter(caller)
            self._demand_ready()
        except ExpertError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        scope["state"] = {**scope.get("state", {}), "caller": caller}
        await self._app(scope, receive, send)

    def _with_limits(self, caller: Caller, scope: Scope, send: Send) -> Send:
        """Add what is left of the caller's limits to the headers of an answer."""
        if caller.requests_per_minute is None and caller.tokens_per_minute is None:
            return send
        speaks_anthropic = answers_anthropic(scope)

        async def with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                limits = self._service.quotas.limits_of(caller)
                headers = MutableHeaders(scope=message)
                if speaks_anthropic:
                    headers.update(dict(anthropic_headers(limits, now=datetime.now(UTC))))
                else:
                    headers.update(dict(openai_headers(limits)))
            await send(message)

        return with_limits

    def _caller(self, headers: Headers) -> Caller:
        """Find the caller; the stat of the key file is cheaper here than a switch to a thread."""
        keys = self._service.keys
        if not (keys.are_demanded or is_exposed(self._service.settings)):
            return Caller(manages=True)
        try:
            key = keys.find(_secret_of(headers), now=time.time())
        except InvalidPackageError as error:  # clients must not learn where the file is
            LOG.error(error.message)
            raise StoreError("the API keys of this server cannot be read") from error
        if key is None:
            raise UnauthenticatedError(
                "an API key is needed: none came, or one that is wrong, expired or revoked",
                hint="send one as `Authorization: Bearer`, or as `x-api-key`",
            )
        return _caller_of(key)

    def _demand_ready(self) -> None:
        readiness = self._service.readiness
        if readiness.state == "loading":
            raise StoreError("the base is being loaded", hint="/readyz says when that is done")
        if not readiness.is_ready:
            raise StoreError("the server takes no more jobs")


def _caller_of(key: ApiKey) -> Caller:
    return Caller(
        id=key.id,
        name=key.name,
        requests_per_minute=key.requests_per_minute,
        tokens_per_minute=key.tokens_per_minute,
        manages=key.manages,
    )


def _secret_of(headers: Headers) -> str:
    """Return the secret of the request; empty if there is none, or there are two that differ."""
    shown = set(headers.getlist("x-api-key"))
    for value in headers.getlist("authorization"):
        scheme, _, secret = value.partition(" ")
        shown.add(secret.strip() if scheme.lower() == "bearer" else "")
    return shown.pop() if len(shown) == 1 else ""


def _origins(settings: ServeSettings) -> frozenset[str]:
    """Return the origins of our own pages, under every local name of this machine."""
    secure = settings.certificate is not None
    names = ("localhost", "127.0.0.1", "::1") if is_loopback(settings.host) else ()
    own = {url_of(name, settings.port, secure=secure) for name in names}
    return frozenset({settings.public_url, *own, *settings.allowed_origins})


def _refused(refusal: Refusal, scope: Scope) -> Response:
    return error_response(refusal.error, scope, status=refusal.status)
