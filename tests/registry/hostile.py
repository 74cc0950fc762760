"""A registry that lies: a plain socket server that says what a test wrote, byte for byte."""

import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import AF_INET, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket

import pytest

from expertctl.registry.address import RegistryAddress
from expertctl.registry.credentials import Credential, OneCredential
from expertctl.registry.http import Http
from expertctl.registry.retry import Retries
from expertctl.registry.wire import Timeouts

SECRET = "s3cret-of-the-right-host"
SECONDS = 120.0
"""After which a server gives a client up, so that no test hangs."""
_MAX_HEAD = 64 << 10


@dataclass(frozen=True)
class Request:
    """What a client sent."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def login(self) -> str | None:
        return self.headers.get("authorization")


class Stall:
    """In a reply: nothing more comes, and the connection stays open."""


Reply = bytes | Iterable[bytes | Stall]
Script = Callable[[Request], Reply]


def reply(
    status: int = 200,
    body: bytes = b"",
    *,
    length: int | None = None,
    **headers: str,
) -> bytes:
    """An answer; ``length`` is what it claims to have, -1 for no claim. ``_`` in names is ``-``."""
    lines = [f"HTTP/1.1 {status} Words", "Connection: close"]
    claimed = len(body) if length is None else length
    if claimed >= 0:
        lines.append(f"Content-Length: {claimed}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode("utf-8") + b"\r\n\r\n" + body


@dataclass
class HostileServer:
    """One server; ``seen`` is every request in the order of arrival."""

    script: Script
    tls: ssl.SSLContext | None = None
    seen: list[Request] = field(default_factory=list)
    _listener: socket = field(default_factory=lambda: socket(AF_INET, SOCK_STREAM))
    _stopped: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        self._listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(32)
        self._listener.settimeout(0.05)
        self._spawn(self._accept)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(SECONDS)
        self._listener.close()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def other_name(self) -> str:
        """The same server under a name that is another host to a client."""
        return f"{'https' if self.tls else 'http'}://localhost:{self.port}"

    @property
    def address(self) -> RegistryAddress:
        return RegistryAddress.parse(self.url)

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            with suppress(TimeoutError):
                connection, _ = self._listener.accept()
                self._spawn(self._serve, connection)

    def _serve(self, connection: socket) -> None:
        connection.settimeout(SECONDS)
        with connection, suppress(OSError):
            stream = self.tls.wrap_socket(connection, server_side=True) if self.tls else connection
            with stream:
                request = _read(stream)
                if request is None:
                    return
                self.seen.append(request)
                self._say(stream, self.script(request))

    def _say(self, stream: socket, said: Reply) -> None:
        for part in [said] if isinstance(said, bytes) else said:
            if isinstance(part, Stall):
                self._stopped.wait(SECONDS)
                return
            stream.sendall(part)


def _read(stream: socket) -> Request | None:
    data = b""
    while b"\r\n\r\n" not in data:
        more = stream.recv(65536)
        if not more or len(data) > _MAX_HEAD:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    headers = {n.strip().lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", "0")):
        more = stream.recv(65536)
        if not more:
            break
        body += more
    return Request(method, target, headers, body)


@contextmanager
def serving(script: Script, tls: ssl.SSLContext | None = None) -> Iterator[HostileServer]:
    server = HostileServer(script, tls)
    server.start()
    try:
        yield server
    finally:
        server.stop()


Serve = Callable[..., HostileServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that end with the test."""
    servers: list[HostileServer] = []

    def start(script: Script | Reply, tls: ssl.SSLContext | None = None) -> HostileServer:
        server = HostileServer(script if callable(script) else lambda _: script, tls)
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@dataclass
class Pauses:
    """Stands for the clock: remembers what would have been slept."""

    seconds: list[float] = field(default_factory=list)

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def client(
    server: HostileServer | None = None,
    *,
    attempts: int = 3,
    connect: float = 30.0,
    stall: float = 20.0,
    rate: float = 1024.0,
    ca_file: Path | None = None,
    environment: dict[str, str] | None = None,
    secret: str = SECRET,
    realm: str | None = None,
    pauses: Pauses | None = None,
) -> Http:
    """A client that is impatient and never sleeps, with a login for one server."""
    login = OneCredential(server.address, Credential("me", secret, realm)) if server else None
    return Http(
        login,
        environment=environment or {},
        ca_file=ca_file,
        timeouts=Timeouts(connect=connect, stall=stall, answer=SECONDS, rate=rate),
        retries=Retries(attempts=attempts, sleep=pauses or Pauses(), chance=lambda: 1.0),
    )
