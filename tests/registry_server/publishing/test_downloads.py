"""Counting downloads without making readers wait."""

from threading import Thread

import pytest
from sqlalchemy import select

from expertctl.errors import StoreError
from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import Identity
from registry_server.database.tables import RELEASES
from registry_server.registry import FLUSH_SECONDS, DownloadCounter, Registry
from tests.registry_server.publishing.package_fixtures import (
    InMemoryPackage,
    PackageTemplate,
    upload_and_publish,
)


@pytest.fixture
def parcel(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> InMemoryPackage:
    made = template.make_package(key=alice)
    upload_and_publish(registry, owner, made)
    return made


def downloads(registry: Registry) -> int:
    with registry.database.read() as connection:
        return connection.execute(select(RELEASES.c.downloads)).scalar_one()


def test_downloads_are_counted_once_each(registry: Registry, parcel: InMemoryPackage) -> None:
    counts = DownloadCounter()
    for _ in range(3):
        counts.count("acme/sql", str(parcel.package_digest))
    assert downloads(registry) == 0
    counts.flush(registry.database)
    counts.flush(registry.database)
    assert downloads(registry) == 3


def test_threads_lose_no_count(registry: Registry, parcel: InMemoryPackage) -> None:
    counts = DownloadCounter()

    def work() -> None:
        for number in range(50):
            counts.count("acme/sql", str(parcel.package_digest))
            if number % 10 == 0:
                counts.flush(registry.database)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts.flush(registry.database)
    assert downloads(registry) == 200


@pytest.mark.parametrize("repository", ["acme/other", "nowhere", "plain/deep/sql", ""])
def test_what_is_no_package_is_nobodys_download(
    registry: Registry, parcel: InMemoryPackage, repository: str
) -> None:
    counts = DownloadCounter()
    counts.count(repository, str(parcel.package_digest))
    counts.count("acme/sql", "sha512:" + "0" * 128)
    counts.flush(registry.database)
    assert downloads(registry) == 0


def test_counts_that_could_not_be_written_are_kept(
    registry: Registry, parcel: InMemoryPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = DownloadCounter()
    counts.count("acme/sql", str(parcel.package_digest))

    def refuse(*_: object) -> None:
        raise StoreError("locked")

    with monkeypatch.context() as patch:
        patch.setattr("registry_server.registry._add_downloads", refuse)
        with pytest.raises(StoreError, match="locked"):
            counts.flush(registry.database)
    counts.flush(registry.database)
    assert downloads(registry) == 1


def test_many_different_manifests_ask_to_be_written(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("registry_server.registry.MAX_PENDING_DOWNLOADS", 3)
    counts = DownloadCounter(clock=lambda: 0.0)
    counts.flush(registry.database)
    assert [counts.count("acme/sql", digest) for digest in "aabc"] == [False, False, False, True]


def test_the_first_fetch_after_a_while_asks_to_be_written(registry: Registry) -> None:
    now = [0.0]
    counts = DownloadCounter(clock=lambda: now[0])
    assert counts.count("acme/sql", "a")
    counts.flush(registry.database)
    assert not counts.count("acme/sql", "a")
    now[0] = FLUSH_SECONDS
    assert counts.count("acme/sql", "a")
