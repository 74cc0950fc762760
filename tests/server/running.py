"""A real server in a process of its own, on a free port of this machine."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAIT = 120.0
PROGRAM = (
    "from tests.engine.kept_code import keep_where_told\n"
    "keep_where_told()\n"
    "from expertctl.cli.app import main\n"
    "main()\n"
)


@dataclass
class Running:
    """A server process and where it listens."""

    process: subprocess.Popen[str]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Ask for a path; underscores in names of headers become dashes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            named = {"Content-Type": "application/json", **named}
        content = None if body is None else json.dumps(body)
        with closing(self.connection()) as client:
            client.request(method, path, body=content, headers=named)
            answer = client.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()

    def json(self, method: str, path: str, body: object = None, **headers: str) -> Any:
        return json.loads(self.ask(method, path, body, **headers)[2])

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Tell it to end; return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(WAIT)


@contextmanager
def starting(home: Path, *words: str) -> Iterator[Running]:
    """Start to serve a home as a person does, and end that whatever happens."""
    command = [sys.executable, "-c", PROGRAM, "serve", "--port", "0", "--json", *words]
    log = home.parent / f"{home.name}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "EXPERT_HOME": str(home), "EXPERT_ENCODER": "lexical"},
        )
    assert process.stdout
    try:
        yield Running(process, 0, log)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def running(home: Path, *words: str) -> Iterator[Running]:
    """Serve a home, once it says where."""
    with starting(home, *words) as server:
        assert server.process.stdout
        line = server.process.stdout.readline()
        assert line, server.log.read_text()
        server.port = json.loads(line)["port"]
        yield server
