"""Jobs as streams: engine events in an event loop, and answers as server-sent events.

A job lives as long as the ``async with`` that submitted it. Leaving the block early, for whatever
reason, cancels the job; its batch row is free within one step.

An error before the first event is an ordinary response with its own status, so nothing is sent
before the first event or the first `KEEP_ALIVE_SECONDS`. After that, each such time without an
event sends a comment, and an error is sent as the last event. When the client disconnects, the
stream ends at once.

A slow reader does not delay the batch. Events are taken as they are produced, so a job writes at
the batch's pace and frees its row when done; unread events wait here. Otherwise the slowest reader
would hold a row, its KV cache and its experts. `BackpressureLimit` bounds what waits: a reader that
is too far behind gets no more, and its job is cancelled.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from expertctl.engine.result import RunResult
from expertctl.engine.running_sequence import OutputDelta, SampledToken
from expertctl.engine.serving.request import (
    GenerationJob,
    JobEvent,
    JobFailed,
    JobFinished,
    TokenSink,
)
from expertctl.engine.text.prompt import PromptLogprobs
from expertctl.errors import ExpertError
from expertctl.http.limits import run_until_disconnect
from expertctl.http.openapi import EVENT_STREAM
from expertctl.server.responses import format_error_event, get_request_id
from expertctl.server.settings import MAX_READER_DELAY

NumberedEvent = tuple[int, JobEvent]


class JobSubmitter(Protocol):
    """The part of the engine that streams use."""

    def submit(self, job: GenerationJob, sink: TokenSink) -> None:
        """Queue a job.

        Raises:
            RateLimitError: when the queue is full.
        """

    def cancel(self, job_id: str) -> None:
        """Cancel a job; unknown and ended jobs are ignored."""


@asynccontextmanager
async def stream_job(
    jobs: JobSubmitter, job: GenerationJob
) -> AsyncIterator[AsyncIterator[JobEvent]]:
    """Submit a job and provide its events; the last one is `JobFinished`.

    Raises:
        ExpertError: when it is refused, or fails before or while its events are read.
    """
    async with stream_jobs(jobs, [job]) as events:
        yield (event async for _, event in events)


@asynccontextmanager
async def stream_jobs(
    jobs: JobSubmitter, submitted: Sequence[GenerationJob]
) -> AsyncIterator[AsyncIterator[NumberedEvent]]:
    """Submit jobs and provide their events as they come, each with the index of its job.

    Raises:
        ExpertError: when one is refused, or fails before or while events are read; the others are
            then cancelled.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[NumberedEvent]()
    started = list[GenerationJob]()
    try:
        for number, job in enumerate(submitted):
            jobs.submit(job, _make_queue_sink(queue, loop, number))
            started.append(job)
        yield _iter_events(queue, len(submitted))
    finally:
        for job in started:
            jobs.cancel(job.id)


async def run_job(jobs: JobSubmitter, job: GenerationJob) -> JobFinished:
    """Submit a job and wait for its last event.

    Raises:
        ExpertError: when it is refused or fails.
    """
    async with stream_job(jobs, job) as events:
        async for event in events:
            if isinstance(event, JobFinished):
                return event
    raise AssertionError("a job ends with Finished or Failed")


def _make_queue_sink(
    queue: asyncio.Queue[NumberedEvent], loop: asyncio.AbstractEventLoop, number: int
) -> Callable[[JobEvent], None]:
    def put(event: JobEvent) -> None:
        try:
            loop.call_soon_threadsafe(queue.put_nowait, (number, event))
        except RuntimeError:  # the loop is closed: nothing reads any more
            return

    return put


async def _iter_events(
    queue: asyncio.Queue[NumberedEvent], running: int
) -> AsyncIterator[NumberedEvent]:
    while running:
        number, event = await queue.get()
        if isinstance(event, JobFailed):
            raise event.error
        yield number, event
        running -= isinstance(event, JobFinished)


@dataclass(frozen=True, slots=True)
class CollectedJob:
    """The outcome of a job: its answers, and the sampled tokens of each if requested."""

    results: tuple[RunResult, ...]
    sampled: tuple[tuple[SampledToken, ...], ...]
    prompt: PromptLogprobs | None = None
    """The log-probabilities of its prompt, if requested and computed."""


async def run_jobs(
    jobs: JobSubmitter, submitted: Sequence[GenerationJob]
) -> tuple[CollectedJob, ...]:
    """Submit jobs and wait for all of them.

    Raises:
        ExpertError: when one is refused or fails; the others are then cancelled.
    """
    drawn = [[list[SampledToken]() for _ in range(job.answers)] for job in submitted]
    results: dict[int, tuple[RunResult, ...]] = {}
    prompts: dict[int, PromptLogprobs] = {}
    async with stream_jobs(jobs, submitted) as events:
        async for number, event in events:
            if isinstance(event, OutputDelta):
                drawn[number][event.number] += event.sampled
                if event.prompt is not None:
                    prompts[number] = event.prompt
            elif isinstance(event, JobFinished):
                results[number] = event.results
    return tuple(
        CollectedJob(results[n], tuple(map(tuple, drawn[n])), prompts.get(n))
        for n in range(len(submitted))
    )


LOG = logging.getLogger("expertctl.server")

KEEP_ALIVE_SECONDS = 10.0
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"
MAX_UNREAD_BYTES = 4 << 20
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_Result = TypeVar("_Result")
_EventData = TypeVar("_EventData")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackpressureLimit:
    """How far behind the reader of a stream may fall."""

    seconds: float = MAX_READER_DELAY
    """Maximum age of an unread event."""
    unread_bytes: int = MAX_UNREAD_BYTES
    """Maximum unread bytes, not counting the buffers of the system and granian."""


