"""A registry on a socket of this machine: the real application under a real server, in a thread.

A person with a key and a login at a live registry, and packages to publish.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp

from expertctl.package.base_model import BaseFacts, read_base
from expertctl.registry.accounts import add_key
from expertctl.registry.address import RegistryAddress
from expertctl.registry.client import ApiClient, OciClient
from expertctl.registry.credentials import Credential, CredentialStore
from expertctl.registry.http import RegistryHttp
from expertctl.registry.publish import PublishTarget
from expertctl.settings import Home
from expertctl.trust.keys import KeyRing, PrivateKey
from expertctl.trust.trust_store import PublisherIdentity, TrustStore
from tests.factories import make_package, write_base
from tests.registry_server.harness import RegistryHarness, create_registry, make_settings


@dataclass(frozen=True)
class LiveRegistry:
    """A registry that answers on its URL until the context ends."""

    served: RegistryHarness
    url: str

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")


class _ListeningServer(uvicorn.Server):
    """Tells when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


def add_no_middleware(app: ASGIApp) -> ASGIApp:
    """Put nothing around the application."""
    return app


@contextmanager
def run_live_registry(
    folder: Path, *, middleware: Callable[[ASGIApp], ASGIApp] = add_no_middleware, **limits: float
) -> Iterator[LiveRegistry]:
    """Make a registry in a new folder and serve it, with a test around it, on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        served = create_registry(replace(make_settings(folder, **limits), port=port))
        config = uvicorn.Config(
            middleware(served.app), log_config=None, lifespan="off", access_log=False
        )
        server = _ListeningServer(config)
        thread = Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        assert server.listening.wait(120)
        try:
            yield LiveRegistry(served, f"http://127.0.0.1:{port}")
        finally:
            server.should_exit = True
            thread.join(120)
            served.close()


@dataclass(frozen=True)
class PackageWorkspace:
    """Where packages are made for one base."""

    folder: Path
    base_dir: Path
    base: BaseFacts
    key: PrivateKey

    def package(self, name: str = "acme/sql", version: str = "1.0.0", **options: Any) -> Path:
        """Make a package signed by the person's key, or by another one, or by none."""
        given = {"key": self.key, **options}
        return make_package(
            self.folder, name, version, base_dir=self.base_dir, base=self.base, **given
        )


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BaseFacts]:
    folder = write_base(tmp_path_factory.mktemp("published") / "base")
    return folder, read_base(folder)


@pytest.fixture
def trust(home: Path) -> TrustStore:
    return TrustStore(Home(home).trust)


@pytest.fixture
def workspace(
    tiny_base: tuple[Path, BaseFacts], home: Path, trust: TrustStore, tmp_path: Path
) -> PackageWorkspace:
    """The person's key is called ``me`` and trusted here for acme/*."""
    ring = KeyRing(Home(home).keys)
    PublisherIdentity(ring, trust).create_key("me", namespaces=["acme"])
    folder = tmp_path / "made"
    folder.mkdir()
    return PackageWorkspace(folder, *tiny_base, ring.read_private("me"))


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRegistry]:
    with run_live_registry(tmp_path / "registry") as running:
        yield running


@pytest.fixture
def alice(live: LiveRegistry, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The secret of alice, who owns acme, is logged in, and has this registry set."""
    secret = live.served.create_user("alice")
    live.served.create_namespace("acme", kind="expert", owner="alice")
    store_credential(live, home, secret)
    monkeypatch.setenv("EXPERT_REGISTRY", live.host)
    return secret


@pytest.fixture
def admin(live: LiveRegistry) -> str:
    """The secret of an administrator; nobody is logged in with it."""
    return live.served.create_user("chief", admin=True)


def store_credential(live: LiveRegistry, home: Path, secret: str) -> None:
    """Show this secret to the registry from now on."""
    address = RegistryAddress.parse(live.url)
    CredentialStore(Home(home).credentials).add(address, Credential("somebody", secret))


@pytest.fixture
def destination(
    live: LiveRegistry, alice: str, home: Path, workspace: PackageWorkspace
) -> Iterator[PublishTarget]:
    """Where alice publishes; her key counts in acme."""
    address = RegistryAddress.parse(live.url)
    with RegistryHttp(CredentialStore(Home(home).credentials)) as http:
        api = ApiClient(http, address)
        add_key(api, "acme", workspace.key.public, by=None)
        oci = OciClient(http, address, Home(home).registries / "uploads")
        yield PublishTarget(oci, api, Home(home).registries)
