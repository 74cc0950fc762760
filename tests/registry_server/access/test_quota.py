from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy import Connection, delete, func, insert, select, update

from expertctl.errors import BudgetError, StoreError
from registry_server.access import namespaces
from registry_server.access.namespaces import NamespaceRow
from registry_server.database.tables import (
    BLOBS,
    MANIFESTS,
    NAMESPACES,
    REPOSITORIES,
    REPOSITORY_BLOBS,
    UPLOADS,
)
from registry_server.oci import blobs
from registry_server.registry import BlobDigest
from registry_server.settings import RegistryLimits
from tests.registry_server.conftest import NewRegistry
from tests.registry_server.harness import RegistryHarness


def repository(connection: Connection, namespace: NamespaceRow, name: str) -> int:
    row = {"namespace_id": namespace.id, "name": f"{namespace.name}/{name}", "created": 0.0}
    made = connection.execute(insert(REPOSITORIES).values(row)).inserted_primary_key
    assert made is not None
    return int(made[0])


def blob(connection: Connection, digest: str, size: int) -> None:
    connection.execute(insert(BLOBS).values(digest=digest, size=size, created=0.0))


def link(connection: Connection, repository_id: int, digest: str) -> None:
    row = {"repository_id": repository_id, "digest": digest, "added": 0.0}
    connection.execute(insert(REPOSITORY_BLOBS).values(row))


def begin_upload(connection: Connection, repository_id: int, upload: str, size: int) -> None:
    row = {"id": upload, "repository_id": repository_id, "size": size}
    connection.execute(insert(UPLOADS).values(**row, created=0.0, updated=0.0))


@pytest.fixture
def acme(connection: Connection) -> NamespaceRow:
    return namespaces.create_namespace(connection, "acme", kind="oci", read="token", quota=100)


def test_an_empty_namespace_uses_nothing(connection: Connection, acme: NamespaceRow) -> None:
    assert namespaces.get_used_bytes(connection, acme.id) == 0


def test_each_blob_counts_once_and_uploads_and_manifests_count(
    connection: Connection, acme: NamespaceRow
) -> None:
    one, two = (repository(connection, acme, name) for name in "ab")
    blob(connection, "sha256:a", 10)
    blob(connection, "sha256:b", 5)
    link(connection, one, "sha256:a")
    link(connection, two, "sha256:a")
    link(connection, two, "sha256:b")
    begin_upload(connection, one, "u", 7)
    connection.execute(
        insert(MANIFESTS).values(
            repository_id=one,
            digest="sha256:m",
            media_type="t",
            size=3,
            content=b"abc",
            created=0.0,
        )
    )
    assert namespaces.get_used_bytes(connection, acme.id) == 10 + 5 + 7 + 3


def test_attack_86_the_bytes_of_others_are_neither_counted_nor_told(
    connection: Connection, acme: NamespaceRow
) -> None:
    """A blob that another namespace has costs as much here as one that nobody has."""
    other = namespaces.create_namespace(connection, "other", kind="oci", read="token")
    blob(connection, "sha256:a", 60)
    link(connection, repository(connection, other, "a"), "sha256:a")
    assert namespaces.get_used_bytes(connection, acme.id) == 0
    own = repository(connection, acme, "a")
    link(connection, own, "sha256:a")
    blob(connection, "sha256:new", 60)
    link(connection, own, "sha256:new")
    assert namespaces.get_used_bytes(connection, acme.id) == 120


def test_bytes_that_are_taken_away_are_room_again(
    connection: Connection, acme: NamespaceRow
) -> None:
    other = namespaces.create_namespace(connection, "other", kind="oci", read="token")
    foreign, one, two = (
        repository(connection, n, k) for n, k in ((other, "a"), (acme, "a"), (acme, "b"))
    )
    blob(connection, "sha256:a", 10)
    for own in (foreign, one, two):
        link(connection, own, "sha256:a")
    begin_upload(connection, one, "u", 7)
    used = [namespaces.get_used_bytes(connection, acme.id)]
    for own in (one, two):
        connection.execute(delete(REPOSITORY_BLOBS).where(REPOSITORY_BLOBS.c.repository_id == own))
        used.append(namespaces.get_used_bytes(connection, acme.id))
    for size in (9, 2):
        connection.execute(update(UPLOADS).values(size=size))
        used.append(namespaces.get_used_bytes(connection, acme.id))
    connection.execute(delete(UPLOADS))
    used.append(namespaces.get_used_bytes(connection, acme.id))
    assert used == [17, 17, 7, 9, 2, 0]
    assert namespaces.get_used_bytes(connection, other.id) == 10
    namespaces.check_used_bytes(connection)


