"""A registry of ours in a process of its own, and the tools of others that talk to it."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from expertctl.registry.address import RegistryAddress
from expertctl.registry.credentials import Credential, CredentialStore
from expertctl.settings import Home
from registry_server.operation.new_registry import CreatedRegistry
from tests.registry_server.operation.server_process import (
    ServerProcess,
    init_registry_folder,
    run_server,
)

USER = "admin"
_POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}'


@dataclass(frozen=True)
class InteropRegistry:
    """A registry that runs, and its first administrator."""

    server: ServerProcess
    created: CreatedRegistry

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def address(self) -> RegistryAddress:
        return RegistryAddress.parse(self.host)

    @property
    def login(self) -> str:
        """Name and secret, as tools want them on the command line."""
        return f"{USER}:{self.created.token}"

    def send_request(
        self, method: str, path: str, secret: str = "", **body: object
    ) -> httpx2.Response:
        """Make one request with the administrator's token, or with another."""
        headers = {"Authorization": f"Bearer {secret or self.created.token}"}
        url = f"http://{self.host}{path}"
        return httpx2.request(method, url, headers=headers, json=body or None, timeout=60)

    def create_namespace(self, namespace: str, kind: str, *, read: str = "token") -> None:
        """Make a namespace."""
        answer = self.send_request(
            "POST", "/api/v1/namespaces", name=namespace, kind=kind, read=read
        )
        assert answer.status_code == 201, answer.text

    def list_versions(self, package: str) -> list[str]:
        """What is published, as the API tells it."""
        answer = self.send_request("GET", f"/api/v1/packages/{package}")
        found = answer.json()["versions"] if answer.status_code == 200 else []
        return [version["version"] for version in found]

    def log_in(self, home: Path) -> None:
        """Remember the token in a home."""
        store = CredentialStore(Home(home).credentials)
        store.add(self.address, Credential(USER, self.created.token))


@contextmanager
def run_interop_registry(folder: Path) -> Iterator[InteropRegistry]:
    """Make a registry in a new folder and run it."""
    made = init_registry_folder(folder)
    with run_server(folder) as server:
        yield InteropRegistry(server, made)


@dataclass(frozen=True)
class Skopeo:
    """Debian's skopeo with a folder for its logins; it may speak HTTP to this machine."""

    folder: Path

    def __call__(self, *words: object, code: int = 0) -> str:
        """Run a command; return what it prints, of a failure what it complains of."""
        policy = self.folder / "policy.json"
        policy.write_text(_POLICY)
        done = subprocess.run(
            ["skopeo", "--policy", policy, *map(str, words)],
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder), **self._environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    @property
    def _environment(self) -> dict[str, str]:
        return {"REGISTRY_AUTH_FILE": str(self.folder / "auth.json")}

    def log_in(self, exchange: InteropRegistry, secret: str = "", *, code: int = 0) -> str:
        words = ["login", "--tls-verify=false", "-u", USER, "-p", secret or exchange.created.token]
        return self(*words, exchange.host, code=code)

    def copy(self, source: str, target: str, *words: str, code: int = 0) -> str:
        plain = ("--src-tls-verify=false", "--dest-tls-verify=false")
        return self("copy", *plain, *words, source, target, code=code)

    def inspect(self, image: str, *words: str, code: int = 0) -> str:
        return self("inspect", "--tls-verify=false", *words, image, code=code)

    def list_tags(self, repository: str) -> list[str]:
        document: Any = json.loads(self("list-tags", "--tls-verify=false", repository))
        return list(document["Tags"])


@pytest.fixture
def skopeo(tmp_path: Path) -> Skopeo:
    if shutil.which("skopeo") is None:
        pytest.skip("needs Debian's skopeo: apt-get install skopeo")
    folder = tmp_path / "skopeo"
    folder.mkdir()
    return Skopeo(folder)


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[InteropRegistry]:
    """A registry with ``acme`` for packages and ``plain`` for anything."""
    with run_interop_registry(tmp_path / "exchange") as running:
        running.create_namespace("acme", "expert")
        running.create_namespace("plain", "oci")
        yield running
