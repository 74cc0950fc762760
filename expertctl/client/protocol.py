"""What both clients share: request options, retries, server address, encoding and decoding.

`InferStreamState` follows the events of a stream. Nothing is sent here. An option that is left out
gets the server's default.
"""

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeVar, get_args
from urllib.parse import quote

import httpx2
import msgspec

from expertctl import __version__
from expertctl.client.result import (
    Document,
    InferPiece,
    InferResult,
    InferStarted,
    MoeActivity,
    build_response_error,
    build_stream_error,
)
from expertctl.errors import (
    ExpertError,
    NoAnswerError,
    RateLimitError,
    RegistryError,
    UnreachableError,
    UsageError,
    sanitise_text,
)


class RouteOptions(TypedDict, total=False):
    """Options that affect a plan."""

    temperature: float
    max_tokens: int
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    force_experts: Sequence[str]
    """``acme/sql`` or ``acme/sql:0.5``, in order; then no others answer."""
    exclude_experts: Sequence[str]
    max_experts: int
    stop: str | Sequence[str]
    seed: int
    no_experts: bool
    """Whether the base answers alone."""


class InferOptions(RouteOptions, total=False):
    """Options that affect an answer and how it is delivered."""

    template: str
    """With ``{prompt}`` and ``{body}``, each at most once."""
    body: str
    conversation: Mapping[str, Any]
    """What precedes the prompt: ``messages`` in turn, and the ``plan`` of the last answer."""
    truncate: bool
    """Whether the oldest turns, then the end, of a prompt that is too long are cut off."""
    base: str
    """The base that must answer, or ``auto`` for the one that `run` would choose there."""
    context_size: int
    """Most tokens of prompt and answer together."""
    response_format: Mapping[str, Any]
    """``{"type": "json"}``, ``{"type": "json_schema", "schema": {…}}``, ``{"type": "sql"}`` …"""
    user_id: str
    session_id: str
    cache_key: str
    """Allows reuse of the KV cache of earlier prompts with this key; never across API keys."""
    metadata: Mapping[str, str]
    priority: int
    """0 to 9; 9 is served first."""
    timeout_ms: int
    """Then generation stops and the text so far is returned."""


