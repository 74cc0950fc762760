"""Asking a server from a thread: one request at a time, again where that may help.

Answers that come piece by piece: what their events mean, and reading them in a thread.

Jobs: requests that go on by themselves, and are asked about.

`ExpertClient`: the API of a generation server, for threads.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Self, TypeVar, Unpack

import httpx2

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
    InferPiece,
    InferResult,
    InferStarted,
    Job,
    Model,
    ModelList,
    MoeActivity,
    RouteResult,
    build_stream_error,
)
from expertctl.errors import NoAnswerError, RateLimitError, TimedOutError, UnreachableError

_Kind = TypeVar(
    "_Kind", InferResult, RouteResult, Job, ExpertList, ModelList, MoeActivity, InferStarted
)
_Result = TypeVar("_Result")


class Transport:
    """The owner of the connections to one server; any thread may ask."""

    def __init__(
        self,
        server: Server,
        *,
        retries: Retries,
        sleep: Callable[[float], object],
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """Open nothing yet."""
        self.server = server
        self.sleep = sleep
        self._retries = retries
        self._client = httpx2.Client(**server.http_options, transport=transport)

    def fetch(self, call: ApiRequest, kind: type[_Kind]) -> _Kind:
        """Send a request and read its answer.

        Raises:
            ExpertError: when it is refused, or no answer comes.
        """
        body = self._retry(call, lambda: self._fetch_body(call))
        return decode_response(body, kind, what=call.what)

    def open_stream(self, call: ApiRequest) -> httpx2.Response:
        """Send a request and return its answer unread; the caller closes it.

        Raises:
            ExpertError: as `ask`.
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
                again = call.is_repeatable
                pause = self._retries.pause_after(number, error, repeatable=again)
                if pause is None:
                    raise
            self.sleep(pause)
        raise AssertionError("counting has no end")

    def _fetch_body(self, call: ApiRequest) -> bytes:
        response = self._send(call)
        return self._read_body(call, response)

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


INFER_REQUEST = "POST /v1/infer"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text that has become certain."""

    text: str


class InferStreamState:
    """What the events of one stream have told so far."""

    def __init__(self) -> None:
        """Begin before the first event."""
        self.started: InferStarted | None = None
        self.result: InferResult | None = None

    def handle_event(self, event: httpx2.ServerSentEvent) -> Chunk | None:
        """Take an event; return text if it has some.

        Raises:
            ExpertError: when it says that there is no more of the answer.
        """
        data = event.data.encode("utf-8", "replace")
        match event.event:
            case "started":
                self.started = decode_response(data, InferStarted, what=INFER_REQUEST)
            case "piece":
                return Chunk(decode_response(data, InferPiece, what=INFER_REQUEST).text)
            case "finished":
                self.result = decode_response(data, InferResult, what=INFER_REQUEST)
            case "failed" | "error":
                raise build_stream_error(data)
            case _:
                pass  # what newer servers tell besides
        return None

    def require_result(self) -> InferResult:
        """Return the whole answer.

        Raises:
            NoAnswerError: when the stream is not at its end.
        """
        if self.result is None:
            raise NoAnswerError("the answer is not whole yet", hint="read the stream to its end")
        return self.result

    def check_complete(self) -> None:
        """Say that no more events come.

        Raises:
            UnreachableError: when the answer is not whole.
        """
        if self.result is None:
            raise UnreachableError(f"{INFER_REQUEST}: the answer broke off", hint="ask again")


class InferStream:
    """An answer as it is written: iterate over its chunks, then its ``result`` is at hand.

    Leaving early, by ``close`` or the end of a ``with`` block, ends the work of the server, too.
    """

    def __init__(self, open_response: Callable[[], httpx2.Response], server: Server) -> None:
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

    def __iter__(self) -> Self:
        """Read on from here."""
        return self

    def __next__(self) -> Chunk:
        """Wait for more text.

        Raises:
            ExpertError: when it is refused, or fails on the way.
        """
        return next(self._chunks)

    def __enter__(self) -> Self:
        """Begin; nothing is sent yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave, wherever it is."""
        self.close()

    def close(self) -> None:
        """End it where it is."""
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


FIRST_POLL_SECONDS = 0.05
"""Seconds until a job is looked at again; then twice as long each time."""
MAX_POLL_SECONDS = 2.0
JOBS_PATH = "/v1/jobs"


class JobsClient:
    """The jobs of whoever has this key."""

    def __init__(self, transport: Transport) -> None:
        """Keep how to ask."""
        self._transport = transport

    def submit(self, prompt: str, **options: Unpack[InferOptions]) -> Job:
        """Put a prompt into the queue; it is answered whether or not anybody asks.

        Raises:
            RateLimitError: when the queue is full.
            ExpertError: when it is refused, or no answer comes.
        """
        return self._transport.fetch(
            ApiRequest("POST", JOBS_PATH, build_body(prompt, options)), Job
        )

    def get(self, job_id: str) -> Job:
        """Look at a job.

        Raises:
            NotFoundError: when there is none, it is somebody else's, or ended long ago.
            ExpertError: when no answer comes.
        """
        return self._transport.fetch(ApiRequest("GET", build_job_path(job_id)), Job)

    def wait(self, job_id: str, *, timeout: float | None = None) -> Job:
        """Look at a job until it is over, for so many seconds at most.

        Raises:
            TimedOutError: when it is not over by then; it goes on.
            ExpertError: as `get`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_POLL_SECONDS
        while not (job := self.get(job_id)).is_over:
            check_deadline(job, end)
            self._transport.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)
        return job

    def cancel(self, job_id: str) -> Job:
        """End a job where it is; one that is over stays as it is.

        Raises:
            ExpertError: as `get`.
        """
        return self._transport.fetch(ApiRequest("DELETE", build_job_path(job_id)), Job)

    @contextmanager
    def running(self, prompt: str, **options: Unpack[InferOptions]) -> Iterator[Job]:
        """Begin a job for the length of a ``with`` block, and cancel it at its end.

        Raises:
            ExpertError: as `submit`.
        """
        job = self.submit(prompt, **options)
        try:
            yield job
        finally:
            self.cancel(job.job_id)


