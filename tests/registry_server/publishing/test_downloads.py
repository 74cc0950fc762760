"""Counting downloads without making readers wait."""

from threading import Thread

import pytest
from sqlalchemy import select

from expertctl.errors import StoreError
from expertctl.trust.keys import PrivateKey
from registry_server.access.identity import Identity
from registry_server.database.tables import RELEASES
from registry_server.publishing.downloads import SECONDS, DownloadCounts
from registry_server.registry import Registry
from tests.registry_server.publishing.parcels import Parcel, Template, push


@pytest.fixture
def parcel(registry: Registry, owner: Identity, template: Template, alice: PrivateKey) -> Parcel:
    made = template.parcel(key=alice)
    push(registry, owner, made)
    return made


def downloads(registry: Registry) -> int:
    with registry.database.read() as connection:
        return connection.execute(select(RELEASES.c.downloads)).scalar_one()


def test_downloads_are_counted_once_each(registry: Registry, parcel: Parcel) -> None:
    counts = DownloadCounts()
    for _ in range(3):
        counts.count("acme/sql", str(parcel.package_digest))
    assert downloads(registry) == 0
    counts.flush(registry.database)
    counts.flush(registry.database)
    assert downloads(registry) == 3


def test_threads_lose_no_count(registry: Registry, parcel: Parcel) -> None:
    counts = DownloadCounts()

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
    registry: Registry, parcel: Parcel, repository: str
) -> None:
    counts = DownloadCounts()
    counts.count(repository, str(parcel.package_digest))
    counts.count("acme/sql", "sha512:" + "0" * 128)
    counts.flush(registry.database)
    assert downloads(registry) == 0


def test_counts_that_could_not_be_written_are_kept(
    registry: Registry, parcel: Parcel, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = DownloadCounts()
    counts.count("acme/sql", str(parcel.package_digest))

    def refuse(*_: object) -> None:
        raise StoreError("locked")

    with monkeypatch.context() as patch:
        patch.setattr("registry_server.publishing.downloads._add", refuse)
        with pytest.raises(StoreError, match="locked"):
            counts.flush(registry.database)
    counts.flush(registry.database)
    assert downloads(registry) == 1


def test_many_different_manifests_ask_to_be_written(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("registry_server.publishing.downloads.MAX_PENDING", 3)
    counts = DownloadCounts(clock=lambda: 0.0)
    counts.flush(registry.database)
    assert [counts.count("acme/sql", digest) for digest in "aabc"] == [False, False, False, True]


def test_the_first_fetch_after_a_while_asks_to_be_written(registry: Registry) -> None:
    now = [0.0]
    counts = DownloadCounts(clock=lambda: now[0])
    assert counts.count("acme/sql", "a")
    counts.flush(registry.database)
    assert not counts.count("acme/sql", "a")
    now[0] = SECONDS
    assert counts.count("acme/sql", "a")
