"""Server-sent events: pieces of an answer as they come, for as long as the client reads.

An error before the first event is an ordinary answer with its own status, so nothing is sent until
there is an event, or the client has waited for `QUIET_SECONDS`. From then on a comment is sent
after each such time without an event, and an error is sent as the last event. If the client goes
away, the events end at once.

A slow reader does not hold up the batch. Events are taken as they are made, so a text is written at
the pace of the batch and frees its row when it is whole; unread events wait here. To hold the text
back instead would leave a row, its keys and its experts to the slowest reader. `Patience` bounds
what waits: a reader that is too far behind gets no more, and its job is cancelled.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from expertctl.errors import ExpertError
from expertctl.http.departure import until_left
from expertctl.server.error_bodies import error_event
from expertctl.server.request_id import request_id_of
from expertctl.server.settings import BEHIND_SECONDS

LOG = logging.getLogger("expertctl.server")

QUIET_SECONDS = 10.0
KEEP_ALIVE = b": keep-alive\n\n"
UNREAD_BYTES = 4 << 20
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How far behind the reader of a stream may be."""

    seconds: float = BEHIND_SECONDS
    """How old an event may become before it is read."""
    unread_bytes: int = UNREAD_BYTES
    """Bytes that may wait, besides what the system and granian hold for a connection."""


def event(data: bytes) -> bytes:
    """Return an event without a name; ``data`` is one line, as JSON is."""
    return b"data: %s\n\n" % data


def named_event(name: str, data: bytes) -> bytes:
    """Return an event with a name."""
    return b"event: %s\ndata: %s\n\n" % (name.encode("ascii"), data)


def event_stream(
    request: Request, lines: AsyncIterator[bytes], *, headers: Mapping[str, str] = _HEADERS
) -> Response:
    """Answer with events, each as `event` makes it; the body of the request must have been read.

    ``headers`` are sent besides those of every stream.

    The application says in ``state.patience`` how far behind a reader may be.
    """
    return EventStream(request, lines, headers=headers)


async def while_connected(request: Request, awaitable: Awaitable[_Result]) -> _Result:
    """Await a result; cancel it when the client goes away.

    Raises:
        ClientDisconnect: when the client goes away first.
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
        headers: Mapping[str, str] = _HEADERS,
    ) -> None:
        """Send ``lines``, and a comment after each ``quiet_seconds`` without one."""
        super().__init__(status_code=200, headers={**_HEADERS, **headers})
        del self.headers["content-length"]
        self._scope, self._lines, self._quiet_seconds = request.scope, lines, quiet_seconds
        self._patience: Patience = getattr(request.app.state, "patience", Patience())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request; raises errors that come before the first event."""
        wire = _Wire(send, {"status": self.status_code, "headers": self.raw_headers})
        try:
            await until_left(receive, self._sent(wire))
        except ClientDisconnect:
            if not wire.begun:
                raise

    async def _sent(self, wire: "_Wire") -> None:
        unread = _Unread(self._patience)
        taking = asyncio.ensure_future(self._take(unread))
        sending = asyncio.ensure_future(self._send(unread, wire, taking))
        tiring = asyncio.ensure_future(unread.too_much())
        tasks = (taking, sending, tiring)
        try:
            await asyncio.wait({sending, tiring}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            else:
                self._give_up(unread)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if isinstance(self._lines, AsyncGenerator):
                await self._lines.aclose()

    async def _take(self, unread: "_Unread") -> None:
        """Take events as they are made."""
        try:
            async for line in self._lines:
                unread.put(line)
        finally:
            unread.close()

    async def _send(self, unread: "_Unread", wire: "_Wire", taking: asyncio.Task[None]) -> None:
        """Send events as they are read, then the error that ended them, if any."""
        while not unread.is_at_end:
            try:
                async with asyncio.timeout(self._quiet_seconds):
                    await unread.wait()
            except TimeoutError:
                await wire.write(KEEP_ALIVE)
                continue
            while line := unread.oldest:
                await wire.write(line)
                unread.drop()
        try:
            await taking
        except ExpertError as error:
            if not wire.begun:
                raise
            await wire.write(error_event(error, self._scope))
        await wire.end()

    def _give_up(self, unread: "_Unread") -> None:
        """Log that the reader is too far behind; the events stop without a last one."""
        fields = {"id": request_id_of(self._scope), "unread": unread.bytes}
        LOG.info("a reader is too far behind", extra={"fields": fields})


class _Unread:
    """Events that were made and not read, the oldest first, then the end."""

    def __init__(self, patience: Patience) -> None:
        self.bytes = 0
        self._patience = patience
        self._items = deque[tuple[float, bytes]]()
        self._some, self._full = asyncio.Event(), asyncio.Event()

    @property
    def oldest(self) -> bytes:
        """The event to send next; empty at the end and while there is none."""
        return self._items[0][1] if self._items else b""

    @property
    def is_at_end(self) -> bool:
        """Whether no event is left and none will come."""
        return bool(self._items) and not self._items[0][1]

    def put(self, line: bytes) -> None:
        if line:
            self._add(line)

    def close(self) -> None:
        """Add the end, which is never dropped: its age counts until the last write is done."""
        self._add(b"")

    def drop(self) -> None:
        """Drop the oldest event, which was read."""
        self.bytes -= len(self._items.popleft()[1])
        if not self._items:
            self._some.clear()

    async def wait(self) -> None:
        """Wait until there is an event, or the end."""
        await self._some.wait()

    async def too_much(self) -> None:
        """Wait until the reader is too far behind."""
        while (rest := self._rest()) > 0 and not self._full.is_set():
            try:
                async with asyncio.timeout(rest):
                    await self._full.wait()
            except TimeoutError:
                continue

    def _add(self, line: bytes) -> None:
        self._items.append((time.monotonic(), line))
        self.bytes += len(line)
        self._some.set()
        if self.bytes > self._patience.unread_bytes:
            self._full.set()

    def _rest(self) -> float:
        """Return for how many seconds the oldest event may still wait."""
        now = time.monotonic()
        since = self._items[0][0] if self._items else now
        return since + self._patience.seconds - now


class _Wire:
    """The body of an answer; its head is sent with the first piece."""

    def __init__(self, send: Send, head: dict[str, object]) -> None:
        self.begun = False
        self._send, self._head = send, head

    async def write(self, piece: bytes) -> None:
        await self._write(piece, more=True)

    async def end(self) -> None:
        await self._write(b"", more=False)

    async def _write(self, piece: bytes, *, more: bool) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", **self._head})
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})
