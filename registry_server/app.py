"""The registry as one ASGI application, and its periodic tasks.

Middleware handles every request, outermost first: the request log, limits on sizes and hosts, and
authentication. Errors become responses here, in one place. Only writing requires a page of this
registry as ``Origin``: pages of other sites cannot read responses.

Periodic tasks run before the first request and then every `SWEEP_SECONDS`. Abandoned uploads are
removed, which frees their quota, their files, and their share of the uploads of a user. Index
documents older than half of the interval that they state are signed again, a few in each
transaction so that no request waits long; the first round runs while requests are served.
"""

import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import urlsplit

import anyio
from anyio import to_thread
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertctl.errors import ExpertError, NotFoundError, UnauthenticatedError, UsageError
from expertctl.http.limits import (
    STALL_SECONDS,
    LimitsMiddleware,
    RequestPolicy,
    RequestRefusal,
    build_host_names,
)
from expertctl.http.log import RequestLogMiddleware, RequestRecord, get_route_path
from expertctl.http.server import is_loopback
from registry_server.access.authentication import AuthenticationMiddleware
from registry_server.access.rights import Identity
from registry_server.api import routes as api
from registry_server.errors import (
    REQUEST_LOGGER,
    OciCode,
    OciError,
    error_response,
    is_program_path,
)
from registry_server.oci import routes as oci
from registry_server.operation.gc import remove_stale_uploads
from registry_server.publishing.index import is_renewal_due, renew_indexes
from registry_server.registry import Registry, open_registry
from registry_server.settings import RegistryLimits, ServerSettings
from registry_server.web.account import make_account_routes
from registry_server.web.pages import make_fallback_route, make_page_routes
from registry_server.web.rendering import prefers_html, render_error_page


def make_request_limits(
    app: ASGIApp,
    settings: ServerSettings,
    *,
    registry: Registry | None = None,
    stall_seconds: float = STALL_SECONDS,
) -> LimitsMiddleware:
    """Wrap the application of a registry in its request limits; ``registry`` renders pages."""
    bounds = RequestPolicy(
        names=build_host_names(settings.host, settings.public_url),
        accepts_addresses=not is_loopback(settings.host),
        origins=_list_own_origins(settings),
        body_limit=partial(_body_limit, settings.limits),
        build_response=partial(_refusal_response, settings, registry),
        server_label="this registry",
        host_hint="set `url` in registry.toml to the public URL",
        origin_hint="set `url` in registry.toml to the URL of the page that sends the request",
        stall_seconds=stall_seconds,
    )
    return LimitsMiddleware(app, bounds)


def _body_limit(limits: RegistryLimits, path: str) -> int | None:
    """Return the maximum bytes of a body; blobs have their own limit and a quota."""
    if path.startswith("/v2/"):
        if "/blobs/uploads/" in path:
            return None
        if "/manifests/" in path:
            return limits.manifest_bytes
    return limits.body_bytes if is_program_path(path) else min(limits.body_bytes, MAX_FORM_BYTES)


MAX_FORM_BYTES = 16 << 10
"""Maximum size of a form of the pages."""


def _list_own_origins(settings: ServerSettings) -> frozenset[str]:
    """Return the origins of this registry's pages; on this machine it has several names."""
    url = urlsplit(settings.public_url)
    if not is_loopback(url.hostname or ""):
        return frozenset({settings.public_url})
    port = f":{url.port}" if url.port else ""
    names = {url.netloc.removesuffix(port), "127.0.0.1", "localhost", "[::1]"}
    return frozenset(f"{url.scheme}://{name}{port}" for name in names)


class TransportSecurityMiddleware:
    """Makes browsers use https only (RFC 6797), if the public URL is https on its default port.

    Browsers apply it to all ports of a host, so on another port it would break other services.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        """Add the header to all responses, unless only this machine reaches the registry."""
        self._app = app
        url = urlsplit(settings.public_url)
        public = url.port is None and not is_loopback(url.hostname or "")
        self._is_needed = settings.is_encrypted and public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Strict-Transport-Security"] = HSTS
            await send(message)

        await self._app(scope, receive, send_with_header if self._is_needed else send)


HSTS = "max-age=31536000"
"""One year, for this host only: its other names and subdomains are not the registry's."""


_FORM_REFUSALS = {403, 413, 415}
"""Statuses of refused forms, which browsers get as pages."""


def _refusal_response(
    settings: ServerSettings, registry: Registry | None, refusal: RequestRefusal, scope: Scope
) -> Response:
    if registry is not None and refusal.status in _FORM_REFUSALS:
        return build_error_response(registry, refusal.error, scope, status=refusal.status)
    return error_response(refusal.error, scope, settings, status=refusal.status)


def build_error_response(
    registry: Registry, error: ExpertError, scope: Scope, *, status: int | None = None
) -> Response:
    """Return a page for a browser, or JSON; a 401 is for programs, which send tokens."""
    if prefers_html(scope) and not isinstance(error, UnauthenticatedError):
        return render_error_page(registry, HTTPConnection(scope), error, status=status)
    return error_response(error, scope, registry.settings, status=status)


def make_request_log(app: ASGIApp, registry: Registry) -> RequestLogMiddleware:
    """Wrap the application of a registry in the request log."""
    return RequestLogMiddleware(app, RegistryRequestObserver(registry))