class MoeOptions(TypedDict, total=False):
    """How a server counts its routed experts, and which usage profile selects the resident ones."""

    mode: Literal["full", "update", "off"]
    """A change resets the counters."""
    reset: bool
    """Whether to reset the counters in any case."""
    profile: str | Mapping[str, Any] | MoeActivity
    """A usage profile, or the name of the base for what was learnt of it."""
    pin: int | str
    """Experts to pin per layer: a number, or ``"50%"`` for those that serve half of all tokens."""
    exchange: float
    """The share of resident experts that an update may swap for others of the profile."""


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and after which pauses a request is retried; tests replace ``chance``."""

    attempts: int = 3
    """How often a request is sent at most; 1 never repeats it."""
    first_pause: float = 0.5
    longest_pause: float = 8.0
    longest_asked: float = 60.0
    """Most seconds to wait for a server that asks for a pause."""
    chance: Callable[[], float] = random.random

    def pause_after(self, attempt: int, error: ExpertError, *, repeatable: bool) -> float | None:
        """Return the seconds to wait after an attempt, the first being 1; None: do not retry.

        A request that the server rejected for now or never received is retried; one that it may
        have started only if ``repeatable``.
        """
        if attempt >= self.attempts:
            return None
        requested = _get_requested_pause(error, repeatable=repeatable)
        if requested is None or requested > self.longest_asked:
            return None
        pause = min(self.longest_pause, self.first_pause * 2.0 ** (attempt - 1))
        return max(requested, pause * (0.5 + self.chance() / 2))


def _get_requested_pause(error: ExpertError, *, repeatable: bool) -> float | None:
    """Return the pause that the server asks for; None if a retry would not help."""
    match error:
        case RateLimitError():
            return float(error.retry_after)
        case UnreachableError() if repeatable or not error.sent:
            return error.retry_after or 0.0
        case _:
            return None


DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_SECONDS = 10.0
MAX_RESPONSE_BYTES = 64 << 20
"""Most bytes of a response, or of one event of a stream."""
_DECODERS: Mapping[type[object], msgspec.json.Decoder[Document]] = {
    kind: msgspec.json.Decoder(kind) for kind in get_args(Document)
}
"""Created at import, by one thread: msgspec prepares a class when it is first used."""
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
_Kind = TypeVar("_Kind", bound=Document)


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One request of the API."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    body: Mapping[str, Any] | None = None

    @property
    def is_repeatable(self) -> bool:
        """Whether it may be sent twice; a prompt would be answered twice."""
        return self.method != "POST"

    @property
    def what(self) -> str:
        """The request as messages name it."""
        return f"{self.method} {self.path}"


class HttpClientOptions(TypedDict):
    """The arguments of both kinds of HTTP client."""

    base_url: str
    headers: dict[str, str]
    timeout: httpx2.Timeout
    follow_redirects: bool
    trust_env: bool


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a server, the API key and the timeout."""

    url: str
    key: str | None = field(repr=False)
    timeout: float

    @property
    def http_options(self) -> HttpClientOptions:
        """The arguments of an httpx client: no proxy, cookie or login from the environment."""
        headers = {"User-Agent": f"expertctl/{__version__}", "Accept-Encoding": "identity"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        return {
            "base_url": self.url,
            "headers": headers,
            "timeout": httpx2.Timeout(self.timeout, connect=min(self.timeout, CONNECT_SECONDS)),
            "follow_redirects": False,
            "trust_env": False,
        }


def find_server(base_url: str | None, *, api_key: str | None, timeout: float) -> Server:
    """Return the server that the arguments name, else the environment.

    The key of the environment belongs to the server of the environment and is sent to no other.

    Raises:
        UsageError: when the address or the key is invalid.
    """
    named = os.environ.get("EXPERT_SERVER") or DEFAULT_URL
    own = base_url is None or _parse_origin(base_url) == _parse_origin(named)
    key = api_key if api_key is not None or not own else os.environ.get("EXPERT_API_KEY") or None
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key and key):
        raise UsageError("the API key has invalid characters", hint="copy it again")
    if not timeout > 0:
        raise UsageError(
            f"a timeout of {timeout} seconds is not possible", hint="give seconds above 0"
        )
    return Server(parse_address(base_url or named), key, timeout)


def _parse_origin(text: str) -> tuple[str, str, int | None]:
    url = httpx2.URL(parse_address(text))
    return url.scheme, url.host, url.port


