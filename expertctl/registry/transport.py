"""`RegistryTransport`: connections to registries: TLS, proxies, and time limits on slow answers.

Certificates are always verified: no option turns that off. Addresses of this machine are reached
directly, whatever the environment says about proxies.
"""

import re
import ssl
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import SHUT_RDWR, SOCK_STREAM, getaddrinfo, socket
from typing import Any
from urllib.parse import unquote

import httpcore2
import httpx2

from expertctl.errors import RegistryError, UnreachableError, UsageError, to_single_line
from expertctl.reference import is_loopback
from expertctl.registry.address import NetworkScope, classify_address, find_forbidden_address

MIN_BYTES = 1024
"""How many bytes must arrive within `Timeouts.stall` seconds for an answer not to be stalled."""
MAX_HEADER_BYTES = 1 << 20
"""The most bytes before a body: headers, and any number of ``100 Continue``."""
MAX_CONNECTIONS = 16
MAX_ADDRESSES = 4
"""How many addresses of the target of a redirect are tried."""
_PoolKey = tuple[str, frozenset[NetworkScope] | None]
_ERRNO = re.compile(r"^\[Errno -?\d+\] ")
_SAFE_METHODS = frozenset({"GET", "HEAD"})
_TRANSIENT_ERRORS = (
    httpcore2.NetworkError,
    httpcore2.TimeoutException,
    httpcore2.ProtocolError,
    httpcore2.ProxyError,
    httpx2.TransportError,
)
_NOT_SENT_ERRORS = (httpcore2.ConnectError, httpcore2.ConnectTimeout, httpcore2.ProxyError)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits, in seconds."""

    connect: float = 10.0
    stall: float = 30.0
    """Without a byte sent, or `MIN_BYTES` received."""
    answer: float = 300.0
    """For a complete answer that is no blob, and until the server has processed a request body."""
    rate: float = 1024.0
    """The fewest bytes a second of any body, averaged from `stall` seconds on."""

    def body_timeout(self, size: int) -> float:
        """Return how long a body of ``size`` bytes may take."""
        return self.stall + size / self.rate


class RegistryTransport(httpx2.BaseTransport):
    """Sends one request and returns its answer, unread: no redirect, cookie or login of its own."""

    def __init__(
        self, *, timeouts: Timeouts, ca_file: Path | None, environment: Mapping[str, str]
    ) -> None:
        """Store how to connect; nothing is opened yet."""
        self._timeouts = timeouts
        self._ca_file = ca_file
        self._environment = environment
        self._context: ssl.SSLContext | None = None
        self._pools: dict[_PoolKey, httpcore2.ConnectionPool] = {}
        self._lock = threading.Lock()
        self._open = _OpenStreams()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; failures are for `translate_errors`."""
        url, limits = request.url, self._timeouts
        target = httpcore2.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        patience = limits.stall if request.method in _SAFE_METHODS else limits.answer
        waits = {"connect": limits.connect, "read": patience, "write": limits.stall}
        assert isinstance(request.stream, Iterable)
        raw = httpcore2.Request(
            method=request.method,
            url=target,
            headers=request.headers.raw,
            content=request.stream,
            extensions={"timeout": waits},
        )
        proxy = find_proxy(url, self._environment) or ""
        allowed: frozenset[NetworkScope] | None = request.extensions.get("allowed_scopes")
        answer = self._get_pool(proxy, None if proxy else allowed).handle_request(raw)
        stream = answer.extensions.get("network_stream")
        known: dict[str, Any] = {}
        if isinstance(stream, _WatchedStream):
            stream.start_body()
            known = {} if proxy else {"scope": stream.scope}
        return httpx2.Response(
            answer.status,
            headers=answer.headers,
            stream=_ResponseStream(answer),
            request=request,
            extensions=known,
        )

    def interrupt(self) -> None:
        """Break all connections, so that waiting threads fail at once."""
        self._open.interrupt()

    def close(self) -> None:
        """Close every connection."""
        for pool in self._pools.values():
            pool.close()
        self._pools = {}

    def _get_pool(
        self, proxy: str, allowed: frozenset[NetworkScope] | None
    ) -> httpcore2.ConnectionPool:
        key = proxy, allowed
        with self._lock:
            if key not in self._pools:
                self._pools[key] = self._make_pool(proxy, allowed)
            return self._pools[key]

    def _make_pool(
        self, proxy: str, allowed: frozenset[NetworkScope] | None
    ) -> httpcore2.ConnectionPool:
        if self._context is None:
            self._context = _make_tls_context(self._ca_file)
        backend = _WatchedBackend(self._timeouts.stall, self._open, allowed)
        if not proxy:
            return httpcore2.ConnectionPool(
                ssl_context=self._context, max_connections=MAX_CONNECTIONS, network_backend=backend
            )
        url, auth = _parse_proxy(proxy)
        return httpcore2.HTTPProxy(
            url,
            proxy_auth=auth,
            ssl_context=self._context,
            proxy_ssl_context=self._context if url.scheme == b"https" else None,
            max_connections=MAX_CONNECTIONS,
            network_backend=backend,
        )


