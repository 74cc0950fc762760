"""Authentication and rate limits, before any other part of the server.

`AuthenticationMiddleware` sets ``scope["state"]["identity"]``. Programs send a secret with every
request; only the web pages accept a cookie instead, that of `browser_session`.

Client address: ``X-Forwarded-For`` counts only if the peer is a trusted proxy. It is read from its
end, where proxies append, to the first address that is not a trusted proxy; the client may have
written everything before that.

Secrets: only the ``Authorization`` header may contain a token. Bearer holds the token; Basic holds
it as the password, for clients that support nothing else, and its user name is ignored. Tokens in
the URL or in cookies are ignored. With such a header, the session cookie is ignored too.

`IdentityCache` keeps the identities of secrets until the next commit. Most requests come between
two writes, so the last result still holds. A commit by any worker empties the cache, so a revoked
token stops working at once. Identities carry their expiry. The keys of the cache are hashes.

Failed logins are limited without delaying valid ones. A secret is looked up before any limit
applies, so a valid token works whatever else comes from its address. A look-up takes one hash and
one indexed read, and no read for a secret that this registry cannot have issued. Limits apply to
each secret prefix at an address, so that a machine with an old token does not lock out others, and
to each address in total.

Refusals (failed logins, and changes that were not allowed or not possible) are written to the audit
log. They cost the client nothing, so the rows are bounded: one a minute for the same event from the
same source, and `MAX_REFUSALS_PER_MINUTE` of each kind, so that failed logins, which anybody can
cause, cannot hide refused changes. Omitted rows are counted; the next row states their number. Rows
are written after the response, without waiting for the disk.
"""

import base64
import binascii
import ipaddress
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from anyio import to_thread
from sqlalchemy import Connection
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertctl.errors import (
    DiskFullError,
    ExpertError,
    RateLimitError,
    StoreError,
    UnauthenticatedError,
)
from expertctl.http.limits import RateLimiter
from registry_server.access import accounts, rights
from registry_server.access.accounts import SessionKey
from registry_server.access.browser_session import (
    BrowserSession,
    find_session,
    read_session_cookie,
)
from registry_server.access.rights import Identity
from registry_server.database.connection import Database
from registry_server.errors import SESSION_PREFIX, is_program_path
from registry_server.registry import Registry

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

UNKNOWN_ADDRESS = "unknown"
MAX_HOPS = 20


def resolve_client_address(scope: Scope, proxies: Sequence[Network]) -> str:
    """Return the client's address; ``unknown`` if the server does not provide one."""
    client = scope.get("client")
    peer = _parse_address(client[0]) if client else None
    if peer is None:
        return UNKNOWN_ADDRESS
    if not _is_trusted(peer, proxies):
        return str(peer)
    hops = ",".join(Headers(scope=scope).getlist("x-forwarded-for")).split(",")[-MAX_HOPS:]
    for hop in reversed(hops):
        found = _parse_address(hop.strip())
        if found is None:
            break
        peer = found
        if not _is_trusted(peer, proxies):
            break
    return str(peer)


def get_rate_limit_key(address: str) -> str:
    """Return the key of a rate limit: an IPv4 address, or the /64 network of an IPv6 address."""
    parsed = _parse_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address


def parse_networks(cidrs: Sequence[str]) -> tuple[Network, ...]:
    """Parse the networks of the settings."""
    return tuple(ipaddress.ip_network(text, strict=False) for text in cidrs)


def _is_trusted(address: Address, proxies: Sequence[Network]) -> bool:
    return any(address in network for network in proxies)


