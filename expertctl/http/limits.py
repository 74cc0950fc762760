"""What a request must be like before anything else looks at it.

- ``Host`` is a name of this server: a page elsewhere cannot reach it by a name of its own. Nor
  can it use the login that the browser remembers, or that the browser runs on this machine: its
  ``Origin`` is not ours.
- Headers are bounded, and a body comes as it is: no ``Content-Encoding``, no more bytes than its
  route takes, no longer pause than `STALL_SECONDS` between two pieces, and after as many seconds
  no slower than `LEAST_RATE` on the whole.
- Where a server keeps bodies until it has answered, large ones are bounded in sum. Small ones are
  not counted, so a client that sends many large ones, or halves of them, does not block the others.
- The path has one reading: encoded slashes, empty or dot segments, and control characters are
  refused, so that a proxy in front and the routes behind never mean different things.
"""

import ipaddress
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers, MutableHeaders
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

MAX_HEADER_BYTES = 32 << 10
MAX_HEADERS = 100
MAX_PATH = 4096
STALL_SECONDS = 30.0
LEAST_RATE = 1024
"""Bytes of a body in a second."""
SMALL_BODY = 64 << 10
RETRY_SECONDS = 5
"""When to come again where there is no room for a large body."""
READING = frozenset({"GET", "HEAD"})
_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}
_DOUBTFUL_RAW = re.compile(rb"//|%2f|%5c|\\|;|[\x00-\x20\x7f]|%[01][0-9a-f]|%7f", re.IGNORECASE)
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]{2,45})\]|([A-Za-z0-9.-]{1,253}))(?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not looked at, and the status that says so."""

    status: int
    error: ExpertError


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What requests one server takes, and how it refuses others."""

    names: frozenset[str]
    """What ``Host`` may be, in lower case; see `names_of`."""
    addresses: bool
    """Whether it may be any IP address, too."""
    origins: frozenset[str]
    """Whose pages may ask for all that there is."""
    open_methods: frozenset[str] = READING
    """What pages of others may ask for."""
    body_limit: Callable[[str], int | None]
    """The most bytes of a body, by the path; None where its route has a limit of its own."""
    media_type: str | None = None
    """What a body must be; None: each route says."""
    refuse: Callable[[Refusal, Scope], Response]
    whose: str
    """What messages call the server: ``this registry``."""
    host_hint: str = ""
    """How it gets another name."""
    origin_hint: str = ""
    """How a page of its own gets another address."""
    stall_seconds: float = STALL_SECONDS
    large_bodies: int | None = None
    """The most bytes of bodies above `SMALL_BODY`, of all requests together; None: any number."""
    named_below: bytes | None = None
    """The path below which one name is all that follows: clients may escape its slashes."""


def names_of(host: str, url: str) -> frozenset[str]:
    """Return what a server that listens on ``host`` is called, by those who use it at ``url``."""
    own = urlsplit(url).hostname or host
    return frozenset({*_LOOPBACK_NAMES, host.lower(), own.lower()})


class RequestLimits:
    """ASGI middleware that refuses what no client of ours sends."""

    def __init__(self, app: ASGIApp, bounds: Bounds) -> None:
        """Guard ``app``."""
        self.app = app
        self.bounds = bounds
        self._room = _Room(bounds.large_bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if refused := self._refused(scope, headers):
            await self._refuse(refused, scope, receive, send)
            return
        limit = self.bounds.body_limit(scope["path"])
        body = _Body(receive, limit, seconds=self.bounds.stall_seconds, room=self._room)
        try:
            await self._within(body, scope, send)
        finally:
            self._room.leave(body.counted)

    async def _within(self, body: "_Body", scope: Scope, send: Send) -> None:
        """Run the request; if its body is refused, answer with that refusal instead of the app."""
        started = False
        sent_body = _has_body(Headers(scope=scope))

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start" and sent_body and not body.whole:
                MutableHeaders(scope=message)["Connection"] = "close"
            if body.refused is None or started:
                started = True
                await send(message)

        try:
            await self.app(scope, body.receive, watched)
        except Exception:
            if body.refused is None or started:
                raise
        if body.refused is not None and not started:
            await self._refuse(body.refused, scope, body.receive, send)

    def _refused(self, scope: Scope, headers: Headers) -> Refusal | None:
        return (
            _oversized(scope)
            or _doubtful_path(scope, self.bounds.named_below)
            or self._foreign(scope, headers)
            or self._unreadable(scope, headers)
        )

    def _foreign(self, scope: Scope, headers: Headers) -> Refusal | None:
        """Refuse a request for another server, or from a page of another site."""
        bounds = self.bounds
        if not self._is_ours(headers.getlist("host")):
            error = MisdirectedError(f"{bounds.whose} has another name", hint=bounds.host_hint)
            return Refusal(421, error)
        origins = headers.getlist("origin")  # only browsers name the page that asks
        if scope["method"] not in bounds.open_methods and not bounds.origins.issuperset(origins):
            verb = "write" if bounds.open_methods else "ask"
            fact = f"a page of another site may not {verb} here"
            return Refusal(403, ForbiddenError(fact, hint=bounds.origin_hint))
        return None

    def _unreadable(self, scope: Scope, headers: Headers) -> Refusal | None:
        """Refuse a body that is compressed, of another kind, or too large."""
        if headers.get("content-encoding", "identity").lower() != "identity":
            return Refusal(415, MediaTypeError("the body of a request must not be compressed"))
        limit = self.bounds.body_limit(scope["path"])
        length = headers.get("content-length", "0")
        if limit is not None and (not length.isdecimal() or int(length[:20]) > limit):
            return Refusal(413, _too_large(limit))
        wanted = self.bounds.media_type
        if wanted and _has_body(headers):
            given = headers.get("content-type", "").partition(";")[0].strip().lower()
            if given != wanted:
                return Refusal(415, MediaTypeError(f"the body of a request must be {wanted}"))
        return None

    def _is_ours(self, hosts: list[str]) -> bool:
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if match is None:
            return False
        name = (match.group(1) or match.group(2)).lower().rstrip(".")
        return name in self.bounds.names or (self.bounds.addresses and _is_address(name))

    async def _refuse(self, refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        response = self.bounds.refuse(refusal, scope)
        response.headers["Connection"] = "close"
        await response(scope, receive, send)


class _Room:
    """What large bodies take together."""

    def __init__(self, most: int | None) -> None:
        self._most, self._taken = most, 0

    def enter(self, size: int) -> bool:
        """Take so much more, if that is there."""
        if self._most is not None and self._taken + size > self._most:
            return False
        self._taken += size
        return True

    def leave(self, size: int) -> None:
        """Give back what was taken."""
        self._taken -= size


class _Body:
    """The body of a request, counted and timed."""

    def __init__(self, receive: Receive, limit: int | None, *, seconds: float, room: _Room) -> None:
        self.refused: Refusal | None = None
        self.whole = False
        """Whether it came to its end; else the connection is of no use for another request."""
        self.counted = 0
        """How much of it counts as that of a large body."""
        self._source = receive
        self._limit = limit
        self._seconds = seconds
        self._room = room
        self._size = 0
        self._waited = 0.0

    async def receive(self) -> Message:
        """Return the next piece; a disconnect once the body is refused."""
        if self.refused is not None:
            return {"type": "http.disconnect"}
        if self.whole:
            return await self._source()
        message: Message | None = None
        began = time.monotonic()
        with anyio.move_on_after(self._seconds):
            message = await self._source()
        self._waited += time.monotonic() - began
        if message is None:
            return self._refuse(408, f"no byte of the body came for {self._seconds:g} seconds")
        return self._counted(message)

    def _counted(self, message: Message) -> Message:
        self._size += len(message.get("body") or b"")
        self.whole = message["type"] != "http.request" or not message.get("more_body", False)
        if self._limit is not None and self._size > self._limit:
            return self._give_up(Refusal(413, _too_large(self._limit)))
        if not self._has_room():
            full = RateLimitError("too many large bodies at once", retry_after=RETRY_SECONDS)
            return self._give_up(Refusal(429, full))
        if not self.whole and self._is_slow():
            return self._refuse(408, f"the body comes slower than {LEAST_RATE} bytes a second")
        return message

    def _has_room(self) -> bool:
        """Count what is kept: where routes have limits of their own, they read it as it comes."""
        large = self._size - SMALL_BODY if self._limit is not None else 0
        more = max(0, large - self.counted)
        has_room = self._room.enter(more)
        self.counted += more if has_room else 0
        return has_room

    def _is_slow(self) -> bool:
        return self._size < (self._waited - self._seconds) * LEAST_RATE

    def _refuse(self, status: int, fact: str) -> Message:
        return self._give_up(Refusal(status, SlowBodyError(fact)))

    def _give_up(self, refusal: Refusal) -> Message:
        self.refused = refusal
        return {"type": "http.disconnect"}


def _oversized(scope: Scope) -> Refusal | None:
    sizes = [len(name) + len(value) for name, value in scope["headers"]]
    if sum(sizes) > MAX_HEADER_BYTES or len(sizes) > MAX_HEADERS:
        return Refusal(431, TooLargeError("the headers of the request are too large"))
    return None


def _doubtful_path(scope: Scope, named_below: bytes | None) -> Refusal | None:
    path = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogateescape")
    if len(path) > MAX_PATH:
        return Refusal(414, TooLargeError("the path of the request is too long"))
    if named_below is not None and path.startswith(named_below):
        path = path.replace(b"%2f", b"/").replace(b"%2F", b"/")
    if not _is_plain(path):
        return Refusal(400, UsageError("the path of the request has more than one reading"))
    return None


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"the body of the request is larger than {limit} bytes")


def _is_plain(path: bytes) -> bool:
    """Tell whether a path, as it was sent, means the same to every reader."""
    if not path.startswith(b"/") or _DOUBTFUL_RAW.search(path):
        return False
    segments = path.lower().replace(b"%2e", b".").split(b"/")
    return not {b".", b".."} & set(segments)


def _is_address(name: str) -> bool:
    """Tell whether this is an IP address, which others cannot point here as they can a name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