def parse_address(text: str) -> str:
    """Return the canonical address of a server.

    Raises:
        UsageError: when it is none; a password in it is not repeated.
    """
    shown = sanitise_text(text.rpartition("@")[2].partition("?")[0])
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise UsageError(f"{shown!r} is not an address: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host or url.userinfo or url.query:
        raise UsageError(f"{shown!r} is not the address of a server", hint=f"such as {DEFAULT_URL}")
    return str(url).rstrip("/")


def build_body(prompt: str, options: Mapping[str, Any], **more: object) -> dict[str, Any]:
    """Return the body of a request; an option that is None is left out."""
    return {"prompt": prompt, **drop_unset_options(options), **more}


def drop_unset_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those that are None."""
    return {name: value for name, value in options.items() if value is not None}


def build_job_path(job_id: str) -> str:
    """Return the path of a job.

    Raises:
        UsageError: when no job can have this id.
    """
    if job_id in {"", ".", ".."}:
        raise UsageError(f"no job has the id {job_id!r}")
    return f"/v1/jobs/{quote(job_id, safe='')}"


def encode_request(call: ApiRequest) -> dict[str, Any]:
    """Return the content of a request and its headers.

    Raises:
        UsageError: when it cannot be encoded as JSON.
    """
    if call.body is None:
        return {}
    try:
        content = msgspec.json.encode(call.body)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{call.what}: the request cannot be encoded as JSON: {error}") from error
    return {"content": content, "headers": {"Content-Type": "application/json"}}


def decode_response(body: bytes, kind: type[_Kind], *, what: str) -> _Kind:
    """Decode a response.

    Raises:
        RegistryError: when it is not a response of this kind.
    """
    try:
        answer = _DECODERS[kind].decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RegistryError(
            f"{what}: the response cannot be decoded: {error}",
            hint="is that an expertctl server, and of this version?",
        ) from error
    assert isinstance(answer, kind)
    return answer


def build_refusal_error(call: ApiRequest, response: httpx2.Response, body: bytes) -> ExpertError:
    """Return the error of a response that is not a success."""
    return build_response_error(response.status_code, response.headers, body, what=call.what)


def is_answer(response: httpx2.Response) -> bool:
    """Return whether a response is a success."""
    return response.status_code in {200, 202}


class ResponseBuffer:
    """The body of a response, as far as it was received."""

    def __init__(self, what: str) -> None:
        """Start empty."""
        self.data = bytearray()
        self._what = what

    def add(self, chunk: bytes) -> None:
        """Append a chunk.

        Raises:
            RegistryError: when the body exceeds `MAX_RESPONSE_BYTES`.
        """
        self.data += chunk
        if len(self.data) > MAX_RESPONSE_BYTES:
            raise RegistryError(f"{self._what}: the response has over {MAX_RESPONSE_BYTES} bytes")


@contextmanager
def translate_network_errors(what: str, server: Server) -> Iterator[None]:
    """Raise network errors of httpx as `UnreachableError`."""
    try:
        yield
    except _NEVER_SENT as error:
        raise UnreachableError(
            f"{what}: {server.url} cannot be reached: {_describe_error(error)}",
            sent=False,
            hint="start one with `expertctl serve`, or name another (EXPERT_SERVER, base_url)",
        ) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise UnreachableError(f"{what}: the connection broke: {_describe_error(error)}") from error


def _describe_error(error: Exception) -> str:
    return sanitise_text(str(error)) or type(error).__name__


INFER_REQUEST = "POST /v1/infer"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of generated text that will not change."""

    text: str


class InferStreamState:
    """The state of one stream, updated by its events."""

    def __init__(self) -> None:
        """Start before the first event."""
        self.started: InferStarted | None = None
        self.result: InferResult | None = None
        self.document = b""
        """The complete answer as the server sent it."""

    def handle_event(self, event: httpx2.ServerSentEvent) -> Chunk | None:
        """Handle an event; return its text, if any. Unknown events of newer servers are ignored.

        Raises:
            ExpertError: when the event says that the request failed.
        """
        data = event.data.encode("utf-8", "replace")
        match event.event:
            case "started":
                self.started = decode_response(data, InferStarted, what=INFER_REQUEST)
            case "piece":
                return Chunk(decode_response(data, InferPiece, what=INFER_REQUEST).text)
            case "finished":
                self.result = decode_response(data, InferResult, what=INFER_REQUEST)
                self.document = data
            case "failed" | "error":
                raise build_stream_error(data)
            case _:
                pass  # an event of a newer server
        return None

    def require_result(self) -> InferResult:
        """Return the complete answer.

        Raises:
            NoAnswerError: when the stream is not at its end.
        """
        if self.result is None:
            raise NoAnswerError("the answer is not complete yet", hint="read the stream to its end")
        return self.result

    def check_complete(self) -> None:
        """Check the state at the end of the events.

        Raises:
            UnreachableError: when the answer is not complete.
        """
        if self.result is None:
            raise UnreachableError(f"{INFER_REQUEST}: the answer was cut off", hint="ask again")
