"""Limits on requests: rates, disconnects, host and origin, headers, bodies.

`RateLimiter` has one token bucket a key, in the memory of one process, and a bounded number of
them; the least recently used is dropped first. A dropped bucket counts as full, so a flood of
addresses can refill buckets, but never takes more memory than the bound.

`run_until_disconnect` cancels work as soon as its client disconnects.

`LimitsMiddleware` checks every request before anything else does:

- ``Host`` must be a name of this server, so that pages of other sites cannot reach it by a name of
  their own (DNS rebinding). Their ``Origin`` is refused, so that they can use neither a login that
  the browser stores nor the access of this machine.
- Headers are bounded. A body has no ``Content-Encoding`` and no more bytes than its route accepts.
  Two pieces are at most `STALL_SECONDS` apart, and after that time the body must have arrived at
  `MIN_BYTES_PER_SECOND` on average. If a request is answered before its body has arrived, a short
  rest is read first: closing the connection at once would cut the client off from the answer.
- If a server keeps bodies until it has answered, the total size of large ones is bounded. Small
  ones do not count, so a client that sends many large or incomplete ones does not block others.
- A path must be unambiguous: encoded slashes, empty or dot segments, and control characters are
  refused, so that a proxy in front and the routes behind interpret it equally.
"""

import asyncio
import ipaddress
import math
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertctl.errors import (
    ExpertError,
    ForbiddenError,
    MediaTypeError,
    MisdirectedError,
    RateLimitError,
    SlowBodyError,
    TooLargeError,
    UsageError,
)
from expertctl.http.operation import RETRY_SECONDS

MAX_KEYS = 100_000
MINUTE = 60.0


@dataclass(slots=True)
class RateLimiter:
    """Buckets of ``per_minute`` tokens that refill evenly; ``clock`` returns seconds."""

    per_minute: int
    clock: Callable[[], float]
    max_keys: int = MAX_KEYS
    _buckets: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)

    def take(self, key: str) -> int:
        """Take a token from the bucket of ``key``; return 0, or the seconds until there is one."""
        now = self.clock()
        level = self._compute_level(key, now)
        if level < 1:
            return self._compute_wait(level)
        self._buckets[key] = (level - 1, now)
        self._buckets.move_to_end(key)
        while len(self._buckets) > self.max_keys:
            self._buckets.popitem(last=False)
        return 0

    def spend(self, key: str, amount: int) -> None:
        """Take ``amount`` tokens from the bucket of ``key``; it may become negative."""
        now = self.clock()
        self._buckets[key] = (self._compute_level(key, now) - amount, now)
        self._buckets.move_to_end(key)
        while len(self._buckets) > self.max_keys:
            self._buckets.popitem(last=False)

    def get_wait(self, key: str) -> int:
        """Return the seconds until a token is available, 0 if there is one; takes nothing."""
        level = self._compute_level(key, self.clock())
        return 0 if level >= 1 else self._compute_wait(level)

    def get_status(self, key: str) -> tuple[int, float]:
        """Return the tokens that can be taken now, and the seconds until the bucket is full."""
        level = self._compute_level(key, self.clock())
        lacking = self.per_minute - level
        seconds = lacking * MINUTE / self.per_minute if self.per_minute else MINUTE
        return max(0, math.floor(level)), seconds

    def __len__(self) -> int:
        """Return the number of buckets in memory."""
        return len(self._buckets)

    def _compute_level(self, key: str, now: float) -> float:
        level, then = self._buckets.get(key, (float(self.per_minute), now))
        return min(float(self.per_minute), level + (now - then) * self.per_minute / MINUTE)

    def _compute_wait(self, level: float) -> int:
        if self.per_minute < 1:
            return int(MINUTE)
        return max(1, math.ceil((1 - level) * MINUTE / self.per_minute))


_Result = TypeVar("_Result")


async def run_until_disconnect(receive: Receive, work: Awaitable[_Result]) -> _Result:
    """Await ``work`` while the client is connected; the request body must have been read.

    Raises:
        ClientDisconnect: when it disconnected first; ``work`` was cancelled and has ended.
    """
    working, leaving = (
        asyncio.ensure_future(work),
        asyncio.ensure_future(wait_for_disconnect(receive)),
    )
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


