"""Index documents state how often they are signed, and are signed again before that has passed."""

import time
from dataclasses import replace
from datetime import UTC, datetime

import anyio
import pytest
from sqlalchemy import select, update

from expertctl.reference import PackageName
from expertctl.registry.index_document import IndexDocument
from expertctl.registry.index_envelope import sign_index
from expertctl.registry.index_store import IndexStore
from expertctl.trust.grant import KnownRegistry
from expertctl.trust.keys import PrivateKey
from registry_server.access.identity import Identity
from registry_server.database.tables import PACKAGES
from registry_server.operation import sweeping as sweeping_module
from registry_server.operation.sweeping import renew, sweeping
from registry_server.publishing.index import index_is_due, renew_indexes, signed_index
from registry_server.publishing.routes import read_index
from registry_server.publishing.yank import yank
from registry_server.registry import Registry
from registry_server.settings import DAY
from tests.registry_server.publishing.parcels import Template, push, read

SQL = PackageName("acme", "sql")


@pytest.fixture(autouse=True)
def published(registry: Registry, owner: Identity, template: Template, alice: PrivateKey) -> None:
    push(registry, owner, template.parcel(key=alice))


def renewed_after(registry: Registry, days: float) -> int:
    """Renew as the server does so many days after the last change."""
    with registry.database.write() as connection:
        now = time.time() + days * DAY
        signer = registry.index_signer
        count = renew_indexes(connection, signer=signer, now=now, at_most=100)
        assert not index_is_due(connection, signer=signer, now=now)
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
    yank(registry, owner, name=SQL, version="1.0.0", reason="bad")
    document = read(registry, owner)
    assert document.interval_days == 7
    assert overdue(document, 6.9) is None
    assert overdue(document, 9.1) == 9


@pytest.mark.parametrize(("days", "count"), [(0, 0), (3.4, 0), (3.6, 1), (9, 1), (400, 1)])
def test_a_document_is_signed_again_from_half_of_its_interval_on(
    registry: Registry, owner: Identity, days: float, count: int
) -> None:
    before = read(registry, owner)
    assert renewed_after(registry, days) == count
    after = read(registry, owner)
    assert after.revision == before.revision + count
    assert overdue(after, days) is None
    assert replace(after, revision=before.revision, updated=before.updated) == before


@pytest.mark.parametrize(("interval", "days", "count"), [(1, 0.6, 1), (30, 14, 0), (30, 16, 1)])
def test_the_interval_is_a_setting(
    registry: Registry, owner: Identity, interval: int, days: float, count: int
) -> None:
    changed = replace(registry, settings=replace(registry.settings, index_interval_days=interval))
    assert renewed_after(changed, days) == count
    assert read(registry, owner).interval_days == (interval if count else 7)


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
    first = store.believe(known, SQL, read_index(registry, owner, SQL), floor=None)
    renewed_after(registry, 5)
    floor = store.recall(known, SQL)
    second = store.believe(known, SQL, read_index(registry, owner, SQL), floor=floor)
    assert (first.revision, second.revision) == (1, 2)
    assert second.releases == first.releases


def test_a_document_of_an_older_version_is_valid_until_it_is_renewed(
    registry: Registry, owner: Identity
) -> None:
    old = replace(read(registry, owner), interval_days=None)
    envelope = sign_index(old, registry.index_key)
    with registry.database.write() as connection:
        connection.execute(update(PACKAGES).values(index_document=envelope))
    assert renew(registry) is False
    assert read(registry, owner) == old
    assert overdue(old, 400) is None
    aged(registry, 4)
    renew(registry)
    assert read(registry, owner).interval_days == 7


def test_the_oldest_are_renewed_first_and_a_few_at_once(
    registry: Registry, owner: Identity, template: Template, alice: PrivateKey
) -> None:
    aged(registry, 1)
    push(registry, owner, template.parcel("acme/new", key=alice))
    now = time.time() + 5 * DAY
    with registry.database.write() as connection:
        signer = registry.index_signer
        assert renew_indexes(connection, signer=signer, now=now, at_most=1) == 1
        assert index_is_due(connection, signer=signer, now=now)
    assert read(registry, owner).revision == 2
    with registry.database.read() as connection:
        assert signed_index(connection, PackageName("acme", "new"))
    assert renewed_after(registry, 5) == 1


def test_nothing_is_written_while_nothing_is_due(registry: Registry) -> None:
    before = registry.database.version()
    assert renew(registry) is False
    assert registry.database.version() == before


def test_a_server_that_was_off_for_weeks_renews_all_when_it_starts(
    registry: Registry,
    owner: Identity,
    template: Template,
    alice: PrivateKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweeping_module, "RENEWED_AT_ONCE", 1)
    push(registry, owner, template.parcel("acme/other", key=alice))
    aged(registry, 21)

    async def run() -> None:
        rested = anyio.Event()

        async def pause(_: float) -> None:
            rested.set()
            await anyio.sleep_forever()

        async with sweeping(registry, pause=pause):
            await rested.wait()

    anyio.run(run)
    assert read(registry, owner).revision == 2
    assert renewed_after(registry, 0) == 0


def test_a_renewal_that_fails_is_logged_and_tried_later(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    aged(registry, 4)
    with monkeypatch.context() as broken:
        broken.setattr("expertctl.registry.index_document.MAX_BYTES", 10)
        assert renew(registry) is False
    assert "would be too large" in caplog.text
    renew(registry)
    with registry.database.read() as connection:
        assert connection.execute(select(PACKAGES.c.revision)).scalar_one() == 2
