"""`ExpertClient`: the API of a generation server, for threads.

A `Transport` sends the requests of a client and retries them where that may help;
`InferStream` reads an answer piece by piece; `JobsClient` submits and polls jobs.

Generated from `expertctl.client.async_client`: change that module, then run
``python -m scripts.sync_client``.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import count
from types import TracebackType
from typing import Self, TypeVar, Unpack

import httpx2

from expertctl.client.protocol import (
    INFER_REQUEST,
    MAX_RESPONSE_BYTES,
    ApiRequest,
    Chunk,
    InferOptions,
    InferStreamState,
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
    Document,
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
from expertctl.errors import RateLimitError, TimedOutError, UnreachableError

DEFAULT_TIMEOUT = 600.0
"""Seconds without a byte from the server."""
FIRST_POLL_SECONDS = 0.05
"""Seconds before a job is polled again; doubled each time up to `MAX_POLL_SECONDS`."""
MAX_POLL_SECONDS = 2.0
_JOBS_PATH = "/v1/jobs"
_Kind = TypeVar("_Kind", bound=Document)
_Result = TypeVar("_Result")


class Transport:
    """The owner of the connections to one server, for any number of threads."""

    def __init__(
        self,
        server: Server,
        *,
        retries: Retries,
        sleep: Callable[[float], object],
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """Create the HTTP client; no connection is opened yet."""
        self.server = server
        self.sleep = sleep
        self._retries = retries
        self._client = httpx2.Client(**server.http_options, transport=transport)

    def fetch(self, call: ApiRequest, kind: type[_Kind]) -> _Kind:
        """Send a request and decode its response.

        Raises:
            ExpertError: when it is refused, or there is no response.
        """
        body = self._retry(call, lambda: self._fetch_body(call))
        return decode_response(body, kind, what=call.what)

    def open_stream(self, call: ApiRequest) -> httpx2.Response:
        """Send a request and return its unread response; the caller closes it.

        Raises:
            ExpertError: as `fetch`.
        """
        return self._retry(call, lambda: self._send(call))

    def close(self) -> None:
        """Close every connection."""
        self._client.close()

    def _retry(self, call: ApiRequest, attempt: Callable[[], _Result]) -> _Result:
        for number in count(1):
            try:
                return attempt()
            except (RateLimitError, UnreachableError) as error:
                pause = self._retries.pause_after(number, error, repeatable=call.is_repeatable)
                if pause is None:
                    raise
            self.sleep(pause)
        raise AssertionError("counting has no end")

    def _fetch_body(self, call: ApiRequest) -> bytes:
        return self._read_body(call, self._send(call))

    def _send(self, call: ApiRequest) -> httpx2.Response:
        request = self._client.build_request(call.method, call.path, **encode_request(call))
        with translate_network_errors(call.what, self.server):
            response = self._client.send(request, stream=True)
        if is_answer(response):
            return response
        raise build_refusal_error(call, response, self._read_body(call, response))

    def _read_body(self, call: ApiRequest, response: httpx2.Response) -> bytes:
        body = ResponseBuffer(call.what)
        try:
            with translate_network_errors(call.what, self.server):
                for chunk in response.iter_bytes():
                    body.add(chunk)
        finally:
            response.close()
        return bytes(body.data)


class InferStream:
    """An answer while it is generated: iterate over its chunks, then read ``result``.

    Leaving early, by ``close`` or the end of a ``with`` block, cancels the request on the
    server.
    """

    def __init__(self, open_response: Callable[[], httpx2.Response], server: Server) -> None:
        """Prepare the stream; the request is sent when the first chunk is read."""
        self._state = InferStreamState()
        self._chunks = self._read(open_response, server)

    @property
    def started(self) -> InferStarted | None:
        """The job and its plan; None before the first chunk."""
        return self._state.started

    @property
    def result(self) -> InferResult:
        """The complete answer.

        Raises:
            NoAnswerError: when the stream was not read to its end.
        """
        return self._state.require_result()

    @property
    def document(self) -> bytes:
        """The complete answer as JSON, with fields that this client does not know; else empty."""
        return self._state.document

    def __iter__(self) -> Self:
        """Return the stream itself."""
        return self

    def __next__(self) -> Chunk:
        """Wait for the next chunk.

        Raises:
            ExpertError: when the request is refused, or fails later.
        """
        return next(self._chunks)

    def __enter__(self) -> Self:
        """Return the stream; nothing is sent yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the stream."""
        self.close()

    def close(self) -> None:
        """Close the connection, which cancels an unfinished request."""
        self._chunks.close()

    def _read(
        self, open_response: Callable[[], httpx2.Response], server: Server
    ) -> Generator[Chunk, None, None]:
        response = open_response()
        try:
            with translate_network_errors(INFER_REQUEST, server):
                for event in httpx2.EventSource(response, max_event_size=MAX_RESPONSE_BYTES):
                    if chunk := self._state.handle_event(event):
                        yield chunk
            self._state.check_complete()
        finally:
            response.close()


class JobsClient:
    """The jobs of the owner of this API key."""

    def __init__(self, transport: Transport) -> None:
        """Use a transport."""
        self._transport = transport

    def submit(self, prompt: str, **options: Unpack[InferOptions]) -> Job:
        """Queue a prompt; it is answered even if nobody polls the job.

        Raises:
            RateLimitError: when the queue is full.
            ExpertError: when it is refused, or there is no response.
        """
        call = ApiRequest("POST", _JOBS_PATH, build_body(prompt, options))
        return self._transport.fetch(call, Job)

    def get(self, job_id: str) -> Job:
        """Return the current state of a job.

        Raises:
            NotFoundError: when it is unknown, belongs to another key, or ended long ago.
            ExpertError: when there is no response.
        """
        return self._transport.fetch(ApiRequest("GET", build_job_path(job_id)), Job)

    def wait(self, job_id: str, *, timeout: float | None = None) -> Job:
        """Poll a job until it is over, for at most ``timeout`` seconds.

        Raises:
            TimedOutError: when it is not over by then; the job continues.
            ExpertError: as `get`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_POLL_SECONDS
        while not (job := self.get(job_id)).is_over:
            if end is not None and time.monotonic() >= end:
                message = f"the job {job.job_id} is still {job.status}"
                raise TimedOutError(message, hint="wait for longer")
            self._transport.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)
        return job

    def cancel(self, job_id: str) -> Job:
        """Cancel a job; one that is over stays as it is.

        Raises:
            ExpertError: as `get`.
        """
        return self._transport.fetch(ApiRequest("DELETE", build_job_path(job_id)), Job)

    @contextmanager
    def running(self, prompt: str, **options: Unpack[InferOptions]) -> Iterator[Job]:
        """Submit a job for the length of a ``with`` block, and cancel it at the end.

        Raises:
            ExpertError: as `submit`.
        """
        job = self.submit(prompt, **options)
        try:
            yield job
        finally:
            self.cancel(job.job_id)