MAX_HEADER_BYTES = 32 << 10
MAX_HEADERS = 100
MAX_PATH = 4096
STALL_SECONDS = 30.0
MIN_BYTES_PER_SECOND = 1024
"""Minimum average rate of a body."""
SMALL_BODY = 64 << 10
DISCARDED_BYTES, DISCARDING_SECONDS = 8 << 20, 3.0
"""How much of a body is read, and for how long, after the request has been answered without it."""
READ_METHODS = frozenset({"GET", "HEAD"})
_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}
_AMBIGUOUS_PATH = re.compile(rb"//|%2f|%5c|\\|;|[\x00-\x20\x7f]|%[01][0-9a-f]|%7f", re.IGNORECASE)
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]{2,45})\]|([A-Za-z0-9.-]{1,253}))(?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class RequestRefusal:
    """Why a request is refused, and the status of the response."""

    status: int
    error: ExpertError


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPolicy:
    """Which requests a server accepts, and how it refuses others."""

    names: frozenset[str]
    """Valid names in ``Host``, in lower case; see `build_host_names`."""
    accepts_addresses: bool
    """Whether ``Host`` may also be any IP address."""
    origins: frozenset[str]
    """Origins whose pages may use all methods."""
    open_methods: frozenset[str] = READ_METHODS
    """Methods that pages of other origins may use."""
    body_limit: Callable[[str], int | None]
    """Returns the maximum bytes of a body, by path; None if the route has its own limit."""
    media_type: str | None = None
    """The media type of every body; None: each route checks it."""
    build_response: Callable[[RequestRefusal, Scope], Response]
    server_label: str
    """The server's name in messages: ``this registry``."""
    host_hint: str = ""
    """The hint for a wrong ``Host``."""
    origin_hint: str = ""
    """The hint for a page whose origin is not allowed."""
    stall_seconds: float = STALL_SECONDS
    large_bodies: int | None = None
    """Maximum total bytes above `SMALL_BODY` of all bodies in memory; None: unlimited."""
    name_prefix: bytes | None = None
    """The path prefix of names that clients may send with escaped slashes."""


def build_host_names(host: str, url: str) -> frozenset[str]:
    """Return the names of a server that listens on ``host`` and is used at ``url``."""
    own = urlsplit(url).hostname or host
    return frozenset({*_LOOPBACK_NAMES, host.lower(), own.lower()})


class LimitsMiddleware:
    """ASGI middleware that refuses requests beyond its policy."""

    def __init__(self, app: ASGIApp, policy: RequestPolicy) -> None:
        """Protect ``app``."""
        self.app = app
        self.policy = policy
        self._body_budget = _BodyBudget(policy.large_bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "websocket":
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if refused := self._check_request(scope, headers):
            await self._send_refusal(refused, scope, receive, send)
            return
        limit = self.policy.body_limit(scope["path"])
        body = _LimitedBody(
            receive, limit, seconds=self.policy.stall_seconds, budget=self._body_budget
        )
        try:
            await self._run_limited(body, scope, send)
        finally:
            self._body_budget.release(body.reserved)

    async def _run_limited(self, body: "_LimitedBody", scope: Scope, send: Send) -> None:
        """Run the request; if its body is refused, send the refusal instead of the response."""
        started = False
        sent_body = _has_body(Headers(scope=scope))

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start" and sent_body and not body.is_complete:
                await body.discard_rest()
                if not body.is_complete:
                    MutableHeaders(scope=message)["Connection"] = "close"
            if body.refusal is None or started:
                started = True
                await send(message)

        try:
            await self.app(scope, body.receive, watched)
        except Exception:
            if body.refusal is None or started:
                raise
        if body.refusal is not None and not started:
            await self._send_refusal(body.refusal, scope, body.receive, send)

    def _check_request(self, scope: Scope, headers: Headers) -> RequestRefusal | None:
        return (
            _check_headers(scope)
            or _check_path(scope, self.policy.name_prefix)
            or self._check_origin(scope, headers)
            or self._check_body_headers(scope, headers)
        )

    def _check_origin(self, scope: Scope, headers: Headers) -> RequestRefusal | None:
        """Refuse a request for another server, or from a page of another site."""
        bounds = self.policy
        if not self._is_own_host(headers.getlist("host")):
            error = MisdirectedError(
                f"{bounds.server_label} has another name", hint=bounds.host_hint
            )
            return RequestRefusal(421, error)
        origins = headers.getlist("origin")  # only browsers send it
        if scope["method"] not in bounds.open_methods and not bounds.origins.issuperset(origins):
            verb = "write" if bounds.open_methods else "ask"
            fact = f"a page of another site may not {verb} here"
            return RequestRefusal(403, ForbiddenError(fact, hint=bounds.origin_hint))
        return None

    def _check_body_headers(self, scope: Scope, headers: Headers) -> RequestRefusal | None:
        """Refuse a body that is compressed, of another type, or too large."""
        if headers.get("content-encoding", "identity").lower() != "identity":
            return RequestRefusal(
                415, MediaTypeError("the body of a request must not be compressed")
            )
        limit = self.policy.body_limit(scope["path"])
        length = headers.get("content-length", "0")
        if limit is not None and (not length.isdecimal() or int(length[:20]) > limit):
            return RequestRefusal(413, _build_size_error(limit))
        wanted = self.policy.media_type
        if wanted and _has_body(headers):
            given = headers.get("content-type", "").partition(";")[0].strip().lower()
            if given != wanted:
                return RequestRefusal(
                    415, MediaTypeError(f"the body of a request must be {wanted}")
                )
        return None

    def _is_own_host(self, hosts: list[str]) -> bool:
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            return False
        name = (match.group(1) or match.group(2)).lower().rstrip(".")
        return name in self.policy.names or (self.policy.accepts_addresses and _is_address(name))

    async def _send_refusal(
        self, refusal: RequestRefusal, scope: Scope, receive: Receive, send: Send
    ) -> None:
        response = self.policy.build_response(refusal, scope)
        response.headers["Connection"] = "close"
        await response(scope, receive, send)


class _BodyBudget:
    """Bounds the total bytes of large bodies."""

    def __init__(self, limit: int | None) -> None:
        self._limit, self._taken = limit, 0

    def reserve(self, size: int) -> bool:
        """Reserve ``size`` bytes, if they are available."""
        if self._limit is not None and self._taken + size > self._limit:
            return False
        self._taken += size
        return True

    def release(self, size: int) -> None:
        """Return reserved bytes."""
        self._taken -= size


class _LimitedBody:
    """The body of a request, counted and timed."""

    def __init__(
        self, receive: Receive, limit: int | None, *, seconds: float, budget: _BodyBudget
    ) -> None:
        self.refusal: RequestRefusal | None = None
        self.is_complete = False
        """Whether all of it arrived; otherwise the connection cannot be used again."""
        self.reserved = 0
        """The bytes reserved for it as a large body."""
        self._source = receive
        self._limit = limit
        self._seconds = seconds
        self._budget = budget
        self._size = 0
        self._waited = 0.0

    async def receive(self) -> Message:
        """Return the next message; a disconnect once the body is refused."""
        if self.refusal is not None:
            return {"type": "http.disconnect"}
        if self.is_complete:
            return await self._source()
        message: Message | None = None
        began = time.monotonic()
        with anyio.move_on_after(self._seconds):
            message = await self._source()
        self._waited += time.monotonic() - began
        if message is None:
            fact = f"no byte of the body arrived for {self._seconds:g} seconds"
            return self._refuse_slow(408, fact)
        return self._count(message)

    async def discard_rest(self) -> None:
        """Read a short rest, so that the client is not cut off before it reads the answer."""
        left = DISCARDED_BYTES
        with anyio.move_on_after(DISCARDING_SECONDS):
            while left > 0 and self.refusal is None and not self.is_complete:
                message = await self._source()
                left -= len(message.get("body") or b"")
                self.is_complete = not message.get("more_body", False)

    def _count(self, message: Message) -> Message:
        self._size += len(message.get("body") or b"")
        self.is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        if self._limit is not None and self._size > self._limit:
            return self._set_refusal(RequestRefusal(413, _build_size_error(self._limit)))
        if not self._reserve_room():
            full = RateLimitError("too many large bodies at once", retry_after=RETRY_SECONDS)
            return self._set_refusal(RequestRefusal(429, full))
        if not self.is_complete and self._is_slow():
            return self._refuse_slow(
                408, f"the body is slower than {MIN_BYTES_PER_SECOND} bytes a second"
            )
        return message

    def _reserve_room(self) -> bool:
        """Reserve the bytes above `SMALL_BODY`, unless the route has its own limit and streams."""
        large = self._size - SMALL_BODY if self._limit is not None else 0
        more = max(0, large - self.reserved)
        has_room = self._budget.reserve(more)
        self.reserved += more if has_room else 0
        return has_room

    def _is_slow(self) -> bool:
        return self._size < (self._waited - self._seconds) * MIN_BYTES_PER_SECOND

    def _refuse_slow(self, status: int, fact: str) -> Message:
        return self._set_refusal(RequestRefusal(status, SlowBodyError(fact)))

    def _set_refusal(self, refusal: RequestRefusal) -> Message:
        self.refusal = refusal
        return {"type": "http.disconnect"}


def _check_headers(scope: Scope) -> RequestRefusal | None:
    sizes = [len(name) + len(value) for name, value in scope["headers"]]
    if sum(sizes) > MAX_HEADER_BYTES or len(sizes) > MAX_HEADERS:
        return RequestRefusal(431, TooLargeError("the headers of the request are too large"))
    return None


def _check_path(scope: Scope, name_prefix: bytes | None) -> RequestRefusal | None:
    path = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogateescape")
    if len(path) > MAX_PATH:
        return RequestRefusal(414, TooLargeError("the path of the request is too long"))
    if name_prefix is not None and path.startswith(name_prefix):
        path = path.replace(b"%2f", b"/").replace(b"%2F", b"/")
    if not _is_unambiguous(path):
        return RequestRefusal(400, UsageError("the path of the request is ambiguous"))
    return None


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _build_size_error(limit: int) -> TooLargeError:
    return TooLargeError(f"the body of the request is larger than {limit} bytes")


def _is_unambiguous(path: bytes) -> bool:
    """Return whether a raw path means the same to every reader."""
    if not path.startswith(b"/") or _AMBIGUOUS_PATH.search(path):
        return False
    segments = path.lower().replace(b"%2e", b".").split(b"/")
    return not {b".", b".."} & set(segments)


def _is_address(name: str) -> bool:
    """Return whether this is an IP address; unlike a name, others cannot point one here."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
