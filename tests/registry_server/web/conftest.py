"""A registry with packages to look at."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.testclient import TestClient

from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import Identity
from registry_server.publishing.releases import add_key
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.publishing.package_fixtures import (
    InMemoryPackage,
    PackageTemplate,
    build_template,
    upload_and_publish,
)
from tests.registry_server.web.test_markdown import ParsedHtml

Publish = Callable[..., InMemoryPackage]


@dataclass
class Browser:
    """A browser with its cookies, which fills in forms."""

    client: TestClient

    def get(self, path: str) -> tuple[int, str]:
        answer = self.client.get(path)
        return answer.status_code, answer.text

    def read_key(self, path: str) -> str:
        """The key in the forms of a page."""
        fields = [a for tag, a in ParsedHtml(self.client.get(path).text).tags if tag == "input"]
        found = {a["value"] for a in fields if a.get("name") == "form_key"}
        assert len(found) == 1
        return str(found.pop())

    def send(self, page: str, path: str, **fields: str) -> tuple[int, str, str]:
        """Send a form of a page; return status, text, and where it leads."""
        answer = self.client.post(path, data={"form_key": self.read_key(page), **fields})
        return answer.status_code, answer.text, answer.headers.get("location", "")

    def log_in(self, secret: str, target: str = "") -> "Browser":
        status, text, _ = self.send("/login", "/login", token=secret, next=target)
        assert status == 303, text
        return self


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> PackageTemplate:
    return build_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def owner(served: RegistryHarness) -> Identity:
    """The owner of ``acme``, which anybody may read, and of ``hidden``, which not."""
    identity = served.authenticate(served.create_user("olga"))
    served.create_namespace("acme", kind="expert", read="public", owner="olga")
    served.create_namespace("hidden", kind="expert", owner="olga")
    return identity


@pytest.fixture
def publish(served: RegistryHarness, owner: Identity, template: PackageTemplate) -> Publish:
    """Publish a package; arguments as for `Template.parcel`."""
    key = PrivateKey.generate()
    for namespace in ("acme", "hidden"):
        pem = key.public.pem()
        add_key(served.registry, owner, namespace=namespace, public_key=pem, statement=None)

    def publish(*arguments: Any, **options: Any) -> InMemoryPackage:
        parcel = template.make_package(*arguments, key=key, **options)
        upload_and_publish(served.registry, owner, parcel)
        return parcel

    return publish


@pytest.fixture
def visitor(served: RegistryHarness) -> Browser:
    return Browser(served.client())


@pytest.fixture
def olga(served: RegistryHarness, publish: Publish, visitor: Browser) -> Browser:
    """The owner of ``acme`` and ``hidden``, logged in."""
    return visitor.log_in(served.create_token("olga"))


@pytest.fixture
def browser(served: RegistryHarness) -> TestClient:
    """A browser that nobody logged in."""
    client = served.client()
    client.headers["Accept"] = "text/html,application/xhtml+xml"
    return client
