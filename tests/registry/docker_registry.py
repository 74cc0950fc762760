"""Debian's docker-registry on a free port of this machine: a registry that is not ours."""

import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import AF_INET, SOCK_STREAM, socket

import pytest

from expertctl.registry.address import RegistryAddress

START_SECONDS = 120.0
_CONFIG = """\
version: 0.1
log:
  level: error
  accesslog:
    disabled: true
storage:
  filesystem:
    rootdirectory: {root}
  delete:
    enabled: true
http:
  addr: 127.0.0.1:{port}
"""
_PASSWORDS = """\
auth:
  htpasswd:
    realm: basic-realm
    path: {file}
"""


@dataclass(frozen=True)
class DockerRegistry:
    """A registry that runs."""

    port: int
    root: Path

    @property
    def address(self) -> RegistryAddress:
        return RegistryAddress.parse(f"127.0.0.1:{self.port}")

    @property
    def url(self) -> str:
        return self.address.url


@contextmanager
def run_docker_registry(
    folder: Path, *, user: str = "", password: str = ""
) -> Iterator[DockerRegistry]:
    """Lend a registry that keeps its files in ``folder``; with a user it wants a login."""
    port = _find_free_port()
    config = folder / "docker-registry.yml"
    text = _CONFIG.format(root=folder / "docker-registry", port=port)
    if user:
        text += _PASSWORDS.format(file=_write_password_file(folder, user, password))
    config.write_text(text)
    words = ["docker-registry", "serve", str(config)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}/v2/", process)
        yield DockerRegistry(port, folder / "docker-registry")
    finally:
        process.terminate()
        process.wait(START_SECONDS)


@pytest.fixture
def docker_registry(tmp_path: Path) -> Iterator[DockerRegistry]:
    """A registry without a login."""
    if shutil.which("docker-registry") is None:
        pytest.skip("docker-registry is not installed")
    with run_docker_registry(tmp_path) as registry:
        yield registry


def _write_password_file(folder: Path, user: str, password: str) -> Path:
    line = subprocess.run(
        ["htpasswd", "-Bbn", user, password], check=True, capture_output=True, text=True
    ).stdout
    file = folder / "htpasswd"
    file.write_text(line)
    return file


def _find_free_port() -> int:
    with socket(AF_INET, SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the registry answers; another process owns it, so there is nothing to wait on."""
    deadline = time.monotonic() + START_SECONDS
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        assert process.poll() is None, "docker-registry ended"
        try:
            opener.open(url, timeout=1).close()
        except urllib.error.HTTPError as error:
            error.close()
            return
        except OSError:
            time.sleep(0.02)
            continue
        return
    raise AssertionError("docker-registry does not answer")
