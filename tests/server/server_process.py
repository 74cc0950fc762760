"""A real server in a process of its own, on a free port of this machine.

A generation server in a process of its own, on a free port of this machine.

`expertctl serve` as a process of its own, on a socket.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from tests.store.fixtures import HomeFixture

START_SECONDS = 120.0
SERVE_PROGRAM = (
    "from tests.engine.kernel_cache import use_shared_kernel_cache\n"
    "use_shared_kernel_cache()\n"
    "from expertctl.cli.app import main\n"
    "main()\n"
)


@dataclass
class GenerationServerProcess:
    """A server process and where it listens."""

    process: subprocess.Popen[str]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send_request(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Ask for a path; underscores in names of headers become dashes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            named = {"Content-Type": "application/json", **named}
        content = None if body is None else json.dumps(body)
        with closing(self.connect()) as client:
            client.request(method, path, body=content, headers=named)
            answer = client.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()

    def request_json(self, method: str, path: str, body: object = None, **headers: str) -> Any:
        return json.loads(self.send_request(method, path, body, **headers)[2])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_SECONDS)

    def connect_socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=START_SECONDS)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Tell it to end; return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(START_SECONDS)


@contextmanager
def start_server(home: Path, *words: str) -> Iterator[GenerationServerProcess]:
    """Start to serve a home as a person does, and end that whatever happens."""
    command = [sys.executable, "-c", SERVE_PROGRAM, "serve", "--port", "0", "--json", *words]
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
        yield GenerationServerProcess(process, 0, log)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def run_server(home: Path, *words: str) -> Iterator[GenerationServerProcess]:
    """Serve a home, once it says where."""
    with start_server(home, *words) as server:
        assert server.process.stdout
        line = server.process.stdout.readline()
        assert line, server.log.read_text()
        server.port = json.loads(line)["port"]
        yield server


READY_SECONDS = 60.0
SERVER_BUDGET = "64MiB"


@dataclass
class HomeServerProcess:
    """A server and where it listens."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def stop(self) -> int:
        """Tell it to end; return its exit code."""
        self.process.terminate()
        return self.process.wait(READY_SECONDS)


@contextmanager
def run_home_server(home: Path, *words: str) -> Iterator[HomeServerProcess]:
    """Serve a home as a person does, once it says where; ended whatever happens."""
    log = home.parent / f"{home.name}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [
                *make_command_line(
                    "serve", "--port", "0", "--json", "--memory-budget", SERVER_BUDGET
                ),
                *words,
            ],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=make_environment(home),
        )
    assert process.stdout
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        yield HomeServerProcess(process, json.loads(line)["url"], log)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def create_api_key(home: Path, name: str, *words: str) -> str:
    """Make an API key as a person does, and return its secret."""
    made = subprocess.run(
        make_command_line("serve", "key", "new", name, *words, "--json"),
        capture_output=True,
        check=True,
        text=True,
        env=make_environment(home),
        timeout=READY_SECONDS,
    )
    return str(json.loads(made.stdout)["secret"])


def make_command_line(*words: str) -> Sequence[str]:
    """Return the command line of our program."""
    return [sys.executable, "-c", "from expertctl.cli.app import main; main()", *words]


def make_environment(home: Path) -> dict[str, str]:
    """Return the environment in which a home is used."""
    return {**os.environ, "EXPERT_HOME": str(home), "NO_COLOR": "1"}


_STOP_SECONDS = 60


@dataclass(frozen=True)
class SocketServer:
    """A server that runs."""

    url: str
    user_home: HomeFixture

    @property
    def base_url(self) -> str:
        """What clients of the OpenAI API are given."""
        return f"{self.url}/v1"

    def read_metric(self, line: str) -> float:
        """The number of a line of ``/metrics``, 0 where it is not there."""
        told = httpx2.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return next((float(one.split()[-1]) for one in told if one.startswith(line)), 0.0)


@contextmanager
def run_socket_server(user_home: HomeFixture, log: Path, *options: str) -> Iterator[SocketServer]:
    """Serve what is installed in a home; ended by a signal, which must be enough."""
    command = [sys.executable, "-m", "expertctl", "serve", "--port", "0", "--json"]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("EXPERT_")},
        "EXPERT_HOME": str(user_home.root),
        "EXPERT_ENCODER": "lexical",
    }
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [*command, "--base", "tiny", "--memory-budget", "256MiB", *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            head = process.stdout.readline()
            assert head, log.read_text()
            yield SocketServer(json.loads(head)["url"], user_home)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    assert code == 0, log.read_text()
