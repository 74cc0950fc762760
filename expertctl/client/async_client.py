"""Asking a server from an event loop: as `expertctl.client.client`, with ``await``.

Answers that come piece by piece, read in an event loop: as `expertctl.client.client`.

Jobs, asked about from an event loop: as `expertctl.client.client`, with ``await``.

`AsyncExpertClient`: the API of a generation server, for an event loop.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from types import TracebackType
from typing import Self, TypeVar, Unpack

import httpx2

from expertctl.client.client import (
    DEFAULT_TIMEOUT,
    FIRST_POLL_SECONDS,
    INFER_REQUEST,
    JOBS_PATH,
    MAX_POLL_SECONDS,
    Chunk,
    InferStreamState,
    check_deadline,
)
from expertctl.client.protocol import (
    MAX_RESPONSE_BYTES,
    ApiRequest,
    InferOptions,
    MoeOptions,
    ResponseBuffer,
    Retries,
    RouteOptions,
    Server,
    build_body,
    build_job_path,
    build_refusal_error,
    decode_response,
    drop_unset_options,
    encode_request,
    find_server,
    is_answer,
    translate_network_errors,
)
from expertctl.client.result import (
    Expert,
    ExpertList,
    InferResult,
    InferStarted,
    Job,
    Model,
    ModelList,
    MoeActivity,
    RouteResult,
)
from expertctl.errors import RateLimitError, UnreachableError

_Kind = TypeVar(
    "_Kind", InferResult, RouteResult, Job, ExpertList, ModelList, MoeActivity, InferStarted
)
_Result = TypeVar("_Result")


class AsyncTransport:
    """The owner of the connections to one server, in one event loop."""

    def __init__(
        self,
        server: Server,
        *,
        retries: Retries,
        sleep: Callable[[float], Awaitable[object]],
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """Open nothing yet."""
        self.server = server
        self.sleep = sleep
        self._retries = retries
        self._client = httpx2.AsyncClient(**server.http_options, transport=transport)

    async def fetch(self, call: ApiRequest, kind: type[_Kind]) -> _Kind:
        """Send a request and read its answer.

        Raises:
            ExpertError: when it is refused, or no answer comes.
        """
        body = await self._retry(call, lambda: self._fetch_body(call))
        return decode_response(body, kind, what=call.what)

    async def open_stream(self, call: ApiRequest) -> httpx2.Response:
        """Send a request and return its answer unread; the caller closes it.

        Raises:
            ExpertError: as `ask`.
        """
        return await self._retry(call, lambda: self._send(call))

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def _retry(self, call: ApiRequest, attempt: Callable[[], Awaitable[_Result]]) -> _Result:
        for number in count(1):
            try:
                return await attempt()
            except (RateLimitError, UnreachableError) as error:
                again = call.is_repeatable
                pause = self._retries.pause_after(number, error, repeatable=again)
                if pause is None:
                    raise
            await self.sleep(pause)
        raise AssertionError("counting has no end")

    async def _fetch_body(self, call: ApiRequest) -> bytes:
        response = await self._send(call)
        return await self._read_body(call, response)

    async def _send(self, call: ApiRequest) -> httpx2.Response:
        request = self._client.build_request(call.method, call.path, **encode_request(call))
        with translate_network_errors(call.what, self.server):
            response = await self._client.send(request, stream=True)
        if is_answer(response):
            return response
        raise build_refusal_error(call, response, await self._read_body(call, response))

    async def _read_body(self, call: ApiRequest, response: httpx2.Response) -> bytes:
        body = ResponseBuffer(call.what)
        try:
            with translate_network_errors(call.what, self.server):
                async for chunk in response.aiter_bytes():
                    body.add(chunk)
        finally:
            await response.aclose()
        return bytes(body.data)


class AsyncInferStream:
    """An answer as it is written: read its chunks by ``async for``, then its ``result``.

    Leaving early, by ``aclose`` or the end of an ``async with`` block, ends the work of the server,
    too.
    """

    def __init__(
        self, open_response: Callable[[], Awaitable[httpx2.Response]], server: Server
    ) -> None:
        """Send nothing before the first chunk is wanted."""
        self._state = InferStreamState()
        self._chunks = self._read(open_response, server)

    @property
    def started(self) -> InferStarted | None:
        """The job and its plan, once the first chunk is here."""
        return self._state.started

    @property
    def result(self) -> InferResult:
        """The whole answer.

        Raises:
            NoAnswerError: when the stream was not read to its end.
        """
        return self._state.require_result()

    def __aiter__(self) -> Self:
        """Read on from here."""
        return self

    async def __anext__(self) -> Chunk:
        """Wait for more text.

        Raises:
            ExpertError: when it is refused, or fails on the way.
        """
        return await anext(self._chunks)

    async def __aenter__(self) -> Self:
        """Begin; nothing is sent yet."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave, wherever it is."""
        await self.aclose()

    async def aclose(self) -> None:
        """End it where it is."""
        await self._chunks.aclose()

    async def _read(
        self, open_response: Callable[[], Awaitable[httpx2.Response]], server: Server
    ) -> AsyncGenerator[Chunk, None]:
        response = await open_response()
        try:
            with translate_network_errors(INFER_REQUEST, server):
                async for event in httpx2.EventSource(response, max_event_size=MAX_RESPONSE_BYTES):
                    if chunk := self._state.handle_event(event):
                        yield chunk
            self._state.check_complete()
        finally:
            await response.aclose()