class RegistryRequestObserver:
    """Counts and logs the requests to a registry."""

    log = REQUEST_LOGGER
    id_headers: tuple[str, ...] = ("X-Request-Id",)

    def __init__(self, registry: Registry) -> None:
        """Count in the metrics of ``registry``."""
        self.registry = registry

    def new_id(self) -> str:
        """Return a new request id."""
        return secrets.token_hex(8)

    def request_started(self) -> None:
        """Count a request that has started."""
        self.registry.metrics.running.inc()

    def request_finished(self, scope: Scope, exchange: RequestRecord) -> None:
        """Count and log a request that has ended."""
        self.registry.metrics.running.dec()
        identity = scope["state"].get("identity")
        self.registry.metrics.count_request(
            method=scope["method"],
            route=get_route_path(scope),
            status=exchange.status,
            seconds=exchange.seconds,
            received=exchange.received,
            sent=exchange.sent,
        )
        fields = exchange.fields(scope) | {
            "user": identity.name if isinstance(identity, Identity) else None,
            "address": _logged_address(scope, identity),
        }
        REQUEST_LOGGER.info("request", extra={"fields": fields})

    def build_error_response(self, scope: Scope, exchange: RequestRecord) -> Response:
        """Return the response to a request that failed because of a bug."""
        hint = f"report request {exchange.id} to the operator of this registry"
        error = ExpertError("the registry failed to answer this request", hint=hint)
        return build_error_response(self.registry, error, scope)


def _logged_address(scope: Scope, identity: object) -> str | None:
    if isinstance(identity, Identity) and identity.address:
        return identity.address
    client = scope.get("client")
    return str(client[0]) if client else None


SWEEP_SECONDS = 600.0
RENEWAL_BATCH = 20
"""Maximum documents signed again in one transaction."""
_SWEEP_LOG = logging.getLogger("registry")


def sweep_uploads(registry: Registry) -> None:
    """Remove abandoned uploads; a failure is logged, and the next sweep tries again."""
    try:
        remove_stale_uploads(registry, time.time() - registry.settings.limits.upload_seconds)
    except ExpertError as error:
        _SWEEP_LOG.warning("abandoned uploads were not removed: %s", error.message)


def renew_index_batch(registry: Registry) -> bool:
    """Sign some old index documents again; return whether there may be more.

    A failure is logged and retried later. Of several workers, the first does the work.
    """
    now = time.time()
    try:
        if not _is_renewal_due(registry, now):
            return False
        with registry.database.write() as connection:
            renewed = renew_indexes(
                connection, signer=registry.index_signer, now=now, max_documents=RENEWAL_BATCH
            )
    except ExpertError as error:
        _SWEEP_LOG.warning("old index documents were not signed again: %s", error.message)
        return False
    return renewed == RENEWAL_BATCH


def _is_renewal_due(registry: Registry, now: float) -> bool:
    with registry.database.read() as connection:
        return is_renewal_due(connection, signer=registry.index_signer, now=now)


@asynccontextmanager
async def run_periodic_tasks(
    registry: Registry, *, pause: Callable[[float], Awaitable[None]] = anyio.sleep
) -> AsyncIterator[None]:
    """Run the periodic tasks at once and after each pause, until the block ends."""
    await to_thread.run_sync(sweep_uploads, registry)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_repeat_tasks, registry, pause)
        yield
        tasks.cancel_scope.cancel()


async def _repeat_tasks(registry: Registry, pause: Callable[[float], Awaitable[None]]) -> None:
    while True:
        while await to_thread.run_sync(renew_index_batch, registry):
            pass
        await pause(SWEEP_SECONDS)
        await to_thread.run_sync(sweep_uploads, registry)


def create_app(settings: ServerSettings) -> Starlette:
    """Open a registry and return its application.

    Raises:
        StoreError: when there is no registry in the data folder, or it cannot be opened.
    """
    return build_app(open_registry(settings))


def build_app(registry: Registry) -> Starlette:
    """Return the application of an open registry; it closes the registry on shutdown."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            async with run_periodic_tasks(registry):
                yield
        finally:
            registry.close()

    app = Starlette(
        routes=_build_routes(registry),
        middleware=[
            Middleware(TransportSecurityMiddleware, registry.settings),
            Middleware(make_request_log, registry),
            Middleware(make_request_limits, registry.settings, registry=registry),
            Middleware(AuthenticationMiddleware, registry, partial(build_error_response, registry)),
        ],
        exception_handlers={
            ExpertError: _handle_expert_error,
            HTTPException: _handle_http_error,
            ClientDisconnect: _handle_disconnect,
        },
        lifespan=lifespan,
    )
    app.state.registry = registry
    app.router.redirect_slashes = False
    return app


def _build_routes(registry: Registry) -> list[BaseRoute]:
    """Return all routes; the pages last, because their patterns are the most general."""
    return [
        *api.make_health_routes(registry),
        *oci.make_oci_routes(registry),
        *api.make_index_routes(registry),
        *api.make_api_routes(registry),
        *make_page_routes(registry),
        *make_account_routes(registry),
        make_fallback_route(registry),
    ]


async def _handle_expert_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ExpertError)
    return build_error_response(request.app.state.registry, error, request.scope)


async def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        fact = f"{request.method} is not allowed here"
        allowed = (error.headers or {}).get("Allow", "")
        return await _handle_expert_error(
            request, OciError(OciCode.UNSUPPORTED, fact, headers={"Allow": allowed})
        )
    return await _handle_expert_error(request, NotFoundError("there is nothing at this address"))


async def _handle_disconnect(request: Request, _: Exception) -> Response:
    """Answer an incomplete or malformed body, which is not a failure of the server."""
    return await _handle_expert_error(request, UsageError("the body of the request is incomplete"))
