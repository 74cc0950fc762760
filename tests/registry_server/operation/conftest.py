"""A registry with something in it, for what is done to whole registries."""

import pytest

from expertctl.trust.keys import PrivateKey
from registry_server.access.identity import Identity
from registry_server.publishing.keys import add_key
from registry_server.registry import Registry
from registry_server.settings_file import write_settings
from tests.registry_server.publishing.parcels import Template, make_template
from tests.registry_server.served import Served


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="session")
def alice() -> PrivateKey:
    return PrivateKey.generate()


@pytest.fixture
def owner(served: Served) -> Identity:
    """The owner of ``acme``."""
    identity = served.identity(served.user("olga"))
    served.namespace("acme", kind="expert", owner="olga")
    return identity


@pytest.fixture
def registry(served: Served, owner: Identity, alice: PrivateKey) -> Registry:
    """A registry with a settings file, where Alice's key signs for ``acme``."""
    write_settings(served.settings)
    add_key(served.registry, owner, namespace="acme", public_key=alice.public.pem(), statement=None)
    return served.registry
