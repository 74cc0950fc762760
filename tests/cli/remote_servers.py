"""Servers that commands find through the record in a home: the real one in process, and others.

The real application runs in process; its answers are passed on through a socket, each as a whole
unless a test divides it.
"""

import http.server
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expertctl.server.serve import describe_policy
from expertctl.settings import Home, Settings
from expertctl.store.server_record import ServerRegistration
from tests.server.harness import BASE, ServerHarness


@dataclass
class RecordedServer:
    """A server with a record in a home, and the requests that reached it."""

    url: str
    home: Path
    secret: str
    requests: list[tuple[str, bytes, int]] = field(default_factory=list)

    @property
    def record(self) -> Path:
        [path] = (self.home / "servers").glob("*.json")
        return path

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.requests]

    @property
    def answered(self) -> int:
        """How many prompts it answered."""
        return sum(path == "/v1/infer" and status == 200 for path, _, status in self.requests)


Said = tuple[int, str, bytes | Iterator[bytes]]
Answer = Callable[[str, str, Mapping[str, str], bytes], Said]
"""Takes method, path, headers and body; returns status, media type and body.

The parts of a body are sent one by one. If a part is empty, the connection breaks there.
After a media type that ends with ``; last`` or ``; close`` the connection is closed, in the second
case with notice.
"""


@contextmanager
def listen(answer: Answer, secret: str, home: Path) -> Iterator[RecordedServer]:
    """Answer requests on a port of this machine."""
    recorded = RecordedServer("", home, secret)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, kind, data = answer(self.command, self.path, self.headers, body)
            recorded.requests.append((self.path, body, status))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if isinstance(data, bytes):
                self.send_header("Content-Length", str(len(data)))
            else:
                self.send_header("Transfer-Encoding", "chunked")
            if kind.endswith("; close"):
                self.send_header("Connection", "close")
            self.end_headers()
            with suppress(ConnectionError):
                self.send_body(data)
            self.close_connection = self.close_connection or kind.endswith("; last")

        def send_body(self, data: bytes | Iterator[bytes]) -> None:
            if isinstance(data, bytes):
                self.wfile.write(data)
                return
            for part in data:
                if not part:
                    self.close_connection = True
                    return
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_DELETE = answer  # noqa: N815  # the names that the class calls

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        recorded.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield recorded
        finally:
            server.shutdown()
            thread.join()


def forward_to(
    served: ServerHarness, divide: Callable[[bytes], Iterator[bytes]] | None = None
) -> Answer:
    """What the server in process answers; ``divide`` divides the answers to prompts."""
    client = served.client()

    def forward(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Said:
        shown = {
            name: headers[name] for name in ("Content-Type", "Authorization") if name in headers
        }
        answer = client.request(method, path, content=body, headers=shown)
        data = answer.content
        divided = divide(data) if divide is not None and path == "/v1/infer" else data
        return answer.status_code, answer.headers["Content-Type"], divided

    return forward


@contextmanager
def record_server(
    served: ServerHarness, *, home: Path | None = None, **policy: Any
) -> Iterator[RecordedServer]:
    """Let commands of the home reach a server in process."""
    secret = served.service.settings.secret
    assert secret is not None
    own = home or served.user_home.root
    settings = Settings(Home(own), encoder="lexical")
    with listen(forward_to(served), secret, own) as server:
        registration = ServerRegistration(own / "servers", secret=secret)
        registration.publish(
            pid=os.getpid(),
            url=server.url,
            base=served.engine.base_name,
            policy={**describe_policy(served.service.settings, settings), **policy},
        )
        try:
            yield server
        finally:
            registration.withdraw()


@contextmanager
def record_stranger(
    answer: Answer, like: RecordedServer, *, base: str = BASE
) -> Iterator[RecordedServer]:
    """Let a record of a home that has the server ``like`` lead to something else."""
    policy = json.loads(like.record.read_text())["policy"]
    with listen(answer, like.secret, like.home) as stranger:
        registration = ServerRegistration(like.home / "servers", secret=like.secret)
        like.record.unlink()
        registration.publish(pid=os.getpid(), url=stranger.url, base=base, policy=policy)
        try:
            yield stranger
        finally:
            registration.withdraw()