def check_deadline(job: Job, deadline: float | None) -> None:
    """Go on waiting only until then.

    Raises:
        TimedOutError: when that is over.
    """
    if deadline is not None and time.monotonic() >= deadline:
        raise TimedOutError(f"the job {job.job_id} is still {job.status}", hint="wait for longer")


DEFAULT_TIMEOUT = 600.0
"""Seconds that a server may be silent."""


class ExpertClient:
    """A client of one server, for any number of threads; ``with`` closes its connections.

    ::

        with ExpertClient("http://127.0.0.1:8000") as client:
            print(client.infer("Sort these numbers: 41, 17, 23").text)
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
        """Keep where to ask; nothing is sent yet.

        ``base_url`` is by default that of ``EXPERT_SERVER``, else of this machine; ``api_key`` that
        of ``EXPERT_API_KEY``, if any. ``transport`` is for proxies and certificates of one's own:
        ``httpx2.HTTPTransport(proxy=…, verify=…)``.

        Raises:
            UsageError: when the address or the key cannot be one.
        """
        server = find_server(base_url, api_key=api_key, timeout=timeout)
        self._transport = Transport(
            server, retries=retries or Retries(), transport=transport, sleep=sleep
        )
        self.jobs = JobsClient(self._transport)

    def infer(self, prompt: str, **options: Unpack[InferOptions]) -> InferResult:
        """Answer a prompt.

        Raises:
            UsageError: when the request is wrong.
            RateLimitError: when the server has too much to do.
            UnreachableError: when no server answers.
            ExpertError: whatever else the server refuses it for.
        """
        return self._transport.fetch(
            ApiRequest("POST", "/v1/infer", build_body(prompt, options)), InferResult
        )

    def infer_stream(self, prompt: str, **options: Unpack[InferOptions]) -> InferStream:
        """Answer a prompt piece by piece; what goes wrong is raised where it is read."""
        call = ApiRequest("POST", "/v1/infer", build_body(prompt, options, stream=True))
        return InferStream(lambda: self._transport.open_stream(call), self._transport.server)

    def route(self, prompt: str, **options: Unpack[RouteOptions]) -> RouteResult:
        """Say which experts would answer a prompt, and why; nothing is loaded.

        Raises:
            ExpertError: as `infer`.
        """
        return self._transport.fetch(
            ApiRequest("POST", "/v1/route", build_body(prompt, options)), RouteResult
        )

    def experts(self) -> tuple[Expert, ...]:
        """List the experts that are installed.

        Raises:
            ExpertError: when no answer comes.
        """
        return self._transport.fetch(ApiRequest("GET", "/v1/experts"), ExpertList).experts

    def models(self) -> tuple[Model, ...]:
        """List what the ``model`` of the OpenAI and Anthropic calls can be.

        Raises:
            ExpertError: when no answer comes.
        """
        return self._transport.fetch(ApiRequest("GET", "/v1/models"), ModelList).data

    def moe(self) -> MoeActivity:
        """Tell what was counted of the routed experts of the base; nothing changes by it.

        Raises:
            ExpertError: when no answer comes.
        """
        return self._transport.fetch(ApiRequest("GET", "/moe"), MoeActivity)

    def change_moe(self, **options: Unpack[MoeOptions]) -> MoeActivity:
        """Count routed experts otherwise, or let a profile say which stay; tell what holds then.

        Raises:
            UsageError: when that would change nothing, or cannot be.
            IncompatibleError: when the base has none that could be missing, or does not fit.
            NotFoundError: when nothing was learnt of the base.
            ExpertError: when no answer comes.
        """
        return self._transport.fetch(
            ApiRequest("POST", "/moe", drop_unset_options(options)), MoeActivity
        )

    def close(self) -> None:
        """Close every connection."""
        self._transport.close()

    def __enter__(self) -> Self:
        """Begin; connections are opened when they are needed."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close every connection."""
        self.close()
