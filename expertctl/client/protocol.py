"""What can be asked of a server besides the prompt; what is left out is the server's to choose.

When a request is sent again: what the server could not take, after growing, random pauses.

`Server`: where requests go, who asks, how long; and what an answer means.

All that the client with threads and the one with an event loop have in common. Nothing is sent
here.
"""

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeVar
from urllib.parse import quote

import httpx2
import msgspec

from expertctl import __version__
from expertctl.client.result import (
    Document,
    ExpertList,
    InferPiece,
    InferResult,
    InferStarted,
    Job,
    ModelList,
    MoeActivity,
    RouteResult,
    build_response_error,
    sanitise_text,
)
from expertctl.errors import (
    ExpertError,
    RateLimitError,
    RegistryError,
    UnreachableError,
    UsageError,
)


class RouteOptions(TypedDict, total=False):
    """What a plan depends on."""

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


class InferOptions(RouteOptions, total=False):
    """What an answer depends on, and how it is wanted."""

    template: str
    """With ``{prompt}`` and ``{body}``, each at most once."""
    body: str
    context_size: int
    """How many tokens prompt and answer may have together."""
    response_format: Mapping[str, Any]
    """``{"type": "json"}``, ``{"type": "json_schema", "schema": {…}}``, ``{"type": "sql"}`` …"""
    user_id: str
    session_id: str
    cache_key: str
    """Whose earlier prompts may begin this one; seen by nobody with another API key."""
    metadata: Mapping[str, str]
    priority: int
    """0 to 9; 9 is served first."""
    timeout_ms: int
    """After so long the answer is what is there by then."""


class MoeOptions(TypedDict, total=False):
    """What a server is to count of its routed experts, and which profile says which stay."""

    mode: Literal["full", "update", "off"]
    """Another one begins to count again."""
    reset: bool
    """Whether to begin again in any case."""
    profile: str | Mapping[str, Any] | MoeActivity
    """A profile, or the name of the base, for what was learnt of it."""
    pin: int | str
    """So many experts of each layer stay, or, as ``"50%"``, those that half of all tokens want."""
    exchange: float
    """The share of residents that an update may exchange for others of the profile."""


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and after how long; ``chance`` can be given by tests."""

    attempts: int = 3
    """How often a request is sent at most; 1 never repeats it."""
    first_pause: float = 0.5
    longest_pause: float = 8.0
    longest_asked: float = 60.0
    """A server that asks for a longer pause is not waited for."""
    chance: Callable[[], float] = random.random

    def pause_after(self, attempt: int, error: ExpertError, *, repeatable: bool) -> float | None:
        """Return how long to wait after an attempt, the first being 1; None: do not try again.

        What the server refused for now, or never got, may be sent again; what it may have begun
        only if that does no harm.
        """
        if attempt >= self.attempts:
            return None
        asked = _get_requested_pause(error, repeatable=repeatable)
        if asked is None or asked > self.longest_asked:
            return None
        pause = min(self.longest_pause, self.first_pause * 2.0 ** (attempt - 1))
        return max(asked, pause * (0.5 + self.chance() / 2))


def _get_requested_pause(error: ExpertError, *, repeatable: bool) -> float | None:
    """Return for how long the server wants no request, None where another one would not help."""
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
"""Bytes of an answer, or of one event of a stream."""
_KINDS = (
    InferResult,
    RouteResult,
    Job,
    ExpertList,
    ModelList,
    MoeActivity,
    InferStarted,
    InferPiece,
)
_DECODERS: Mapping[type[Document], msgspec.json.Decoder[Document]] = {
    kind: msgspec.json.Decoder(kind) for kind in _KINDS
}
"""Made as this is imported, by one thread: msgspec prepares a class when it is first used."""
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
_Kind = TypeVar(
    "_Kind",
    InferResult,
    RouteResult,
    Job,
    ExpertList,
    ModelList,
    MoeActivity,
    InferStarted,
    InferPiece,
)


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One request of the API."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    body: Mapping[str, Any] | None = None

    @property
    def is_repeatable(self) -> bool:
        """Whether it does no harm twice; a prompt would be answered twice."""
        return self.method != "POST"

    @property
    def what(self) -> str:
        """The request as messages name it."""
        return f"{self.method} {self.path}"


class HttpClientOptions(TypedDict):
    """What both kinds of client are made with."""

    base_url: str
    headers: dict[str, str]
    timeout: httpx2.Timeout
    follow_redirects: bool
    trust_env: bool


@dataclass(frozen=True, slots=True)
class Server:
    """One server, and how it is asked."""

    url: str
    key: str | None = field(repr=False)
    timeout: float

    @property
    def http_options(self) -> HttpClientOptions:
        """What a client of httpx is made with: no proxy, cookie or login of its own."""
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


def find_server(
    base_url: str | None,
    *,
    api_key: str | None,
    timeout: float,
    environment: Mapping[str, str] = os.environ,
) -> Server:
    """Return the server that is meant, by the arguments, else by the environment.

    The key of the environment is for the server of the environment, and never sent to another one.

    Raises:
        UsageError: when the address or the key cannot be one.
    """
    named = environment.get("EXPERT_SERVER") or DEFAULT_URL
    own = base_url is None or _parse_origin(base_url) == _parse_origin(named)
    key = api_key if api_key is not None or not own else environment.get("EXPERT_API_KEY") or None
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key and key):
        raise UsageError("the API key has characters that no key has", hint="copy it again")
    if not timeout > 0:
        raise UsageError(f"a timeout of {timeout} seconds is none", hint="give seconds above 0")
    return Server(_parse_address(base_url or named), key, timeout)


def _parse_origin(text: str) -> tuple[str, str, int | None]:
    url = httpx2.URL(_parse_address(text))
    return url.scheme, url.host, url.port


def _parse_address(text: str) -> str:
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise UsageError(f"{sanitise_text(text)!r} is no address: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host or url.userinfo or url.query:
        raise UsageError(
            f"{sanitise_text(text)!r} is not the address of a server", hint=f"such as {DEFAULT_URL}"
        )
    return str(url).rstrip("/")


def build_body(prompt: str, options: Mapping[str, Any], **more: object) -> dict[str, Any]:
    """Return the body of a request; an option that is None is left out."""
    return {"prompt": prompt, **drop_unset_options(options), **more}


def drop_unset_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a change; an option that is None is left out."""
    return {name: value for name, value in options.items() if value is not None}


