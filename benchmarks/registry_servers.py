"""The two servers that ``benchmarks.registry`` compares: ours and Debian's docker-registry."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

EXPERTCTL = str(Path(sys.executable).with_name("expertctl"))
DOCKER_REGISTRY = shutil.which("docker-registry")
START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RegistryServer:
    """A running server: its address, its token, and its process."""

    host: str
    """Host and port."""
    token: str | None
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """The address without a trailing slash."""
        return f"http://{self.host}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


@contextmanager
def run_our_server(folder: Path) -> Iterator[RegistryServer]:
    """Run a new registry of ours as ``registry init`` makes it: with permissions, logs, limits."""
    port = _find_free_port()
    made = subprocess.run(
        [EXPERTCTL, "registry", "init", str(folder), "--port", str(port), "--json"],
        check=True,
        capture_output=True,
    )
    _raise_rate_limit(folder / "registry.toml")
    command = [EXPERTCTL, "registry", "serve", str(folder)]
    with (
        (folder.parent / "server.log").open("wb") as log,
        _run_process(command, log.fileno()) as it,
    ):
        yield _wait_until_ready(
            RegistryServer(f"127.0.0.1:{port}", json.loads(made.stdout)["token"], it)
        )


@contextmanager
def run_docker_registry(folder: Path) -> Iterator[RegistryServer]:
    """Run a new docker-registry with files on the same disk, without permissions, with few logs."""
    assert DOCKER_REGISTRY is not None
    port = _find_free_port()
    folder.mkdir()
    config = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder)}, "delete": {"enabled": True}},
        "http": {"addr": f"127.0.0.1:{port}", "secret": "benchmark"},
    }
    path = folder.parent / "docker-registry.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    with _run_process([DOCKER_REGISTRY, "serve", str(path)], subprocess.DEVNULL) as process:
        yield _wait_until_ready(RegistryServer(f"127.0.0.1:{port}", None, process))


def _raise_rate_limit(settings: Path) -> None:
    """Raise the rate limit, which is still counted, so that ``ab`` does not reach it."""
    with settings.open("a", encoding="utf-8") as stream:
        stream.write("\n[limits]\nrequests_per_minute = 10000000\n")


@contextmanager
def _run_process(command: list[str], log: int) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ)) as process:
        try:
            yield process
        finally:
            process.terminate()


def _wait_until_ready(server: RegistryServer) -> RegistryServer:
    """Wait until the server answers."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.process.poll() is None:
        try:
            httpx2.get(f"{server.url}/v2/", headers=server.headers, timeout=5).raise_for_status()
        except httpx2.TransportError:
            time.sleep(0.05)
        else:
            return server
    raise RuntimeError(f"{server.url} does not answer")


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
