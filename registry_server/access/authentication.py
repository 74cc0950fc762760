"""Authentication and rate limits, before any other part of the server, and the token endpoint.

`AuthenticationMiddleware` sets ``scope["state"]["identity"]``. There are no cookies. A browser does
store the login of the pages; `LimitsMiddleware` checks ``Origin``, so that pages of other sites
cannot use that login to write.

``/token`` implements docker's token authentication: a 401 response names it as the realm, a client
requests it with Basic or without credentials, and then repeats its request with the session token,
limited to the requested scopes, as its bearer token.
"""

import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from anyio import to_thread
from sqlalchemy import Connection
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertctl.errors import (
    DiskFullError,
    ExpertError,
    ForbiddenError,
    NotFoundError,
    RateLimitError,
    StoreError,
    UnauthenticatedError,
)
from expertctl.http.limits import RateLimiter
from registry_server.access import accounts, rights
from registry_server.access.accounts import SESSION_SECONDS, SessionKey, parse_requested_scopes
from registry_server.access.credentials import (
    FailedLoginLimiter,
    IdentityCache,
    RefusalLog,
    get_rate_limit_key,
    is_anonymous,
    is_refused_write,
    parse_networks,
    read_secret,
    resolve_client_address,
)
from registry_server.access.rights import Identity, TokenScope
from registry_server.errors import error_response
from registry_server.registry import Registry


def get_identity(request: HTTPConnection) -> Identity:
    """Return the identity that made a request."""
    identity = request.scope["state"]["identity"]
    assert isinstance(identity, Identity)
    return identity


class AuthenticationMiddleware:
    """Identifies the caller, or refuses: 401 for an invalid secret, 429 for too many requests."""

    def __init__(self, app: ASGIApp, registry: Registry) -> None:
        """Start with all rate limits unused."""
        limits = registry.settings.limits
        self._app = app
        self._registry = registry
        self._proxies = parse_networks(registry.settings.trusted_proxies)
        sessions = SessionKey.derive(registry.index_key)
        self._identity_cache = IdentityCache(registry.database, sessions)
        self._requests = RateLimiter(limits.requests_per_minute, time.monotonic)
        self._failures = FailedLoginLimiter.create(limits.failures_per_minute, time.monotonic)
        self._refusals = RefusalLog(registry.database, time.monotonic)
        self._use_writes = RateLimiter(1, time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            identity = self._check_request(scope)
        except ExpertError as error:
            await error_response(error, scope, self._registry.settings)(scope, receive, send)
            if isinstance(error, UnauthenticatedError):
                await self._record_failed_login(scope)
            return
        scope["state"] = {**scope.get("state", {}), "identity": identity}
        status = 0

        async def send_and_record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        await self._app(scope, receive, send_and_record_status)
        await self._record_use(scope, identity, status)

    async def _record_use(self, scope: Scope, identity: Identity, status: int) -> None:
        if is_refused_write(scope.get("method", ""), status):
            method, path = scope["method"], scope["path"]
            note = partial(
                self._refusals.record_refused_change,
                identity,
                method=method,
                path=path,
                status=status,
            )
            await to_thread.run_sync(note)
        if identity.token_id and not self._use_writes.take(identity.token_id):
            await to_thread.run_sync(self._mark_token_used, identity.token_id)

    async def _record_failed_login(self, scope: Scope) -> None:
        address, secret = (
            resolve_client_address(scope, self._proxies),
            read_secret(Headers(scope=scope)),
        )
        await to_thread.run_sync(self._refusals.record_failed_login, address, secret)

    def _check_request(self, scope: Scope) -> Identity:
        """Identify the caller; a short database read, cheaper here than a thread switch."""
        address = resolve_client_address(scope, self._proxies)
        key = get_rate_limit_key(address)
        identity = self._identify(Headers(scope=scope), address, key)
        if seconds := self._requests.take(identity.token_id or key):
            raise RateLimitError("too many requests", retry_after=seconds)
        return identity

    def _identify(self, headers: Headers, address: str, key: str) -> Identity:
        if is_anonymous(headers):
            return Identity(address=address)
        secret = read_secret(headers)
        identity = self._identity_cache.find(secret) if secret else None
        if identity is not None:
            return replace(identity, address=address)
        self._limit_failed_logins(secret, key)
        raise UnauthenticatedError(
            "the token is wrong, expired or revoked",
            hint="log in again with `expertctl login`, or set another EXPERT_TOKEN",
        )

    def _limit_failed_logins(self, secret: str | None, key: str) -> None:
        """Limit failed logins; a secret that was valid once does not count as a guess."""
        if seconds := self._failures.wait(key, secret):
            raise RateLimitError("too many failed logins", retry_after=seconds)
        if seconds := self._requests.take(f"{key} failed"):
            raise RateLimitError("too many requests", retry_after=seconds)
        if not secret or not self._identity_cache.was_issued_here(secret):
            self._failures.count(key, secret)

    def _mark_token_used(self, token_id: str) -> None:
        """Record that a token was used, for listings; a full disk must not refuse readers."""
        with (
            suppress(StoreError, DiskFullError),
            self._registry.database.write_relaxed() as connection,
        ):
            accounts.mark_used(connection, token_id)


def make_token_routes(registry: Registry) -> list[BaseRoute]:
    """Return the route of the token endpoint."""
    key = SessionKey.derive(registry.index_key)

    async def token(request: Request) -> Response:
        identity = get_identity(request)
        asked = parse_requested_scopes(request.query_params.getlist("scope"))
        granted = await to_thread.run_sync(_grant_scopes, registry, identity, asked)
        return _token_response(key.issue(identity, granted))

    return [Route("/token", token, methods=["GET"])]


def _grant_scopes(
    registry: Registry, identity: Identity, requested: list[TokenScope]
) -> list[TokenScope]:
    """Return the permitted scopes; the protocol requires that others are omitted silently."""
    with registry.database.read() as connection:
        return [scope for scope in requested if _is_granted(connection, identity, scope)]


def _is_granted(connection: Connection, identity: Identity, scope: TokenScope) -> bool:
    assert scope.namespace is not None
    try:
        rights.authorise(connection, identity, scope.action, scope.namespace, scope.package)
    except (UnauthenticatedError, ForbiddenError, NotFoundError):
        return False
    return True


def _token_response(secret: str) -> Response:
    now = datetime.now(UTC).replace(microsecond=0, tzinfo=None).isoformat()
    body = {
        "token": secret,
        "access_token": secret,
        "expires_in": SESSION_SECONDS,
        "issued_at": f"{now}Z",
    }
    return JSONResponse(body, headers={"Cache-Control": "no-store"})