def _parse_address(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


MAX_AUTHORIZATION_HEADER = 16_000
_EMPTY_BASIC = "basic og=="


def is_anonymous(headers: Headers) -> bool:
    """Return whether a request has no credentials: no header, or Basic with empty name and secret.

    skopeo sends the latter if it has no credentials and the server offers Basic.
    """
    values = headers.getlist("authorization")
    return not values or (len(values) == 1 and values[0].lower() == _EMPTY_BASIC)


def read_secret(headers: Headers) -> str | None:
    """Return the secret of a request; None if the header is neither Bearer nor Basic."""
    values = headers.getlist("authorization")
    if len(values) != 1 or len(values[0]) > MAX_AUTHORIZATION_HEADER or not values[0].isascii():
        return None
    scheme, _, value = values[0].partition(" ")
    return _parse_secret(scheme.lower(), value.strip(" "))


def _parse_secret(scheme: str, value: str) -> str | None:
    if scheme == "bearer":
        return value
    if scheme != "basic":
        return None
    try:
        pair = base64.b64decode(value, validate=True).decode("ascii")
    except (ValueError, binascii.Error):
        return None
    return pair.partition(":")[2]


MAX_CACHED_IDENTITIES = 10_000
_Found = TypeVar("_Found", Identity, BrowserSession)


@dataclass(slots=True)
class IdentityCache:
    """Caches identities until the database changes."""

    database: Database
    sessions: SessionKey
    _version: int = -1
    _identities: dict[str, Identity] = field(default_factory=dict)
    _browsers: dict[str, BrowserSession] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, secret: str) -> Identity | None:
        """Return the identity that a secret authenticates now; None if there is none.

        Raises:
            StoreError: when the database cannot be read; no secret is accepted then.
        """
        if not self._may_be_issued_here(secret):
            return None
        found = self._find_or_load(self._identities, secret, self._load_identity)
        ended = found is not None and found.expires is not None and found.expires <= time.time()
        return None if ended else found

    def find_session(self, secret: str) -> Identity | None:
        """Return the identity of a session of the pages; None unless the session is valid.

        Raises:
            StoreError: when the database cannot be read.
        """
        found = self._find_or_load(self._browsers, secret, find_session)
        return None if found is None or found.expires <= time.time() else found.identity

    def was_issued_here(self, secret: str) -> bool:
        """Return whether this registry issued a secret that is not valid now.

        Raises:
            StoreError: when the database cannot be read.
        """
        if not self._may_be_issued_here(secret):
            return False
        if secret.startswith(SESSION_PREFIX):
            return True
        with self.database.read() as connection:
            return accounts.was_minted(connection, secret)

    def _may_be_issued_here(self, secret: str) -> bool:
        """Return, without the database, whether this registry may have issued a secret."""
        is_session = secret.startswith(SESSION_PREFIX)
        return (
            self.sessions.is_authentic(secret) if is_session else accounts.looks_like_token(secret)
        )

    def _find_or_load(
        self,
        cached: dict[str, _Found],
        secret: str,
        load: Callable[[Connection, str], _Found | None],
    ) -> _Found | None:
        """Return what belongs to a secret; read without the lock, which the event loop takes."""
        hashed = accounts.hash_secret(secret)
        with self._lock:
            version = self._clear_after_commit()
            found = cached.get(hashed)
        if found is not None:
            return found
        with self.database.read() as connection:
            found = load(connection, secret)
        with self._lock:
            if found is not None and version == self._version:  # else it may be from before
                cached[hashed] = found
        return found

    def _clear_after_commit(self) -> int:
        version = self.database.version()
        kept = len(self._identities) + len(self._browsers)
        if version != self._version or kept >= MAX_CACHED_IDENTITIES:
            self._identities.clear()
            self._browsers.clear()
            self._version = version
        return version

    def _load_identity(self, connection: Connection, secret: str) -> Identity | None:
        if secret.startswith(SESSION_PREFIX):
            return self.sessions.find(connection, secret)
        return accounts.find_identity(connection, secret)


ADDRESS_FACTOR = 5
"""Failures that an address may have in total, as a multiple of those of one prefix."""
PRINTABLE_PREFIX_LENGTH = 12
"""Length of the prefix that distinguishes secrets; a token has 35 more characters."""


@dataclass(frozen=True, slots=True)
class FailedLoginLimiter:
    """Limits failed logins by address and secret prefix, and by address."""

    _per_secret_prefix: RateLimiter
    _per_address: RateLimiter

    @classmethod
    def create(cls, per_minute: int, clock: Callable[[], float]) -> "FailedLoginLimiter":
        """Allow ``per_minute`` failures of one prefix at one address."""
        return cls(RateLimiter(per_minute, clock), RateLimiter(ADDRESS_FACTOR * per_minute, clock))

    def wait(self, address: str, secret: str | None) -> int:
        """Return the seconds until another failure is allowed; 0 if it is allowed now."""
        alike = self._per_secret_prefix.get_wait(_failure_key(address, secret))
        return max(alike, self._per_address.get_wait(address))

    def count(self, address: str, secret: str | None) -> None:
        """Count a failure."""
        self._per_secret_prefix.take(_failure_key(address, secret))
        self._per_address.take(address)