def build_job_path(job_id: str) -> str:
    """Return the path of a job.

    Raises:
        UsageError: when no job has such an id.
    """
    if job_id in {"", ".", ".."}:
        raise UsageError(f"no job has the id {job_id!r}")
    return f"/v1/jobs/{quote(job_id, safe='')}"


def encode_request(call: ApiRequest) -> dict[str, Any]:
    """Return the content of a request and its type.

    Raises:
        UsageError: when it cannot be written as JSON.
    """
    if call.body is None:
        return {}
    try:
        content = msgspec.json.encode(call.body)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{call.what}: the request is no JSON: {error}") from error
    return {"content": content, "headers": {"Content-Type": "application/json"}}


def decode_response(body: bytes, kind: type[_Kind], *, what: str) -> _Kind:
    """Read an answer.

    Raises:
        RegistryError: when it is none of this kind.
    """
    try:
        answer = _DECODERS[kind].decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RegistryError(
            f"{what}: the answer is not understood: {error}",
            hint="is that an expertctl server, and of this version?",
        ) from error
    assert isinstance(answer, kind)
    return answer


def build_refusal_error(call: ApiRequest, response: httpx2.Response, body: bytes) -> ExpertError:
    """Return what an answer that is none means."""
    return build_response_error(response.status_code, response.headers, body, what=call.what)


def is_answer(response: httpx2.Response) -> bool:
    """Tell whether an answer is what was asked for."""
    return response.status_code in {200, 202}


class ResponseBuffer:
    """The body of an answer, as far as it came."""

    def __init__(self, what: str) -> None:
        """Begin with nothing."""
        self.data = bytearray()
        self._what = what

    def add(self, chunk: bytes) -> None:
        """Take more of it.

        Raises:
            RegistryError: when it is too much.
        """
        self.data += chunk
        if len(self.data) > MAX_RESPONSE_BYTES:
            raise RegistryError(f"{self._what}: the answer has over {MAX_RESPONSE_BYTES} bytes")


@contextmanager
def translate_network_errors(what: str, server: Server) -> Iterator[None]:
    """Turn what the network does into errors of ours."""
    try:
        yield
    except _NEVER_SENT as error:
        raise UnreachableError(
            f"{what}: {server.url} cannot be reached: {_describe_error(error)}",
            sent=False,
            hint="start one with `expertctl serve`, or give its address as base_url",
        ) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise UnreachableError(f"{what}: the connection broke: {_describe_error(error)}") from error


def _describe_error(error: Exception) -> str:
    return sanitise_text(str(error)) or type(error).__name__
