"""Server-sent events: pieces of an answer as they come, for as long as somebody reads.

An error before the first event is an ordinary answer with its own status, so nothing is sent until
there is one, or the client has waited for `QUIET_SECONDS`. From then on a comment is sent whenever
nothing came for so long, and an error is an event, the last one. A client that goes away ends the
events at once, wherever they are.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from expertctl.errors import ExpertError
from expertctl.http.departure import until_left
from expertctl.server.error_bodies import error_event

QUIET_SECONDS = 10.0
KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_Result = TypeVar("_Result")


def event(data: bytes) -> bytes:
    """Return an event without a name; ``data`` is one line, as JSON is."""
    return b"data: %s\n\n" % data


def named_event(name: str, data: bytes) -> bytes:
    """Return an event with a name."""
    return b"event: %s\ndata: %s\n\n" % (name.encode("ascii"), data)


def event_stream(request: Request, lines: AsyncIterator[bytes]) -> Response:
    """Answer with events, each as `event` makes it; the body of the request must have been read."""
    return EventStream(request, lines)


async def while_connected(request: Request, awaitable: Awaitable[_Result]) -> _Result:
    """Wait for what is awaited as long as the client is there, else cancel it.

    Raises:
        ClientDisconnect: when the client went away first.
    """
    return await until_left(request.receive, awaitable)


class EventStream(Response):
    """The answer that `event_stream` gives."""

    media_type = "text/event-stream"

    def __init__(
        self,
        request: Request,
        lines: AsyncIterator[bytes],
        *,
        quiet_seconds: float = QUIET_SECONDS,
    ) -> None:
        """Send ``lines``, and a comment after each ``quiet_seconds`` without one."""
        super().__init__(status_code=200, headers=_HEADERS)
        del self.headers["content-length"]
        self._scope, self._lines, self._quiet_seconds = request.scope, lines, quiet_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request; raises what comes before the first event."""
        wire = _Wire(send, {"status": self.status_code, "headers": self.raw_headers})
        try:
            await until_left(receive, self._sent(wire))
        except ClientDisconnect:
            if not wire.begun:
                raise

    async def _sent(self, wire: "_Wire") -> None:
        signs = asyncio.ensure_future(_keep_alive(wire, self._quiet_seconds))
        try:
            async for line in self._lines:
                await wire.write(line)
        except ExpertError as error:
            if not wire.begun:
                raise
            await wire.write(error_event(error, self._scope))
        finally:
            signs.cancel()
            await asyncio.gather(signs, return_exceptions=True)
            if isinstance(self._lines, AsyncGenerator):
                await self._lines.aclose()
        await wire.end()


class _Wire:
    """The body of an answer, whose head goes out with the first piece."""

    def __init__(self, send: Send, head: dict[str, object]) -> None:
        self.begun = False
        self.last = time.monotonic()
        self._send, self._head, self._turn = send, head, asyncio.Lock()

    async def write(self, piece: bytes) -> None:
        await self._write(piece, more=True)

    async def end(self) -> None:
        await self._write(b"", more=False)

    async def _write(self, piece: bytes, *, more: bool) -> None:
        async with self._turn:
            if not self.begun:
                self.begun = True
                await self._send({"type": "http.response.start", **self._head})
            await self._send({"type": "http.response.body", "body": piece, "more_body": more})
            self.last = time.monotonic()


async def _keep_alive(wire: _Wire, seconds: float) -> None:
    while True:
        rest = wire.last + seconds - time.monotonic()
        if rest > 0:
            await asyncio.sleep(rest)
        else:
            await wire.write(KEEP_ALIVE)
