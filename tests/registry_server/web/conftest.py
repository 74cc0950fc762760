"""A registry with packages to look at."""

from collections.abc import Callable
from typing import Any

import pytest

from expertctl.trust.keys import PrivateKey
from registry_server.access.identity import Identity
from registry_server.publishing.keys import add_key
from tests.registry_server.publishing.parcels import Parcel, Template, make_template, push
from tests.registry_server.served import Served

Publish = Callable[..., Parcel]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def owner(served: Served) -> Identity:
    """The owner of ``acme``, which anybody may read, and of ``hidden``, which not."""
    identity = served.identity(served.user("olga"))
    served.namespace("acme", kind="expert", read="public", owner="olga")
    served.namespace("hidden", kind="expert", owner="olga")
    return identity


@pytest.fixture
def publish(served: Served, owner: Identity, template: Template) -> Publish:
    """Publish a package; arguments as for `Template.parcel`."""
    key = PrivateKey.generate()
    for namespace in ("acme", "hidden"):
        pem = key.public.pem()
        add_key(served.registry, owner, namespace=namespace, public_key=pem, statement=None)

    def publish(*arguments: Any, **options: Any) -> Parcel:
        parcel = template.parcel(*arguments, key=key, **options)
        push(served.registry, owner, parcel)
        return parcel

    return publish
