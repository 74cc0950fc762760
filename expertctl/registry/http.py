"""`RegistryHttp`: HTTP requests to registries, with login, redirects, retries and bounded answers.

A login is sent only to the scheme, host and port it was made for: never to the target of a
redirect, nor after one that leads back. Nothing is sent at all while offline.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urljoin

import httpx2

from expertctl import __version__
from expertctl.errors import Notify, OfflineError, RegistryError, UnreachableError, sanitise_text
from expertctl.registry.address import NetworkScope, RegistryAddress, classify_host
from expertctl.registry.credentials import (
    MAX_ANSWER,
    Credential,
    CredentialSource,
    CredentialStore,
    LoginSessions,
)
from expertctl.registry.errors import MAX_ERROR_BYTES, RetrySchedule, make_response_error
from expertctl.registry.transport import RegistryTransport, Timeouts, translate_errors
from expertctl.settings import Settings

LOG = logging.getLogger("expertctl.registry")
MAX_REDIRECTS = 5
MAX_URL = 16 << 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_SAFE_METHODS = frozenset({"GET", "HEAD"})
_IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "PUT", "DELETE"})

OpenChunks = Callable[[], Iterator[bytes]]
"""Starts a body anew: a request may be sent again after a login or a broken connection."""


@dataclass(frozen=True, slots=True)
class RegistryRequest:
    """One request to a registry."""

    method: str
    address: RegistryAddress
    target: str
    """Path and query, or a whole URL that the registry gave."""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | OpenChunks | None = None
    scope: str = ""
    """The scope of the token to request: ``repository:acme/sql:pull``."""

    @property
    def what(self) -> str:
        """The request as messages name it, without a query that may be secret."""
        return f"{self.method} {sanitise_text(self.target.partition('?')[0], 200)}"


@dataclass(frozen=True, slots=True)
class RegistryResponse:
    """A complete answer, its body within the requested bound."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    url: str


@dataclass(frozen=True, slots=True)
class StreamedResponse:
    """An answer whose body can be read once."""

    status: int
    headers: Mapping[str, str]
    url: str
    chunks: Iterator[bytes]
    """Raises `UnreachableError` where the connection breaks."""


