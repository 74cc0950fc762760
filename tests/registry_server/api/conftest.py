"""A registry with people and one published package, and clients that ask its API."""

from collections.abc import Callable

import pytest

from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import TokenScope
from registry_server.publishing.releases import add_key
from tests.registry_server.harness import JsonApiClient, Publish, RegistryHarness
from tests.registry_server.publishing.package_fixtures import (
    PackageTemplate,
    build_template,
    upload_and_publish,
)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> PackageTemplate:
    return build_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="session")
def key() -> PrivateKey:
    return PrivateKey.generate()


@pytest.fixture
def asking(served: RegistryHarness) -> Callable[[str | None], JsonApiClient]:
    """Make clients from secrets."""
    return lambda secret: JsonApiClient(served.client(secret))


@pytest.fixture
def boss(served: RegistryHarness) -> JsonApiClient:
    """An admin."""
    return JsonApiClient(served.client(served.create_user("boss", admin=True)))


@pytest.fixture
def olga(served: RegistryHarness) -> JsonApiClient:
    """A user, who owns ``acme`` where the fixture ``publish`` is used."""
    return JsonApiClient(served.client(served.create_user("olga")))


@pytest.fixture
def nobody(served: RegistryHarness) -> JsonApiClient:
    return JsonApiClient(served.client())


@pytest.fixture
def publish(
    served: RegistryHarness, template: PackageTemplate, key: PrivateKey, olga: JsonApiClient
) -> Publish:
    """Publish packages, making their namespaces with the owner Olga."""
    secret = served.create_token(
        "olga", *(TokenScope.parse(s) for s in ("read", "push", "manage", "yank"))
    )
    identity = served.authenticate(secret)
    known: set[str] = set()

    def publish(
        name: str = "acme/sql", version: str = "1.0.0", *, read: str = "token", **changes: object
    ) -> None:
        namespace = name.partition("/")[0]
        if namespace not in known:
            known.add(namespace)
            served.create_namespace(namespace, kind="expert", owner="olga", read=read)
            add_key(
                served.registry,
                identity,
                namespace=namespace,
                public_key=key.public.pem(),
                statement=None,
            )
        upload_and_publish(
            served.registry, identity, template.make_package(name, version, key=key, **changes)
        )

    return publish
