"""What a publish, a yank or a change of keys leaves behind when it stops in the middle."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import event, select

from expertctl.errors import DiskFullError, StoreError
from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import Identity
from registry_server.database.tables import METADATA
from registry_server.operation.gc import remove_garbage
from registry_server.publishing.releases import add_key, revoke_key, yank_release
from registry_server.registry import Registry
from tests.registry_server.publishing.package_fixtures import (
    InMemoryPackage,
    PackageTemplate,
    publish_uploaded,
    pull_package,
    read_published_index,
    sign_with_other_key,
    upload_and_publish,
    upload_blobs,
)

pytestmark = pytest.mark.all

MOST = 200
"""More statements than any change has."""


class ProcessGoneError(Exception):
    """The process is gone."""


@contextmanager
def killed_at(registry: Registry, statement: int) -> Iterator[None]:
    """Stop at the nth statement of every connection, commits included."""
    left = iter(range(statement))

    def stop(*_: object) -> None:
        if next(left, None) is None:
            raise ProcessGoneError

    engine = registry.database._engine
    event.listen(engine, "before_cursor_execute", stop)
    try:
        yield
    finally:
        event.remove(engine, "before_cursor_execute", stop)


@contextmanager
def each_connection(registry: Registry, *pragmas: str) -> Iterator[None]:
    """Run pragmas on every connection that is borrowed."""

    def prepare(connection: sqlite3.Connection, *_: object) -> None:
        for pragma in pragmas:
            connection.execute(pragma)

    engine = registry.database._engine
    event.listen(engine, "checkout", prepare)
    try:
        yield
    finally:
        event.remove(engine, "checkout", prepare)


def everything(registry: Registry) -> dict[str, list[tuple[object, ...]]]:
    with registry.database.read() as connection:
        return {
            table.name: [tuple(row) for row in connection.execute(select(table))]
            for table in METADATA.sorted_tables
        }


def killed_everywhere(registry: Registry, change: Callable[[], object]) -> int:
    """Kill a change at each of its statements, then let it through; return how many it has."""
    before = everything(registry)
    for statement in range(MOST):
        try:
            with killed_at(registry, statement):
                change()
        except ProcessGoneError:
            assert everything(registry) == before
            continue
        assert everything(registry) != before
        return statement
    raise AssertionError("it never came through")


def test_a_publish_that_is_killed_anywhere_leaves_nothing(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    upload_blobs(registry, parcel)
    assert killed_everywhere(registry, lambda: publish_uploaded(registry, owner, parcel)) > 20
    assert read_published_index(registry, owner).revision == 1
    pull_package(registry, parcel.name, parcel.package_digest)


def test_a_second_version_that_is_killed_anywhere_leaves_the_first_as_it_was(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    upload_and_publish(registry, owner, template.make_package(key=alice))
    parcel = template.make_package(version="1.1.0", key=alice)
    upload_blobs(registry, parcel)
    killed_everywhere(registry, lambda: publish_uploaded(registry, owner, parcel))
    index = read_published_index(registry, owner)
    assert (index.revision, len(index.releases)) == (2, 2)


def test_a_re_sign_that_is_killed_anywhere_leaves_the_old_form(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    bob: PrivateKey,
) -> None:
    add_key(registry, owner, namespace="acme", public_key=bob.public.pem(), statement=None)
    old = template.make_package(key=alice)
    new = sign_with_other_key(old, bob)
    upload_and_publish(registry, owner, old)
    upload_blobs(registry, new)
    killed_everywhere(registry, lambda: publish_uploaded(registry, owner, new))
    assert read_published_index(registry, owner).revision == 2


def test_a_yank_that_is_killed_anywhere_leaves_the_index_as_it_was(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    upload_and_publish(registry, owner, parcel)
    killed_everywhere(
        registry,
        lambda: yank_release(registry, owner, name=parcel.name, version="1.0.0", reason="bad"),
    )
    assert read_published_index(registry, owner).revision == 2


def test_a_revocation_that_is_killed_anywhere_is_in_all_indexes_or_none(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    for name in ("acme/sql", "acme/chat", "acme/code"):
        upload_and_publish(registry, owner, template.make_package(name, key=alice))
    killed_everywhere(
        registry,
        lambda: revoke_key(
            registry, owner, namespace="acme", key_id=alice.public.key_id, reason="lost"
        ),
    )
    for name in ("acme/sql", "acme/chat", "acme/code"):
        assert len(read_published_index(registry, owner, name).revoked) == 1


def test_a_publish_on_a_full_disk_fails_closed_and_can_be_repeated(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcels = [template.make_package(version=f"1.{n}.0", key=alice) for n in range(40)]
    for parcel in parcels:
        upload_blobs(registry, parcel)
    with registry.database.read() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    with each_connection(registry, f"PRAGMA max_page_count={pages + 8}"):
        done = sent_until_full(registry, owner, parcels)
    assert 0 < done < len(parcels)
    with each_connection(registry, "PRAGMA max_page_count=1000000"):
        assert [str(r.version) for r in read_published_index(registry, owner).releases] == [
            parcel.version for parcel in parcels[:done]
        ]
        assert read_published_index(registry, owner).revision == done
        assert publish_uploaded(registry, owner, parcels[done]).created
        registry.check_integrity()


def sent_until_full(registry: Registry, owner: Identity, parcels: list[InMemoryPackage]) -> int:
    """Publish one after another; return how many were acknowledged before the disk was full."""
    for number, parcel in enumerate(parcels):
        before = everything(registry)
        try:
            publish_uploaded(registry, owner, parcel)
        except DiskFullError:
            assert everything(registry) == before
            return number
    return len(parcels)


def test_a_publish_on_a_locked_database_fails_closed_and_can_be_repeated(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    upload_blobs(registry, parcel)
    before = everything(registry)
    other = sqlite3.connect(registry.settings.database, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        with (
            each_connection(registry, "PRAGMA busy_timeout=0"),
            pytest.raises(StoreError, match="locked"),
        ):
            publish_uploaded(registry, owner, parcel)
        assert everything(registry) == before
    finally:
        other.close()
    assert publish_uploaded(registry, owner, parcel).created


def test_a_collection_that_is_killed_anywhere_loses_nothing(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    kept = template.make_package(key=alice)
    upload_and_publish(registry, owner, kept)
    gone = template.make_package("acme/gone", key=alice, description="gone")
    for statement in range(MOST):
        upload_blobs(registry, gone)
        try:
            with killed_at(registry, statement):
                remove_garbage(registry, now=4e9)
        except ProcessGoneError:
            registry.check_integrity()
            pull_package(registry, kept.name, kept.package_digest)
            continue
        break
    assert statement > 10
    known = {str(digest) for digest in kept.blobs}
    assert {str(blob.digest) for blob in registry.storage.list_blobs()} == known
