"""A registry with people and one published package, and clients that ask its API."""

from collections.abc import Callable

import pytest

from expertctl.trust.keys import PrivateKey
from registry_server.access.identity import Scope
from registry_server.publishing.keys import add_key
from tests.registry_server.api.asking import Asking, Publish
from tests.registry_server.publishing.parcels import Template, make_template, push
from tests.registry_server.served import Served


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="session")
def key() -> PrivateKey:
    return PrivateKey.generate()


@pytest.fixture
def asking(served: Served) -> Callable[[str | None], Asking]:
    """Make clients from secrets."""
    return lambda secret: Asking(served.client(secret))


@pytest.fixture
def boss(served: Served) -> Asking:
    """An admin."""
    return Asking(served.client(served.user("boss", admin=True)))


@pytest.fixture
def olga(served: Served) -> Asking:
    """A user, who owns ``acme`` where the fixture ``publish`` is used."""
    return Asking(served.client(served.user("olga")))


@pytest.fixture
def nobody(served: Served) -> Asking:
    return Asking(served.client())


@pytest.fixture
def publish(served: Served, template: Template, key: PrivateKey, olga: Asking) -> Publish:
    """Publish packages, making their namespaces with the owner Olga."""
    secret = served.token("olga", *(Scope.parse(s) for s in ("read", "push", "manage", "yank")))
    identity = served.identity(secret)
    known: set[str] = set()

    def publish(
        name: str = "acme/sql", version: str = "1.0.0", *, read: str = "token", **changes: object
    ) -> None:
        namespace = name.partition("/")[0]
        if namespace not in known:
            known.add(namespace)
            served.namespace(namespace, kind="expert", owner="olga", read=read)
            add_key(
                served.registry,
                identity,
                namespace=namespace,
                public_key=key.public.pem(),
                statement=None,
            )
        push(served.registry, identity, template.parcel(name, version, key=key, **changes))

    return publish
