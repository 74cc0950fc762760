"""``kill -9`` of the server while many publish: nothing acknowledged is lost, nothing is half."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection, select

from expertctl.digest import Digest
from expertctl.reference import PackageName
from expertctl.registry.address import RegistryAddress
from expertctl.settings import Home
from expertctl.trust.grants import KnownRegistry
from expertctl.trust.trust_store import TrustStore
from registry_server.access import accounts
from registry_server.access.rights import Identity
from registry_server.database.tables import (
    MANIFESTS,
    PACKAGES,
    RELEASES,
    REPOSITORIES,
    SIGNED_FORMS,
    TAGS,
)
from registry_server.operation.gc import remove_garbage
from registry_server.registry import Registry, open_registry
from registry_server.settings import ServerSettings
from tests.install.fixtures import InstallClient
from tests.registry_server.crashes.kill_harness import (
    LIMITS,
    KillScenario,
    make_acme_registry,
    write_packages,
)
from tests.registry_server.operation.server_process import run_server
from tests.registry_server.publishing.package_fixtures import (
    PackageTemplate,
    build_template,
    pull_package,
    read_published_index,
)

pytestmark = pytest.mark.all

FAR_FUTURE = 4e9


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> PackageTemplate:
    return build_template(tmp_path_factory.mktemp("template"))


def prepared(
    folder: Path, home: Path, template: PackageTemplate, *, count: int, names: int
) -> KillScenario:
    """Make a registry with a namespace, and packages to publish there."""
    made = make_acme_registry(folder / "registry")
    packages = folder / "packages"
    packages.mkdir()
    trust = TrustStore(Home(home).trust)
    parcels = write_packages(template, packages, trust, count=count, name_count=names)
    return KillScenario(made.settings.data, made.token, parcels)


@contextmanager
def opened(scenario: KillScenario) -> Iterator[Registry]:
    """The registry of a server that is down."""
    registry = open_registry(ServerSettings(data=scenario.data, limits=LIMITS))
    try:
        yield registry
    finally:
        registry.close()


def versions(connection: Connection) -> dict[str, str]:
    """Every release and the digest of its newest form, as the tables have it."""
    newest = SIGNED_FORMS.c.position.asc()
    rows = connection.execute(
        select(PACKAGES.c.name, RELEASES.c.version, SIGNED_FORMS.c.package_digest)
        .join(RELEASES, RELEASES.c.package_id == PACKAGES.c.id)
        .join(SIGNED_FORMS, SIGNED_FORMS.c.release_id == RELEASES.c.id)
        .order_by(newest)
    )
    return {f"acme/{name}@{version}": digest for name, version, digest in rows}


def tags(connection: Connection) -> dict[str, str]:
    """Every tag and the digest of the manifest that it points to."""
    rows = connection.execute(
        select(REPOSITORIES.c.name, TAGS.c.name, MANIFESTS.c.digest)
        .join(TAGS, TAGS.c.repository_id == REPOSITORIES.c.id)
        .join(
            MANIFESTS,
            (MANIFESTS.c.repository_id == TAGS.c.repository_id)
            & (MANIFESTS.c.digest == TAGS.c.digest),
        )
    )
    return {f"{name}@{tag}": digest for name, tag, digest in rows}


def admin_of(registry: Registry, scenario: KillScenario) -> Identity:
    with registry.database.read() as connection:
        found = accounts.find_identity(connection, scenario.token)
    assert found is not None
    return found


def indexed(registry: Registry, scenario: KillScenario) -> dict[str, Digest]:
    """What the signed indexes of all packages say."""
    with registry.database.read() as connection:
        names = connection.execute(select(PACKAGES.c.name)).scalars().all()
    identity = admin_of(registry, scenario)
    return {
        f"acme/{name}@{release.version}": release.forms[-1].package_digest
        for name in names
        for release in read_published_index(registry, identity, f"acme/{name}").releases
    }


def look(scenario: KillScenario, *, whole: float) -> None:
    """Compare a server that is down with what publishers were told; read a part of it whole."""
    with opened(scenario) as registry:
        registry.check_integrity()
        index = indexed(registry, scenario)
        with registry.database.read() as connection:
            assert versions(connection) == tags(connection)
            assert versions(connection) == {ref: str(digest) for ref, digest in index.items()}
        assert scenario.ledger.acknowledged.items() <= index.items()
        some = random.Random(len(index)).sample(sorted(index), int(len(index) * whole))
        for ref in some:
            pull_package(registry, PackageName.parse(ref.partition("@")[0]), index[ref])


def collected(scenario: KillScenario) -> None:
    """Remove all that nothing needs; then nothing more is there than the packages have."""
    with opened(scenario) as registry:
        remove_garbage(registry, now=FAR_FUTURE)
        kept = {str(blob.digest) for blob in registry.storage.list_blobs()}
    needed = {str(digest) for parcel in scenario.packages for digest, _ in parcel.blobs}
    assert kept == needed


def installed(scenario: KillScenario, root: Path) -> None:
    """Install every package by its name, as somebody who has only the signed index."""
    with run_server(scenario.data) as server, opened(scenario) as registry:
        address = RegistryAddress.parse(f"127.0.0.1:{server.port}")
        known = KnownRegistry(address.host, address.url, registry.index_key.public)
        buyer = InstallClient.create(root)
        buyer.user_home.trust.add_registry(known)
        buyer = InstallClient(buyer.user_home, replace(buyer.settings, registry=address.host))
        newest = {str(parcel.package): parcel.ref for parcel in scenario.packages}
        buyer.install(*newest)
        assert buyer.refs() == sorted(newest.values())
        buyer.user_home.check_integrity()


def survive(scenario: KillScenario, folder: Path, *, kills: int, seed: int) -> None:
    for number, _ in enumerate(scenario.run(kills=kills, seed=seed, folder=folder)):
        if number % 2:
            look(scenario, whole=0.1)
    assert scenario.ledger.acknowledged == {
        p.ref: p.contents.package_digest for p in scenario.packages
    }
    look(scenario, whole=1.0)
    collected(scenario)
    look(scenario, whole=1.0)


def test_a_server_that_is_killed_keeps_what_it_acknowledged(
    tmp_path: Path, home: Path, template: PackageTemplate
) -> None:
    scenario = prepared(tmp_path, home, template, count=40, names=4)
    survive(scenario, tmp_path, kills=6, seed=1)
    installed(scenario, tmp_path / "buyer")


@pytest.mark.all
def test_two_hundred_publishes_outlive_a_server_that_is_killed_all_the_time(
    tmp_path: Path, home: Path, template: PackageTemplate
) -> None:
    scenario = prepared(tmp_path, home, template, count=200, names=10)
    survive(scenario, tmp_path, kills=25, seed=2)
    assert len(scenario.ledger.interrupted) > 1
    assert scenario.ledger.interrupted.total() > 10
    installed(scenario, tmp_path / "buyer")