def format_event(data: bytes) -> bytes:
    """Format an unnamed event; ``data`` must be one line, as JSON is."""
    return b"data: %s\n\n" % data


def format_named_event(name: str, data: bytes) -> bytes:
    """Format a named event; ``data`` must be one line."""
    return b"event: %s\ndata: %s\n\n" % (name.encode("ascii"), data)


async def while_connected(request: Request, awaitable: Awaitable[_Result]) -> _Result:
    """Await a result; cancel it when the client disconnects.

    Raises:
        ClientDisconnect: when the client disconnects first.
    """
    return await run_until_disconnect(request.receive, awaitable)


class EventStream(Response, Generic[_EventData]):
    """Streams ``lines``, each made by `format_event`; the request's body must be read already.

    The type argument is that of the data of the events, for the OpenAPI document.

    The application's ``state.patience`` is its `BackpressureLimit`.
    """

    media_type = EVENT_STREAM

    def __init__(
        self,
        request: Request,
        lines: AsyncIterator[bytes],
        *,
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Send a comment after each ``keep_alive_seconds`` without a line.

        ``headers`` are added to those of every stream.
        """
        super().__init__(status_code=200, headers={**_HEADERS, **headers})
        del self.headers["content-length"]
        self._scope, self._lines = request.scope, lines
        self._keep_alive_seconds = keep_alive_seconds
        self._limit: BackpressureLimit = getattr(request.app.state, "patience", BackpressureLimit())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; raises errors that occur before the first event."""
        wire = _ResponseWriter(send, {"status": self.status_code, "headers": self.raw_headers})
        try:
            await run_until_disconnect(receive, self._stream_events(wire))
        except ClientDisconnect:
            if not wire.started:
                raise

    async def _stream_events(self, wire: "_ResponseWriter") -> None:
        unread = _EventBuffer(self._limit)
        taking = asyncio.ensure_future(self._collect(unread))
        sending = asyncio.ensure_future(self._send(unread, wire, taking))
        tiring = asyncio.ensure_future(unread.wait_until_full())
        tasks = (taking, sending, tiring)
        try:
            await asyncio.wait({sending, tiring}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            else:
                self._log_slow_reader(unread)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if isinstance(self._lines, AsyncGenerator):
                await self._lines.aclose()

    async def _collect(self, unread: "_EventBuffer") -> None:
        """Buffer events as they are produced."""
        try:
            async for line in self._lines:
                unread.put(line)
        finally:
            unread.close()

    async def _send(
        self, unread: "_EventBuffer", wire: "_ResponseWriter", taking: asyncio.Task[None]
    ) -> None:
        """Send buffered events, then the error that ended them, if any."""
        while not unread.is_at_end:
            try:
                async with asyncio.timeout(self._keep_alive_seconds):
                    await unread.wait()
            except TimeoutError:
                await wire.write(KEEP_ALIVE_COMMENT)
                continue
            while line := unread.oldest:
                await wire.write(line)
                unread.drop()
        try:
            await taking
        except ExpertError as error:
            if not wire.started:
                raise
            await wire.write(format_error_event(error, self._scope))
        await wire.end()

    def _log_slow_reader(self, unread: "_EventBuffer") -> None:
        """Log a reader that is too far behind; its stream stops without a last event."""
        fields = {"id": get_request_id(self._scope), "unread": unread.bytes}
        LOG.info("a reader is too far behind", extra={"fields": fields})


class _EventBuffer:
    """Unread events, oldest first, then an end marker."""

    def __init__(self, limit: BackpressureLimit) -> None:
        self.bytes = 0
        self._limit = limit
        self._items = deque[tuple[float, bytes]]()
        self._has_events, self._is_full = asyncio.Event(), asyncio.Event()

    @property
    def oldest(self) -> bytes:
        """The next event to send; empty at the end and while there is none."""
        return self._items[0][1] if self._items else b""

    @property
    def is_at_end(self) -> bool:
        """Whether no event is left and none will be added."""
        return bool(self._items) and not self._items[0][1]

    def put(self, line: bytes) -> None:
        if line:
            self._add(line)

    def close(self) -> None:
        """Add the end marker; it is never dropped, so it ages until the last write is done."""
        self._add(b"")

    def drop(self) -> None:
        """Drop the oldest event after it was sent."""
        self.bytes -= len(self._items.popleft()[1])
        if not self._items:
            self._has_events.clear()

    async def wait(self) -> None:
        """Wait for an event or the end marker."""
        await self._has_events.wait()

    async def wait_until_full(self) -> None:
        """Wait until the reader is too far behind."""
        while (rest := self._seconds_left()) > 0 and not self._is_full.is_set():
            try:
                async with asyncio.timeout(rest):
                    await self._is_full.wait()
            except TimeoutError:
                continue

    def _add(self, line: bytes) -> None:
        self._items.append((time.monotonic(), line))
        self.bytes += len(line)
        self._has_events.set()
        if self.bytes > self._limit.unread_bytes:
            self._is_full.set()

    def _seconds_left(self) -> float:
        """Return the seconds that the oldest event may still wait."""
        now = time.monotonic()
        since = self._items[0][0] if self._items else now
        return since + self._limit.seconds - now


class _ResponseWriter:
    """Writes a response body; the head is sent with the first write."""

    def __init__(self, send: Send, head: dict[str, object]) -> None:
        self.started = False
        self._send, self._head = send, head

    async def write(self, piece: bytes) -> None:
        await self._write(piece, more=True)

    async def end(self) -> None:
        await self._write(b"", more=False)

    async def _write(self, piece: bytes, *, more: bool) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", **self._head})
        await self._send({"type": "http.response.body", "body": piece, "more_body": more})
