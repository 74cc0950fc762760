"""A registry with something in it, for what is done to whole registries."""

import pytest

from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import Identity
from registry_server.publishing.releases import add_key
from registry_server.registry import Registry
from registry_server.settings import write_settings
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.publishing.package_fixtures import PackageTemplate, build_template


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> PackageTemplate:
    return build_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="session")
def alice() -> PrivateKey:
    return PrivateKey.generate()


@pytest.fixture
def owner(served: RegistryHarness) -> Identity:
    """The owner of ``acme``."""
    identity = served.authenticate(served.create_user("olga"))
    served.create_namespace("acme", kind="expert", owner="olga")
    return identity


@pytest.fixture
def registry(served: RegistryHarness, owner: Identity, alice: PrivateKey) -> Registry:
    """A registry with a settings file, where Alice's key signs for ``acme``."""
    write_settings(served.settings)
    add_key(served.registry, owner, namespace="acme", public_key=alice.public.pem(), statement=None)
    return served.registry