@contextmanager
def translate_errors(host: str) -> Iterator[None]:
    """Turn the connection errors of libraries into errors of ours.

    Raises:
        UnreachableError: when a connection cannot be made or breaks.
        RegistryError: when the other side cannot prove its identity.
    """
    try:
        yield
    except _TRANSIENT_ERRORS as error:
        untrusted = _find_certificate_error(error)
        if untrusted is not None:
            raise RegistryError(
                f"{host}: its certificate is not accepted: {untrusted.verify_message}",
                hint="if it is your own, name the CA that signed it, `expertctl config set ca_file "
                "FILE`; it must name the host as subjectAltName",
            ) from error
        sent = not isinstance(error, _NOT_SENT_ERRORS)
        hint = "" if sent else _connection_hint(host)
        if isinstance(error, httpcore2.RemoteProtocolError) and _is_on_this_machine(host):
            hint = f"does it serve https? then write https://{host}"
        raise UnreachableError(f"{host}: {_failure_reason(error)}", sent=sent, hint=hint) from error


def find_proxy(url: httpx2.URL, environment: Mapping[str, str]) -> str | None:
    """Return the proxy that the environment names for a URL; never one for this machine."""
    if is_loopback(url.host):
        return None
    excluded = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    if any(_is_proxy_exempt(entry.strip().lower(), url) for entry in excluded.split(",")):
        return None
    names = (f"{url.scheme}_proxy", f"{url.scheme}_proxy".upper(), "all_proxy", "ALL_PROXY")
    return next((value for name in names if (value := environment.get(name))), None)


def _is_proxy_exempt(entry: str, url: httpx2.URL) -> bool:
    name, _, port = entry.partition(":") if entry.count(":") == 1 else (entry, "", "")
    if port and port != str(url.port or (443 if url.scheme == "https" else 80)):
        return False
    bare = name.removeprefix("*").removeprefix(".")
    return entry == "*" or (bare != "" and (url.host == bare or url.host.endswith(f".{bare}")))


def _parse_proxy(text: str) -> tuple[httpcore2.URL, tuple[str, str] | None]:
    try:
        url = httpx2.URL(text if "://" in text else f"http://{text}")
    except httpx2.InvalidURL as error:
        raise UsageError(f"the proxy of the environment is not a URL: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise UsageError(
            f"the proxy of the environment, {url.scheme}://{url.host}, is not an HTTP proxy",
            hint="set HTTPS_PROXY to http://host:port",
        )
    auth = (unquote(url.username), unquote(url.password)) if url.username else None
    target = httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=b"/")
    return target, auth


def _make_tls_context(ca_file: Path | None) -> ssl.SSLContext:
    context = httpcore2.default_ssl_context()
    context.hostname_checks_common_name = False  # RFC 9525: only subjectAltName names a host
    if ca_file is not None:
        load_certificates(context, ca_file)
    return context


def load_certificates(context: ssl.SSLContext, ca_file: Path | str) -> None:
    """Trust the certificates of the setting `ca_file`, too.

    Raises:
        UsageError: when there are none.
    """
    try:
        context.load_verify_locations(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"{ca_file}: no certificates can be read there",
            hint="ca_file (EXPERT_CA_FILE) names a file of PEM certificates",
        ) from error


def _find_certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _is_on_this_machine(host: str) -> bool:
    return is_loopback(httpx2.URL(f"http://{host}").host)


def _connection_hint(host: str) -> str:
    if _is_on_this_machine(host):
        return "is a registry running there? `expertctl registry serve DIR` starts one"
    return "is that its address? proxies are named by HTTPS_PROXY"


def _failure_reason(error: Exception) -> str:
    match error:
        case httpcore2.ConnectTimeout():
            return "no connection in time"
        case httpcore2.ReadTimeout():
            return "the answer stalled"
        case httpcore2.WriteTimeout():
            return "it stopped reading the request"
        case httpcore2.ProxyError():
            return f"the proxy refuses: {_error_line(error)}"
        case httpcore2.ConnectError():
            return f"no connection: {_error_line(error)}"
        case httpcore2.ProtocolError():
            return f"the answer broke off or is not HTTP: {_error_line(error)}"
        case _:
            return f"the connection broke: {_error_line(error)}"


def _error_line(error: Exception) -> str:
    plain = _ERRNO.sub("", str(error))
    text = to_single_line(plain)
    return text[:200] or type(error).__name__


