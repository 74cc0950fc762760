"""`Server`: where requests go, who asks, how long; and what an answer means.

All that the client with threads and the one with an event loop have in common. Nothing is sent
here.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeVar
from urllib.parse import quote

import httpx2
import msgspec

from expertctl import __version__
from expertctl.client.refusal import refusal, shown
from expertctl.client.result import (
    Document,
    Experts,
    InferResult,
    Job,
    Models,
    MoeActivity,
    Piece,
    RouteResult,
    Started,
)
from expertctl.errors import ExpertError, RegistryError, UnreachableError, UsageError

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_SECONDS = 10.0
MAX_ANSWER = 64 << 20
"""Bytes of an answer, or of one event of a stream."""
_KINDS = (InferResult, RouteResult, Job, Experts, Models, MoeActivity, Started, Piece)
_READERS: Mapping[type[Document], msgspec.json.Decoder[Document]] = {
    kind: msgspec.json.Decoder(kind) for kind in _KINDS
}
"""Made as this is imported, by one thread: msgspec prepares a class when it is first used."""
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
_Kind = TypeVar(
    "_Kind", InferResult, RouteResult, Job, Experts, Models, MoeActivity, Started, Piece
)


@dataclass(frozen=True, slots=True)
class Call:
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


class Connecting(TypedDict):
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
    def connecting(self) -> Connecting:
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
    own = base_url is None or _origin(base_url) == _origin(named)
    key = api_key if api_key is not None or not own else environment.get("EXPERT_API_KEY") or None
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key and key):
        raise UsageError("the API key has characters that no key has", hint="copy it again")
    if not timeout > 0:
        raise UsageError(f"a timeout of {timeout} seconds is none", hint="give seconds above 0")
    return Server(_address(base_url or named), key, timeout)


def _origin(text: str) -> tuple[str, str, int | None]:
    url = httpx2.URL(_address(text))
    return url.scheme, url.host, url.port


def _address(text: str) -> str:
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL as error:
        raise UsageError(f"{shown(text)!r} is no address: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host or url.userinfo or url.query:
        raise UsageError(
            f"{shown(text)!r} is not the address of a server", hint=f"such as {DEFAULT_URL}"
        )
    return str(url).rstrip("/")


def body_of(prompt: str, options: Mapping[str, Any], **more: object) -> dict[str, Any]:
    """Return the body of a request; an option that is None is left out."""
    return {"prompt": prompt, **changes_of(options), **more}


def changes_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a change; an option that is None is left out."""
    return {name: value for name, value in options.items() if value is not None}


def job_path(job_id: str) -> str:
    """Return the path of a job.

    Raises:
        UsageError: when no job has such an id.
    """
    if job_id in {"", ".", ".."}:
        raise UsageError(f"no job has the id {job_id!r}")
    return f"/v1/jobs/{quote(job_id, safe='')}"


def encoded(call: Call) -> dict[str, Any]:
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


def decoded(body: bytes, kind: type[_Kind], *, what: str) -> _Kind:
    """Read an answer.

    Raises:
        RegistryError: when it is none of this kind.
    """
    try:
        answer = _READERS[kind].decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RegistryError(
            f"{what}: the answer is not understood: {error}",
            hint="is that an expertctl server, and of this version?",
        ) from error
    assert isinstance(answer, kind)
    return answer


def refused(call: Call, response: httpx2.Response, body: bytes) -> ExpertError:
    """Return what an answer that is none means."""
    return refusal(response.status_code, response.headers, body, what=call.what)


def is_answer(response: httpx2.Response) -> bool:
    """Tell whether an answer is what was asked for."""
    return response.status_code in {200, 202}


class Body:
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
        if len(self.data) > MAX_ANSWER:
            raise RegistryError(f"{self._what}: the answer has over {MAX_ANSWER} bytes")


@contextmanager
def translated(what: str, server: Server) -> Iterator[None]:
    """Turn what the network does into errors of ours."""
    try:
        yield
    except _NEVER_SENT as error:
        raise UnreachableError(
            f"{what}: {server.url} cannot be reached: {_fact(error)}",
            sent=False,
            hint="start one with `expertctl serve`, or give its address as base_url",
        ) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise UnreachableError(f"{what}: the connection broke: {_fact(error)}") from error


def _fact(error: Exception) -> str:
    return shown(str(error)) or type(error).__name__