def extract_printable_prefix(secret: str | None) -> str:
    """Return the part of a wrong secret that may be logged: empty unless it has our prefix."""
    known = secret is not None and secret.startswith((accounts.TOKEN_PREFIX, SESSION_PREFIX))
    return secret[:PRINTABLE_PREFIX_LENGTH] if secret is not None and known else ""


def _failure_key(address: str, secret: str | None) -> str:
    return f"{address} {extract_printable_prefix(secret)}"


LOGIN_REFUSED = "login.refused"
CHANGE_REFUSED = "change.refused"
MAX_REFUSALS_PER_MINUTE = 20
"""Maximum rows of each kind, `LOGIN` and `CHANGE_REFUSED`, that a process writes."""
_WRITE_METHODS = {"PUT", "POST", "PATCH", "DELETE"}
_NEGOTIATION_STATUSES = {401, 408, 416, 421, 429}
"""Statuses of normal exchanges: a challenge, a wrong offset, a limit, an incomplete body."""
_DISK_FULL = 507


class RefusalLog:
    """Writes refusals to the audit log; its methods block, so async code uses threads."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        """Start without recorded refusals."""
        self._database = database
        self._per_event = RateLimiter(1, clock)
        self._per_action = RateLimiter(MAX_REFUSALS_PER_MINUTE, clock)
        self._suppressed = 0
        self._lock = threading.Lock()

    def record_failed_login(self, address: str, secret: str | None) -> None:
        """Record that a secret was refused; only its prefix is written."""
        target = extract_printable_prefix(secret) or "not a token of this registry"
        self._write(Identity(address=address), LOGIN_REFUSED, target, "")

    def record_refused_change(
        self, identity: Identity, *, method: str, path: str, status: int
    ) -> None:
        """Record that an authenticated user could not make a change."""
        if is_refused_write(method, status) and identity.token_id is not None:
            self._write(identity, CHANGE_REFUSED, path, f"{method}: {status}")

    def _write(self, identity: Identity, action: str, target: str, detail: str) -> None:
        who = identity.token_id or identity.address
        with self._lock:
            alike = f"{who} {action} {target} {detail}"
            if self._per_action.get_wait(action) or self._per_event.take(
                alike
            ):  # bounds the number of keys
                self._suppressed += 1
                return
            self._per_action.take(action)
            unwritten, self._suppressed = self._suppressed, 0
        more = f"{unwritten} earlier refusals were not recorded" if unwritten else ""
        text = "; ".join(part for part in (detail, more) if part)
        with suppress(StoreError, DiskFullError), self._database.write_relaxed() as connection:
            rights.write_audit_row(connection, identity, action, target, text)


def is_refused_write(method: str, status: int) -> bool:
    """Return whether a response refuses a change."""
    refused = 400 <= status < 500 and status not in _NEGOTIATION_STATUSES
    return method in _WRITE_METHODS and (refused or status == _DISK_FULL)


def get_identity(request: HTTPConnection) -> Identity:
    """Return the identity that made a request."""
    identity = request.scope["state"]["identity"]
    assert isinstance(identity, Identity)
    return identity


class Authenticator:
    """Identifies callers, and limits and records failed logins, also those of the login page."""

    def __init__(self, registry: Registry) -> None:
        """Start with all rate limits unused."""
        limits = registry.settings.limits
        self._cache = IdentityCache(registry.database, SessionKey.derive(registry.index_key))
        self._requests = RateLimiter(limits.requests_per_minute, time.monotonic)
        self._failures = FailedLoginLimiter.create(limits.failures_per_minute, time.monotonic)
        self.refusals = RefusalLog(registry.database, time.monotonic)

    def identify(self, secret: str | None, address: str) -> Identity:
        """Return the identity that a secret authenticates.

        Raises:
            UnauthenticatedError: when it is wrong, expired or revoked.
            RateLimitError: when too many logins of this address failed.
        """
        identity = self._cache.find(secret) if secret else None
        if identity is not None:
            return replace(identity, address=address)
        self._limit_failed_logins(secret, get_rate_limit_key(address))
        raise UnauthenticatedError(
            "the token is wrong, expired or revoked",
            hint="log in again with `expertctl login`, or set another EXPERT_TOKEN",
        )

    def log_in(self, secret: str, address: str) -> Identity:
        """Identify the user of the login form, who needs a token; record a refusal.

        Raises:
            UnauthenticatedError: when it is not a valid token.
            RateLimitError: when too many logins of this address failed.
        """
        try:
            return self.identify(secret if accounts.looks_like_token(secret) else None, address)
        except UnauthenticatedError:
            self.refusals.record_failed_login(address, secret)
            raise

    def find_session(self, secret: str, address: str) -> Identity | None:
        """Return the identity of a session of the pages; None unless the session is valid."""
        identity = self._cache.find_session(secret)
        return None if identity is None else replace(identity, address=address)

    def limit_requests(self, identity: Identity) -> None:
        """Count a request.

        Raises:
            RateLimitError: when this token, or this address without one, sent too many.
        """
        key = identity.token_id or get_rate_limit_key(identity.address or UNKNOWN_ADDRESS)
        if seconds := self._requests.take(key):
            raise RateLimitError("too many requests", retry_after=seconds)

    def _limit_failed_logins(self, secret: str | None, key: str) -> None:
        """Limit failed logins; a secret that was valid once does not count as a guess."""
        if seconds := self._failures.wait(key, secret):
            raise RateLimitError("too many failed logins", retry_after=seconds)
        if seconds := self._requests.take(f"{key} failed"):
            raise RateLimitError("too many requests", retry_after=seconds)
        if not secret or not self._cache.was_issued_here(secret):
            self._failures.count(key, secret)


class AuthenticationMiddleware:
    """Identifies the caller, or refuses: 401 for an invalid secret, 429 for too many requests."""

    def __init__(
        self,
        app: ASGIApp,
        registry: Registry,
        build_response: Callable[[ExpertError, Scope], Response],
    ) -> None:
        """Start with all rate limits unused; ``build_response`` makes refusals."""
        self._app = app
        self._build_response = build_response
        self._registry = registry
        self._proxies = parse_networks(registry.settings.trusted_proxies)
        self._authenticator = Authenticator(registry)
        self._use_writes = RateLimiter(1, time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = {**scope.get("state", {}), "authenticator": self._authenticator, "session": None}
        scope["state"] = state
        try:
            identity = state["identity"] = self._check_request(scope)
        except ExpertError as error:
            await self._build_response(error, scope)(scope, receive, send)
            if isinstance(error, UnauthenticatedError):
                await self._record_failed_login(scope)
            return
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
            record = self._authenticator.refusals.record_refused_change
            request = {"method": scope["method"], "path": scope["path"]}
            await to_thread.run_sync(partial(record, identity, **request, status=status))
        if identity.token_id and not self._use_writes.take(identity.token_id):
            await to_thread.run_sync(self._mark_token_used, identity.token_id)

    async def _record_failed_login(self, scope: Scope) -> None:
        address = resolve_client_address(scope, self._proxies)
        secret = read_secret(Headers(scope=scope))
        record = self._authenticator.refusals.record_failed_login
        await to_thread.run_sync(record, address, secret)

    def _check_request(self, scope: Scope) -> Identity:
        """Identify the caller; a short database read, cheaper here than a thread switch."""
        address = resolve_client_address(scope, self._proxies)
        headers = Headers(scope=scope)
        if is_anonymous(headers):
            identity = self._find_browser(scope, address) or Identity(address=address)
        else:
            identity = self._authenticator.identify(read_secret(headers), address)
        self._authenticator.limit_requests(identity)
        return identity

    def _find_browser(self, scope: Scope, address: str) -> Identity | None:
        """Return the identity of the session cookie, which only pages accept."""
        if is_program_path(str(scope["path"])):
            return None
        secret = read_session_cookie(HTTPConnection(scope), self._registry.settings)
        identity = self._authenticator.find_session(secret, address) if secret else None
        if identity is not None:
            scope["state"]["session"] = secret
        return identity

    def _mark_token_used(self, token_id: str) -> None:
        """Record that a token was used, for listings; a full disk must not refuse readers."""
        with (
            suppress(StoreError, DiskFullError),
            self._registry.database.write_relaxed() as connection,
        ):
            accounts.mark_used(connection, token_id)
