"""A registry with packages to look at."""

from collections.abc import Callable
from typing import Any

import pytest

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

Publish = Callable[..., InMemoryPackage]


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