class AsyncJobsClient:
    """The jobs of whoever has this key."""

    def __init__(self, transport: AsyncTransport) -> None:
        """Keep how to ask."""
        self._transport = transport

    async def submit(self, prompt: str, **options: Unpack[InferOptions]) -> Job:
        """Put a prompt into the queue; it is answered whether or not anybody asks.

        Raises:
            RateLimitError: when the queue is full.
            ExpertError: when it is refused, or no answer comes.
        """
        return await self._transport.fetch(
            ApiRequest("POST", JOBS_PATH, build_body(prompt, options)), Job
        )

    async def get(self, job_id: str) -> Job:
        """Look at a job.

        Raises:
            NotFoundError: when there is none, it is somebody else's, or ended long ago.
            ExpertError: when no answer comes.
        """
        return await self._transport.fetch(ApiRequest("GET", build_job_path(job_id)), Job)

    async def wait(self, job_id: str, *, timeout: float | None = None) -> Job:
        """Look at a job until it is over, for so many seconds at most.

        Raises:
            TimedOutError: when it is not over by then; it goes on.
            ExpertError: as `get`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_POLL_SECONDS
        while not (job := await self.get(job_id)).is_over:
            check_deadline(job, end)
            await self._transport.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)
        return job

    async def cancel(self, job_id: str) -> Job:
        """End a job where it is; one that is over stays as it is.

        Raises:
            ExpertError: as `get`.
        """
        return await self._transport.fetch(ApiRequest("DELETE", build_job_path(job_id)), Job)

    @asynccontextmanager
    async def running(self, prompt: str, **options: Unpack[InferOptions]) -> AsyncIterator[Job]:
        """Begin a job for the length of a ``async with`` block, and cancel it at its end.

        Raises:
            ExpertError: as `submit`.
        """
        job = await self.submit(prompt, **options)
        try:
            yield job
        finally:
            await self.cancel(job.job_id)


class AsyncExpertClient:
    """A client of one server, for one event loop; ``async with`` closes its connections.

    ::

        async with AsyncExpertClient("http://127.0.0.1:8000") as client:
            print((await client.infer("Sort these numbers: 41, 17, 23")).text)
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        retries: Retries | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Keep where to ask; nothing is sent yet.

        ``base_url`` is by default that of ``EXPERT_SERVER``, else of this machine; ``api_key`` that
        of ``EXPERT_API_KEY``, if any. ``transport`` is for proxies and certificates of one's own:
        ``httpx2.AsyncHTTPTransport(proxy=…, verify=…)``.

        Raises:
            UsageError: when the address or the key cannot be one.
        """
        server = find_server(base_url, api_key=api_key, timeout=timeout)
        self._transport = AsyncTransport(
            server, retries=retries or Retries(), transport=transport, sleep=sleep
        )
        self.jobs = AsyncJobsClient(self._transport)

    async def infer(self, prompt: str, **options: Unpack[InferOptions]) -> InferResult:
        """Answer a prompt.

        Raises:
            UsageError: when the request is wrong.
            RateLimitError: when the server has too much to do.
            UnreachableError: when no server answers.
            ExpertError: whatever else the server refuses it for.
        """
        return await self._transport.fetch(
            ApiRequest("POST", "/v1/infer", build_body(prompt, options)), InferResult
        )

    def infer_stream(self, prompt: str, **options: Unpack[InferOptions]) -> AsyncInferStream:
        """Answer a prompt piece by piece; what goes wrong is raised where it is read."""
        call = ApiRequest("POST", "/v1/infer", build_body(prompt, options, stream=True))
        return AsyncInferStream(lambda: self._transport.open_stream(call), self._transport.server)

    async def route(self, prompt: str, **options: Unpack[RouteOptions]) -> RouteResult:
        """Say which experts would answer a prompt, and why; nothing is loaded.

        Raises:
            ExpertError: as `infer`.
        """
        return await self._transport.fetch(
            ApiRequest("POST", "/v1/route", build_body(prompt, options)), RouteResult
        )

    async def experts(self) -> tuple[Expert, ...]:
        """List the experts that are installed.

        Raises:
            ExpertError: when no answer comes.
        """
        return (await self._transport.fetch(ApiRequest("GET", "/v1/experts"), ExpertList)).experts

    async def models(self) -> tuple[Model, ...]:
        """List what the ``model`` of the OpenAI and Anthropic calls can be.

        Raises:
            ExpertError: when no answer comes.
        """
        return (await self._transport.fetch(ApiRequest("GET", "/v1/models"), ModelList)).data

    async def moe(self) -> MoeActivity:
        """Tell what was counted of the routed experts of the base; nothing changes by it.

        Raises:
            ExpertError: when no answer comes.
        """
        return await self._transport.fetch(ApiRequest("GET", "/moe"), MoeActivity)

    async def change_moe(self, **options: Unpack[MoeOptions]) -> MoeActivity:
        """Count routed experts otherwise, or let a profile say which stay; tell what holds then.

        Raises:
            UsageError: when that would change nothing, or cannot be.
            IncompatibleError: when the base has none that could be missing, or does not fit.
            NotFoundError: when nothing was learnt of the base.
            ExpertError: when no answer comes.
        """
        return await self._transport.fetch(
            ApiRequest("POST", "/moe", drop_unset_options(options)), MoeActivity
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        """Begin; connections are opened when they are needed."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close every connection."""
        await self.close()
