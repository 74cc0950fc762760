"""Index documents state how often they are signed, and are signed again before that has passed."""

import time
from dataclasses import replace
from datetime import UTC, datetime

import anyio
import pytest
from sqlalchemy import select, update

from expertctl.reference import PackageName
from expertctl.registry.index_document import IndexDocument, sign_index
from expertctl.registry.index_store import IndexStore
from expertctl.trust.grants import KnownRegistry
from expertctl.trust.keys import PrivateKey
from registry_server import app as sweeping_module
from registry_server.access.rights import Identity
from registry_server.api.routes import load_index
from registry_server.app import renew_index_batch, run_periodic_tasks
from registry_server.database.tables import PACKAGES
from registry_server.publishing.index import is_renewal_due, load_signed_index, renew_indexes
from registry_server.publishing.releases import yank_release
from registry_server.registry import Registry
from registry_server.settings import DAY
from tests.registry_server.publishing.package_fixtures import (
    PackageTemplate,
    read_published_index,
    upload_and_publish,
)

SQL = PackageName("acme", "sql")


@pytest.fixture(autouse=True)
def published(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    upload_and_publish(registry, owner, template.make_package(key=alice))


def renewed_after(registry: Registry, days: float) -> int:
    """Renew as the server does so many days after the last change."""
    with registry.database.write() as connection:
        now = time.time() + days * DAY
        signer = registry.index_signer
        count = renew_indexes(connection, signer=signer, now=now, max_documents=100)
        assert not is_renewal_due(connection, signer=signer, now=now)
    return count


def aged(registry: Registry, days: float) -> None:
    """Let so many days pass since documents were signed."""
    with registry.database.write() as connection:
        connection.execute(update(PACKAGES).values(signed=PACKAGES.c.signed - days * DAY))


def overdue(document: IndexDocument, days: float) -> int | None:
    return document.overdue_days(datetime.fromtimestamp(time.time() + days * DAY, UTC))


def test_a_document_states_the_interval_of_its_registry(
    registry: Registry, owner: Identity
) -> None:
    yank_release(registry, owner, name=SQL, version="1.0.0", reason="bad")
    document = read_published_index(registry, owner)
    assert document.interval_days == 7
    assert overdue(document, 6.9) is None
    assert overdue(document, 9.1) == 9


@pytest.mark.parametrize(("days", "count"), [(0, 0), (3.4, 0), (3.6, 1), (9, 1), (400, 1)])
def test_a_document_is_signed_again_from_half_of_its_interval_on(
    registry: Registry, owner: Identity, days: float, count: int
) -> None:
    before = read_published_index(registry, owner)
    assert renewed_after(registry, days) == count
    after = read_published_index(registry, owner)
    assert after.revision == before.revision + count
    assert overdue(after, days) is None
    assert replace(after, revision=before.revision, updated=before.updated) == before


@pytest.mark.parametrize(("interval", "days", "count"), [(1, 0.6, 1), (30, 14, 0), (30, 16, 1)])
def test_the_interval_is_a_setting(
    registry: Registry, owner: Identity, interval: int, days: float, count: int
) -> None:
    changed = replace(registry, settings=replace(registry.settings, index_interval_days=interval))
    assert renewed_after(changed, days) == count
    assert read_published_index(registry, owner).interval_days == (interval if count else 7)


def test_a_renewal_is_no_change_of_the_package(registry: Registry) -> None:
    def row() -> tuple[object, ...]:
        columns = PACKAGES.c.updated, PACKAGES.c.latest, PACKAGES.c.description
        with registry.database.read() as connection:
            return tuple(connection.execute(select(*columns)).one())

    before = row()
    assert renewed_after(registry, 5) == 1
    assert row() == before


def test_a_client_takes_the_renewed_document_after_the_old_one(
    registry: Registry, owner: Identity, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = IndexStore(tmp_path_factory.mktemp("home"))
    known = KnownRegistry("r.example", "https://r.example", registry.index_key.public)
    first = store.accept(known, SQL, load_index(registry, owner, SQL), floor=None)
    renewed_after(registry, 5)
    floor = store.load(known, SQL)
    second = store.accept(known, SQL, load_index(registry, owner, SQL), floor=floor)
    assert (first.revision, second.revision) == (1, 2)
    assert second.releases == first.releases


def test_a_document_of_an_older_version_is_valid_until_it_is_renewed(
    registry: Registry, owner: Identity
) -> None:
    old = replace(read_published_index(registry, owner), interval_days=None)
    envelope = sign_index(old, registry.index_key)
    with registry.database.write() as connection:
        connection.execute(update(PACKAGES).values(index_document=envelope))
    assert renew_index_batch(registry) is False
    assert read_published_index(registry, owner) == old
    assert overdue(old, 400) is None
    aged(registry, 4)
    renew_index_batch(registry)
    assert read_published_index(registry, owner).interval_days == 7


def test_the_oldest_are_renewed_first_and_a_few_at_once(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    aged(registry, 1)
    upload_and_publish(registry, owner, template.make_package("acme/new", key=alice))
    now = time.time() + 5 * DAY
    with registry.database.write() as connection:
        signer = registry.index_signer
        assert renew_indexes(connection, signer=signer, now=now, max_documents=1) == 1
        assert is_renewal_due(connection, signer=signer, now=now)
    assert read_published_index(registry, owner).revision == 2
    with registry.database.read() as connection:
        assert load_signed_index(connection, PackageName("acme", "new"))
    assert renewed_after(registry, 5) == 1


def test_nothing_is_written_while_nothing_is_due(registry: Registry) -> None:
    before = registry.database.version()
    assert renew_index_batch(registry) is False
    assert registry.database.version() == before


def test_a_server_that_was_off_for_weeks_renews_all_when_it_starts(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweeping_module, "RENEWAL_BATCH", 1)
    upload_and_publish(registry, owner, template.make_package("acme/other", key=alice))
    aged(registry, 21)

    async def run() -> None:
        rested = anyio.Event()

        async def pause(_: float) -> None:
            rested.set()
            await anyio.sleep_forever()

        async with run_periodic_tasks(registry, pause=pause):
            await rested.wait()

    anyio.run(run)
    assert read_published_index(registry, owner).revision == 2
    assert renewed_after(registry, 0) == 0


def test_a_renewal_that_fails_is_logged_and_tried_later(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    aged(registry, 4)
    with monkeypatch.context() as broken:
        broken.setattr("expertctl.registry.index_document.MAX_BYTES", 10)
        assert renew_index_batch(registry) is False
    assert "would be too large" in caplog.text
    renew_index_batch(registry)
    with registry.database.read() as connection:
        assert connection.execute(select(PACKAGES.c.revision)).scalar_one() == 2
