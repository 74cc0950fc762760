"""Who asks, and how often they may: looked at before any other part of the server.

Sets ``scope["state"]["identity"]``. There are no cookies. A browser does remember the login of the
pages; that other sites cannot use it to write is up to `RequestLimits`, which looks at ``Origin``.
"""

import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

from anyio import to_thread
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertctl.errors import (
    DiskFullError,
    ExpertError,
    RateLimitError,
    StoreError,
    UnauthenticatedError,
)
from expertctl.http.rates import Rates
from registry_server.access import tokens
from registry_server.access.address import client_address, limit_key, networks
from registry_server.access.authorization import names_nobody, secret_of
from registry_server.access.identity import Identity
from registry_server.access.known import KnownSecrets
from registry_server.access.login_failures import LoginFailures
from registry_server.access.refusals import Refusals, is_refused_change
from registry_server.access.sessions import SessionKey
from registry_server.errors import error_response
from registry_server.registry import Registry


def identity_of(request: HTTPConnection) -> Identity:
    """Return who asks."""
    identity = request.scope["state"]["identity"]
    assert isinstance(identity, Identity)
    return identity


class _Answer:
    """Passes an answer on and remembers its status, 0 while there is none."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


class Authentication:
    """Names who asks, or refuses: 401 for an invalid secret, 429 for too many requests."""

    def __init__(self, app: ASGIApp, registry: Registry) -> None:
        """Begin with full buckets."""
        limits = registry.settings.limits
        self._app = app
        self._registry = registry
        self._proxies = networks(registry.settings.trusted_proxies)
        sessions = SessionKey.derive(registry.index_key)
        self._known = KnownSecrets(registry.database, sessions)
        self._requests = Rates(limits.requests_per_minute, time.monotonic)
        self._failures = LoginFailures.limited(limits.failures_per_minute, time.monotonic)
        self._refusals = Refusals(registry.database, time.monotonic)
        self._touches = Rates(1, time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            identity = self._admit(scope)
        except ExpertError as error:
            await error_response(error, scope, self._registry.settings)(scope, receive, send)
            if isinstance(error, UnauthenticatedError):
                await self._note_login(scope)
            return
        scope["state"] = {**scope.get("state", {}), "identity": identity}
        answer = _Answer(send)
        await self._app(scope, receive, answer)
        await self._note_use(scope, identity, answer.status)

    async def _note_use(self, scope: Scope, identity: Identity, status: int) -> None:
        if is_refused_change(scope.get("method", ""), status):
            method, path = scope["method"], scope["path"]
            note = partial(self._refusals.change, identity, method=method, path=path, status=status)
            await to_thread.run_sync(note)
        if identity.token_id and not self._touches.take(identity.token_id):
            await to_thread.run_sync(self._touch, identity.token_id)

    async def _note_login(self, scope: Scope) -> None:
        address, secret = client_address(scope, self._proxies), secret_of(Headers(scope=scope))
        await to_thread.run_sync(self._refusals.login, address, secret)

    def _admit(self, scope: Scope) -> Identity:
        """A short read of the database, cheaper here than handing it to a thread."""
        address = client_address(scope, self._proxies)
        key = limit_key(address)
        identity = self._identify(Headers(scope=scope), address, key)
        if seconds := self._requests.take(identity.token_id or key):
            raise RateLimitError("too many requests", retry_after=seconds)
        return identity

    def _identify(self, headers: Headers, address: str, key: str) -> Identity:
        if names_nobody(headers):
            return Identity(address=address)
        secret = secret_of(headers)
        identity = self._known.find(secret) if secret else None
        if identity is not None:
            return replace(identity, address=address)
        self._limit_failures(secret, key)
        raise UnauthenticatedError(
            "the token is wrong, expired or revoked",
            hint="log in again with `expertctl login`, or set EXPERT_TOKEN anew",
        )

    def _limit_failures(self, secret: str | None, key: str) -> None:
        """Refuse to answer too many wrong secrets; one that was valid once is no guess."""
        if seconds := self._failures.wait(key, secret):
            raise RateLimitError("too many failed logins", retry_after=seconds)
        if seconds := self._requests.take(f"{key} failed"):
            raise RateLimitError("too many requests", retry_after=seconds)
        if not secret or not self._known.has_ended(secret):
            self._failures.count(key, secret)

    def _touch(self, token_id: str) -> None:
        """Remember the use, for people to see; a full disk must not turn readers away."""
        with suppress(StoreError, DiskFullError), self._registry.database.jot() as connection:
            tokens.touch(connection, token_id)