class ExpertClient:
    """A client of one server, for any number of threads; ``with`` closes its connections.

    ::

        with ExpertClient("http://127.0.0.1:8000") as client:
            result = client.infer("Sort these numbers: 41, 17, 23")
            print(result.text)
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        retries: Retries | None = None,
        transport: httpx2.BaseTransport | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Create a client; nothing is sent yet.

        ``base_url`` defaults to ``EXPERT_SERVER``, else to this machine, and ``api_key`` to
        ``EXPERT_API_KEY``, if set. ``transport`` is for proxies and certificates of your own:
        ``httpx2.HTTPTransport(proxy=…, verify=…)``.

        Raises:
            UsageError: when the address or the key is invalid.
        """
        server = find_server(base_url, api_key=api_key, timeout=timeout)
        self._transport = Transport(
            server, retries=retries or Retries(), transport=transport, sleep=sleep
        )
        self.jobs = JobsClient(self._transport)

    def infer(self, prompt: str, **options: Unpack[InferOptions]) -> InferResult:
        """Answer a prompt.

        Raises:
            UsageError: when the request is invalid.
            RateLimitError: when the server is overloaded.
            UnreachableError: when no server answers.
            ExpertError: when the server refuses it for any other reason.
        """
        call = ApiRequest("POST", "/v1/infer", build_body(prompt, options))
        return self._transport.fetch(call, InferResult)

    def infer_stream(self, prompt: str, **options: Unpack[InferOptions]) -> InferStream:
        """Answer a prompt piece by piece; errors are raised where the stream is read."""
        call = ApiRequest("POST", "/v1/infer", build_body(prompt, options, stream=True))
        return InferStream(lambda: self._transport.open_stream(call), self._transport.server)

    def route(self, prompt: str, **options: Unpack[RouteOptions]) -> RouteResult:
        """Return which experts would answer a prompt, and why; nothing is loaded.

        Raises:
            ExpertError: as `infer`.
        """
        call = ApiRequest("POST", "/v1/route", build_body(prompt, options))
        return self._transport.fetch(call, RouteResult)

    def experts(self) -> tuple[Expert, ...]:
        """List the installed experts.

        Raises:
            ExpertError: when there is no response.
        """
        found = self._transport.fetch(ApiRequest("GET", "/v1/experts"), ExpertList)
        return found.experts

    def models(self) -> tuple[Model, ...]:
        """List the valid values of ``model`` in OpenAI and Anthropic calls.

        Raises:
            ExpertError: when there is no response.
        """
        found = self._transport.fetch(ApiRequest("GET", "/v1/models"), ModelList)
        return found.data

    def moe(self) -> MoeActivity:
        """Return the counters of the base's routed experts, without changing them.

        Raises:
            ExpertError: when there is no response.
        """
        return self._transport.fetch(ApiRequest("GET", "/moe"), MoeActivity)

    def change_moe(self, **options: Unpack[MoeOptions]) -> MoeActivity:
        """Change how routed experts are counted, or apply a usage profile; return the new state.

        Raises:
            UsageError: when nothing would change, or an option is invalid.
            IncompatibleError: when all routed experts are resident, or the profile does not fit.
            NotFoundError: when nothing was learnt of the base.
            ExpertError: when there is no response.
        """
        call = ApiRequest("POST", "/moe", drop_unset_options(options))
        return self._transport.fetch(call, MoeActivity)

    def close(self) -> None:
        """Close every connection."""
        self._transport.close()

    def __enter__(self) -> Self:
        """Return the client; connections are opened when they are needed."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close every connection."""
        self.close()