class _ResponseStream(httpx2.SyncByteStream):
    """The body of an answer, as it arrives."""

    def __init__(self, answer: httpcore2.Response) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        assert isinstance(self._answer.stream, Iterable)
        yield from self._answer.stream

    def close(self) -> None:
        self._answer.close()


class _OpenStreams:
    """The connections in use, so that all can be broken at once."""

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[_WatchedStream] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, stream: "_WatchedStream") -> None:
        """Track a connection for as long as it is used."""
        with self._lock:
            self._streams.add(stream)

    def interrupt(self) -> None:
        """Break every connection."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.interrupt()


class _WatchedBackend(httpcore2.NetworkBackend):
    """Opens watched connections, only to addresses of allowed scopes, if given."""

    def __init__(
        self, stall: float, streams: _OpenStreams, allowed: frozenset[NetworkScope] | None
    ) -> None:
        self._backend = httpcore2.SyncBackend()
        self._stall = stall
        self._streams = streams
        self._allowed = allowed

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.NetworkStream:
        connect = partial(
            self._backend.connect_tcp,
            port=port,
            timeout=timeout,
            local_address=local_address,
            socket_options=socket_options,
        )
        allowed = self._allowed
        *others, last = [host] if allowed is None else _resolve_checked(host, port, allowed)
        for target in others:
            with suppress(httpcore2.ConnectError, httpcore2.ConnectTimeout):
                return self._wrap(connect(target))
        return self._wrap(connect(last))

    def _wrap(self, stream: httpcore2.NetworkStream) -> "_WatchedStream":
        return self.watch(stream, scope=_peer_scope(stream))

    def watch(self, stream: httpcore2.NetworkStream, *, scope: NetworkScope) -> "_WatchedStream":
        """Track a connection for as long as it is used."""
        watched = _WatchedStream(stream, self._stall, self, scope=scope)
        self._streams.add(watched)
        return watched


def _resolve_checked(host: str, port: int, allowed: frozenset[NetworkScope]) -> list[str]:
    """Return the addresses to try: resolved once, so that they cannot change after the check."""
    try:
        found = getaddrinfo(host, port, type=SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: no DNS name, as a..example
        raise httpcore2.ConnectError(str(error)) from error
    addresses = [str(entry[4][0]) for entry in found]
    if outside := find_forbidden_address(addresses, allowed):
        raise RegistryError(
            f"{host}:{port} is {outside}, an address within a network, to which no registry "
            "elsewhere may lead",
            hint="nothing was sent there; tell the operator of the registry",
        )
    return list(dict.fromkeys(addresses))[:MAX_ADDRESSES]


def _peer_scope(stream: httpcore2.NetworkStream) -> NetworkScope:
    """Return the scope of a new connection; global, which allows the least, if it broke already."""
    try:
        peer = stream.get_extra_info("server_addr")
    except OSError:
        return "global"
    return classify_address(str(peer[0])) if peer else "global"


class _WatchedStream(httpcore2.NetworkStream):
    """Limits the time spent waiting for an answer to begin, then for its next `MIN_BYTES`.

    A timeout of each read alone would let a server that sends single bytes hold a client for ever.
    """

    def __init__(
        self,
        stream: httpcore2.NetworkStream,
        stall: float,
        backend: _WatchedBackend,
        *,
        scope: NetworkScope,
    ) -> None:
        self.scope = scope
        self._stream = stream
        self._stall = stall
        self._backend = backend
        self._spent, self._received, self._in_body = 0.0, 0, False

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        left = (timeout or self._stall) - self._spent
        if left <= 0:
            raise httpcore2.ReadTimeout
        started = time.monotonic()
        data = self._stream.read(max_bytes, timeout=left)
        self._spent += time.monotonic() - started
        self._received += len(data)
        if self._in_body and self._received >= MIN_BYTES:
            self._spent, self._received = 0.0, 0
        if not self._in_body and self._received > MAX_HEADER_BYTES:
            raise httpcore2.RemoteProtocolError("its headers are too long")
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._spent, self._received, self._in_body = 0.0, 0, False
        self._stream.write(buffer, timeout=timeout)

    def start_body(self) -> None:
        """Switch to the limits of a body: status and headers were read."""
        self._spent, self._received, self._in_body = 0.0, 0, True

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.NetworkStream:
        stream = self._stream.start_tls(ssl_context, server_hostname, timeout)
        return self._backend.watch(stream, scope=self.scope)

    def interrupt(self) -> None:
        """Wake the thread that waits in `read`: closing alone would not."""
        connection = self._stream.get_extra_info("socket")
        with suppress(OSError):
            socket.shutdown(connection, SHUT_RDWR)  # for TLS too, without its closing message

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