class RegistryHttp:
    """Sends requests to registries; a context manager, usable from any number of threads."""

    def __init__(
        self,
        credentials: CredentialSource | None = None,
        *,
        environment: Mapping[str, str] = os.environ,
        ca_file: Path | None = None,
        offline: bool = False,
        timeouts: Timeouts | None = None,
        retries: RetrySchedule | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """Store how to reach registries; ``transport`` replaces sockets in tests."""
        self._credentials = credentials
        self._environment = environment
        self._offline = offline
        self.timeouts = timeouts or Timeouts()
        self.retries = retries or RetrySchedule()
        self._transport = transport or RegistryTransport(
            timeouts=self.timeouts, ca_file=ca_file, environment=environment
        )
        self._logins = LoginSessions(self._find_credential, self._fetch_token)
        self._found: dict[str, Credential | None] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        """Return self; connections are opened when they are needed."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close every connection."""
        self._transport.close()

    def interrupt(self) -> None:
        """End the waits of other threads at once; they get an `UnreachableError`."""
        if isinstance(self._transport, RegistryTransport):
            self._transport.interrupt()

    @contextmanager
    def interrupt_on_ctrl_c(self) -> Iterator[None]:
        """On Ctrl-C end the waits of other threads, and refuse their further requests.

        Enter it after the pool of these threads, which waits for them on exit.
        """
        try:
            yield
        except KeyboardInterrupt:
            self._stopped.set()
            self.interrupt()
            raise

    def has_authenticated(self, address: RegistryAddress) -> bool:
        """Tell whether a registry was sent a login, or at least an anonymous token."""
        return self._logins.has_sent_login(address)

    def request(
        self,
        call: RegistryRequest,
        *,
        max_bytes: int,
        accept: Collection[int] = frozenset({200}),
        repeatable: bool | None = None,
        attempts: int | None = None,
    ) -> RegistryResponse:
        """Send a request and read its answer; a repeatable request is retried.

        By default GET, HEAD, PUT and DELETE are repeatable, and others when they cannot have
        arrived; the number of attempts is that of `RetrySchedule`.

        Raises:
            UnreachableError: when the registry cannot be reached, or not for long enough.
            ExpertError: for a refusal, by its status; `NotFoundError` for 404.
            RegistryError: when the answer is too large or not understood.
        """
        again = call.method in _IDEMPOTENT_METHODS if repeatable is None else repeatable
        retries = replace(self.retries, attempts=attempts) if attempts else self.retries
        return retries.run(
            lambda: self._request_once(call, max_bytes, accept),
            repeatable=again,
            stop=self._stopped,
        )

    @contextmanager
    def open_stream(
        self, call: RegistryRequest, *, accept: Collection[int] = frozenset({200})
    ) -> Iterator[StreamedResponse]:
        """Send a request, once, and return its answer as it arrives.

        Raises:
            UnreachableError: also while the body is read; the caller decides whether to retry.
            ExpertError: as `request`.
        """
        response = self._open_response(call, accept)
        try:
            yield StreamedResponse(
                response.status_code,
                _response_headers(response),
                str(response.url),
                self._iter_chunks(response),
            )
        finally:
            response.close()

    def _request_once(
        self, call: RegistryRequest, max_bytes: int, accept: Collection[int]
    ) -> RegistryResponse:
        response = self._open_response(call, accept)
        try:
            body = self._read(response, max_bytes)
            return RegistryResponse(
                response.status_code, _response_headers(response), body, str(response.url)
            )
        finally:
            response.close()

    def _open_response(self, call: RegistryRequest, accept: Collection[int]) -> httpx2.Response:
        """Return an answer with one of the accepted statuses, its body unread."""
        response = self._follow_redirects(call)
        if response.status_code in accept:
            return response
        try:
            body = self._read_error(response)
        finally:
            response.close()
        host = call.address.host
        status, headers = response.status_code, _response_headers(response)
        raise make_response_error(status, headers, body, host=host, what=call.what)

    def _follow_redirects(self, call: RegistryRequest) -> httpx2.Response:
        """Send a request and follow redirects, without the login once one left the registry."""
        url = _resolve_url(f"{call.address.url}/", call.target, call.address)
        home, seen = call.address.url, {str(url)}
        at_home = _url_origin(url) == home
        allowed: frozenset[NetworkScope] | None = None
        for _ in range(MAX_REDIRECTS + 1):
            if at_home:
                response = self._send_authenticated(call, url)
            else:
                leads_home = _url_origin(url) == home
                response = self._send(call, url, None, allowed=None if leads_home else allowed)
            if response.status_code not in _REDIRECTS:
                return response
            location = response.headers.get("location", "")
            self._discard_response(response)
            if allowed is None:
                allowed = _find_reachable_scopes(call.address, response)
            url = _resolve_redirect(call, url, location, allowed)
            if str(url) in seen:
                raise RegistryError(f"{call.address.host}: {call.what}: redirects in a loop")
            seen.add(str(url))
            at_home = at_home and _url_origin(url) == home
        message = f"{call.address.host}: {call.what}: more than {MAX_REDIRECTS} redirects"
        raise RegistryError(message)

    def _send_authenticated(self, call: RegistryRequest, url: httpx2.URL) -> httpx2.Response:
        shown_first = self._logins.initial_authorization(call.address, call.scope)
        response = self._send(call, url, shown_first)
        if response.status_code != 401:
            return response
        header = ", ".join(response.headers.get_list("www-authenticate"))
        wanted = self._logins.answer_challenge(
            call.address,
            call.scope,
            header,
            refused=shown_first,
            reachable=_find_reachable_scopes(call.address, response),
        )
        if wanted is None:
            return response
        self._discard_response(response)
        return self._send(call, url, wanted)

    def _send(
        self,
        call: RegistryRequest,
        url: httpx2.URL,
        authorization: str | None,
        *,
        allowed: frozenset[NetworkScope] | None = None,
    ) -> httpx2.Response:
        """Send one request; to addresses of ``allowed`` scopes only, where they are given."""
        if self._stopped.is_set():
            raise RegistryError(f"{call.address.host}: {call.what}: stopped")
        if self._offline:
            raise OfflineError(
                f"{call.address.host} is needed, and expertctl is offline",
                hint="leave out --offline, EXPERT_OFFLINE and the setting `offline`",
            )
        headers = {
            **call.headers,
            "Accept-Encoding": "identity",
            "User-Agent": f"expertctl/{__version__}",
        }
        if authorization:
            headers["Authorization"] = authorization
        body = call.body() if callable(call.body) else call.body
        extensions = {} if allowed is None else {"allowed_scopes": allowed}
        request = httpx2.Request(
            call.method, url, headers=headers, content=body, extensions=extensions
        )
        return self._send_logged(request)

    def _send_logged(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request and log its outcome, without headers and query, which may be secret."""
        url, started, outcome = request.url, time.monotonic(), "no answer"
        try:
            with translate_errors(url.netloc.decode("ascii", "replace")):
                response = self._transport.handle_request(request)
            outcome = f"status {response.status_code}"
        finally:
            path = sanitise_text(url.raw_path.decode("ascii", "replace").partition("?")[0], 200)
            ms = (time.monotonic() - started) * 1e3
            LOG.info("%s %s%s: %s, %.0f ms", request.method, _url_origin(url), path, outcome, ms)
        response.request = request
        return response

    def _read(self, response: httpx2.Response, max_bytes: int) -> bytes:
        name = response.url.netloc.decode("ascii", "replace")
        length = response.headers.get("content-length", "")
        too_long = RegistryError(f"{name}: an answer of more than {max_bytes} bytes")
        reads = response.request.method != "HEAD"
        if reads and length.isdigit() and int(length[:20]) > max_bytes:
            raise too_long
        parts, size = [], 0
        deadline = time.monotonic() + self.timeouts.answer
        for chunk in self._iter_chunks(response):
            parts.append(chunk)
            size += len(chunk)
            if size > max_bytes:
                raise too_long
            if time.monotonic() > deadline:
                raise UnreachableError(f"{name}: the answer takes too long")
        return b"".join(parts)

    def _iter_chunks(self, response: httpx2.Response) -> Iterator[bytes]:
        """Yield a body as it arrives, as long as it arrives fast enough."""
        name = response.url.netloc.decode("ascii", "replace")
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in {"identity", ""}:
            raise RegistryError(
                f"{name}: its answer is compressed ({sanitise_text(encoding, 40)}), which was not "
                "requested",
                hint="a proxy may do that; the registry must send packages uncompressed",
            )
        started, size = time.monotonic(), 0
        with translate_errors(name):
            for chunk in response.iter_raw():
                size += len(chunk)
                if time.monotonic() - started > self.timeouts.body_timeout(size):
                    raise UnreachableError(f"{name}: the answer comes too slowly")
                yield chunk

    def _read_error(self, response: httpx2.Response) -> bytes:
        """Return the body of a refusal, or nothing: the status alone is clear enough."""
        try:
            return self._read(response, MAX_ERROR_BYTES)
        except RegistryError:
            return b""

    def _discard_response(self, response: httpx2.Response) -> None:
        """Read and discard an answer, so that its connection can be reused."""
        try:
            self._read_error(response)
        finally:
            response.close()

    def _find_credential(self, address: RegistryAddress) -> Credential | None:
        with self._lock:
            if address.url not in self._found:
                store = self._credentials
                found = store.find_credential(address, self._environment) if store else None
                self._found[address.url] = found
            return self._found[address.url]

    def _fetch_token(
        self, url: str, authorization: str | None, allowed: frozenset[NetworkScope] | None
    ) -> bytes:
        """Ask a realm, which may not redirect."""
        target = httpx2.URL(url)
        address = RegistryAddress.parse(_url_origin(target), allow_http=True)
        call = RegistryRequest("GET", address, url)
        response = self._send(call, target, authorization, allowed=allowed)
        try:
            if response.status_code == 200:
                return self._read(response, MAX_ANSWER)
            body = self._read_error(response)
        finally:
            response.close()
        what = "asking for a token"
        status = 401 if response.status_code in {400, 403} else response.status_code
        raise make_response_error(
            status, _response_headers(response), body, host=address.host, what=what
        )


def open_http(
    settings: Settings,
    credentials: CredentialSource | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    notify: Notify | None = None,
) -> RegistryHttp:
    """Return a client with the user's settings and stored logins; ``with`` closes it."""
    return RegistryHttp(
        credentials or CredentialStore(settings.home.credentials),
        environment=environment,
        ca_file=settings.ca_file,
        offline=settings.offline,
        retries=RetrySchedule(tell=notify),
    )


def _find_reachable_scopes(
    address: RegistryAddress, response: httpx2.Response
) -> frozenset[NetworkScope]:
    """Return where a registry may send a client: to public addresses, and to its own scope.

    Its scope is known by its name, else by the address that answered.
    """
    answered: NetworkScope = response.extensions.get("scope", "global")
    return frozenset({"global", classify_host(address.hostname) or answered})


def _resolve_redirect(
    call: RegistryRequest, url: httpx2.URL, location: str, allowed: frozenset[NetworkScope]
) -> httpx2.URL:
    """Return the target of a redirect, if it is allowed; names are checked once resolved."""
    host = call.address.host
    if call.method not in _SAFE_METHODS:
        raise RegistryError(f"{host}: {call.what}: redirected, which is not followed")
    if not location or len(location) > MAX_URL:
        raise RegistryError(f"{host}: {call.what}: redirected without a target")
    target = _resolve_url(str(url), location, call.address)
    named = sanitise_text(f"{target.scheme}://{target.host}", 200)
    if target.scheme == "http" and url.scheme == "https":
        raise RegistryError(f"{host}: {call.what}: redirected to {named}, which is not encrypted")
    if _url_origin(target) == call.address.url:
        return target
    scope = classify_host(target.host)
    bare = target.scheme == "http" and scope == "global"  # no name, no certificate: no storage
    if scope is not None and (scope not in allowed or bare):
        raise RegistryError(f"{host}: {call.what}: redirected to {named}, within a network")
    return target


def _resolve_url(base: str, text: str, address: RegistryAddress) -> httpx2.URL:
    """Resolve a path or URL relative to ``base``."""
    try:
        url = httpx2.URL(urljoin(base, text))
        if url.scheme in {"http", "https"} and url.host and not url.userinfo:
            return url
    except (httpx2.InvalidURL, ValueError):
        pass
    raise RegistryError(
        f"{address.host}: it names {sanitise_text(text, 200)!r}, which is not a plain URL"
    )


def _url_origin(url: httpx2.URL) -> str:
    """Return scheme, host and port in the form of `RegistryAddress.url`."""
    host = url.raw_host.decode("ascii")
    name = f"[{host}]" if ":" in host else host
    default = {"https": 443, "http": 80}[url.scheme]
    port = "" if url.port in {None, default} else f":{url.port}"
    return f"{url.scheme}://{name}{port}"


def _response_headers(response: httpx2.Response) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}
