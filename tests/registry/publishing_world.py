"""A person with a key and a login at a live registry, and packages to publish."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from expertctl.package.base_model import BaseFacts, read_base
from expertctl.registry.address import RegistryAddress
from expertctl.registry.api_client import ApiClient
from expertctl.registry.credentials import Credential, CredentialStore
from expertctl.registry.http import Http
from expertctl.registry.oci_client import OciClient
from expertctl.registry.people import add_key
from expertctl.registry.publish import Destination
from expertctl.settings import Home
from expertctl.trust.keys import KeyRing, PrivateKey
from expertctl.trust.policy import TrustStore
from expertctl.trust.publisher import Publisher
from tests.factories import make_package, write_base
from tests.registry.live import Live, live_registry


@dataclass(frozen=True)
class Workshop:
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
def workshop(
    tiny_base: tuple[Path, BaseFacts], home: Path, trust: TrustStore, tmp_path: Path
) -> Workshop:
    """The person's key is called ``me`` and trusted here for acme/*."""
    ring = KeyRing(Home(home).keys)
    Publisher(ring, trust).create("me", namespaces=["acme"])
    folder = tmp_path / "made"
    folder.mkdir()
    return Workshop(folder, *tiny_base, ring.private("me"))


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with live_registry(tmp_path / "registry") as running:
        yield running


@pytest.fixture
def alice(live: Live, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The secret of alice, who owns acme, is logged in, and has this registry set."""
    secret = live.served.user("alice")
    live.served.namespace("acme", kind="expert", owner="alice")
    log_in(live, home, secret)
    monkeypatch.setenv("EXPERT_REGISTRY", live.host)
    return secret


@pytest.fixture
def admin(live: Live) -> str:
    """The secret of an administrator; nobody is logged in with it."""
    return live.served.user("chief", admin=True)


def log_in(live: Live, home: Path, secret: str) -> None:
    """Show this secret to the registry from now on."""
    address = RegistryAddress.parse(live.url)
    CredentialStore(Home(home).credentials).add(address, Credential("somebody", secret))


@pytest.fixture
def destination(live: Live, alice: str, home: Path, workshop: Workshop) -> Iterator[Destination]:
    """Where alice publishes; her key counts in acme."""
    address = RegistryAddress.parse(live.url)
    with Http(CredentialStore(Home(home).credentials)) as http:
        api = ApiClient(http, address)
        add_key(api, "acme", workshop.key.public, by=None)
        oci = OciClient(http, address, Home(home).registries / "uploads")
        yield Destination(oci, api, Home(home).registries)