def test_a_link_that_is_made_again_costs_nothing(
    connection: Connection, acme: NamespaceRow
) -> None:
    blob(connection, f"sha256:{'a' * 64}", 10)
    own = repository(connection, acme, "a")
    for _ in range(3):
        blobs.link_blob(connection, own, BlobDigest("sha256", "a" * 64))
    assert namespaces.get_used_bytes(connection, acme.id) == 10


def test_a_count_that_is_wrong_is_damage(connection: Connection, acme: NamespaceRow) -> None:
    namespaces.check_used_bytes(connection)
    connection.execute(update(NAMESPACES).values(used=5))
    with pytest.raises(StoreError, match="acme uses 0 bytes, and 5 were counted"):
        namespaces.check_used_bytes(connection)


def test_room_ends_at_the_quota(connection: Connection, acme: NamespaceRow) -> None:
    begin_upload(connection, repository(connection, acme, "a"), "u", 60)
    namespaces.require_quota(connection, acme, 40, RegistryLimits())
    with pytest.raises(BudgetError, match=r"acme uses 60 of 100 bytes; 41 more do not fit"):
        namespaces.require_quota(connection, acme, 41, RegistryLimits())


def test_a_namespace_without_a_quota_has_that_of_the_registry(connection: Connection) -> None:
    row = namespaces.create_namespace(connection, "acme", kind="oci", read="token")
    assert namespaces.get_quota(row, RegistryLimits(quota_bytes=9)) == 9
    with pytest.raises(BudgetError, match="0 of 9 bytes"):
        namespaces.require_quota(connection, row, 10, RegistryLimits(quota_bytes=9))


def test_a_quota_of_nothing_takes_nothing(connection: Connection) -> None:
    row = namespaces.create_namespace(connection, "acme", kind="oci", read="token", quota=0)
    namespaces.require_quota(connection, row, 0, RegistryLimits())
    with pytest.raises(BudgetError):
        namespaces.require_quota(connection, row, 1, RegistryLimits())


def test_attack_86_uploads_side_by_side_do_not_overshoot_together(served: RegistryHarness) -> None:
    """Eight threads, each with its own connection to the one file, take 30 of 100 bytes each."""
    database = served.registry.database
    with database.write() as connection:
        acme = namespaces.create_namespace(connection, "acme", kind="oci", read="token", quota=100)
        own = repository(connection, acme, "a")
    together = Barrier(8, timeout=120)

    def take(number: int) -> bool:
        together.wait()
        try:
            with database.write() as connection:
                namespaces.require_quota(connection, acme, 30, served.settings.limits)
                begin_upload(connection, own, str(number), 30)
        except BudgetError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(take, range(8)))
    assert taken.count(True) == 3
    with database.read() as connection:
        assert namespaces.get_used_bytes(connection, acme.id) == 90


def test_attack_86_uploads_through_two_servers_do_not_overshoot_together(
    make_registry: NewRegistry,
) -> None:
    """Two processes would open the file twice, as here; SQLite lets one of them write."""
    served = make_registry()
    second = RegistryHarness(served.registry, served.app).registry.database.open(
        served.settings.database
    )
    with served.registry.database.write() as connection:
        acme = namespaces.create_namespace(connection, "acme", kind="oci", read="token", quota=100)
        own = repository(connection, acme, "a")
    together = Barrier(4, timeout=120)

    def take(number: int) -> bool:
        together.wait()
        database = (served.registry.database, second)[number % 2]
        try:
            with database.write() as connection:
                namespaces.require_quota(connection, acme, 60, served.settings.limits)
                begin_upload(connection, own, str(number), 60)
        except BudgetError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(take, range(4)))
    with second.read() as connection:
        total = connection.execute(select(func.sum(UPLOADS.c.size))).scalar_one()
    second.close()
    assert taken.count(True) == 1
    assert total == 60
