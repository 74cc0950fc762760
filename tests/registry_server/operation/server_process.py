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
from dataclasses import dataclass, field
from pathlib import Path

from registry_server.operation.new_registry import CreatedRegistry, init_registry
from registry_server.settings import ServerSettings

WAIT = 60.0


@dataclass
class ServerProcess:
    """A server process and where it listens."""

    process: subprocess.Popen[str]
    port: int
    log: Path
    responses: list[http.client.HTTPResponse] = field(default_factory=list)

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        """Ask for a path; underscores in names of headers become dashes."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)) as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            client.request("GET", path, headers=named)
            answer = client.getresponse()
            return answer.status, answer.read()

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Tell it to end; return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(WAIT)


def init_registry_folder(folder: Path, **settings: object) -> CreatedRegistry:
    return init_registry(ServerSettings(data=folder, **settings))  # type: ignore[arg-type]


@contextmanager
def start_server(data: Path, *words: str) -> Iterator[ServerProcess]:
    """Start to serve a registry as a person does, and end that whatever happens."""
    program = "from expertctl.cli.app import main; main()"
    command = [sys.executable, "-c", program, "registry", "serve", str(data)]
    log = data.parent / f"{data.name}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--port", "0", "--json", *words],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "EXPERT_HOME": str(data.parent / "home")},
        )
    assert process.stdout
    try:
        yield ServerProcess(process, 0, log)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def run_server(data: Path, *words: str) -> Iterator[ServerProcess]:
    """Serve a registry, once it says where."""
    with start_server(data, *words) as server:
        assert server.process.stdout
        line = server.process.stdout.readline()
        assert line, server.log.read_text()
        server.port = json.loads(line)["port"]
        yield server
