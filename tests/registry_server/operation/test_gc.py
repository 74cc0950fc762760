"""Garbage collection beside uploads and publishes: what it takes, and what it never takes."""

import os
import time
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread

import pytest
from sqlalchemy import insert, select

from expertctl.digest import Digest
from expertctl.errors import StoreError
from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import Identity
from registry_server.database.tables import BLOBS, REPOSITORY_BLOBS, UPLOADS
from registry_server.errors import OciError
from registry_server.oci import manifests
from registry_server.operation.gc import GarbageSummary, _is_old_file, find_garbage, remove_garbage
from registry_server.publishing import releases
from registry_server.registry import Registry, open_registry
from tests.registry_server.publishing.package_fixtures import (
    InMemoryPackage,
    PackageTemplate,
    publish_uploaded,
    pull_package,
    read_published_index,
    upload_and_publish,
    upload_blobs,
)

DAY = 86400.0
NOTHING = GarbageSummary(0, 0, 0)


def later(days: float = 2) -> float:
    return time.time() + days * DAY


def known(registry: Registry) -> set[str]:
    with registry.database.read() as connection:
        return set(connection.execute(select(BLOBS.c.digest)).scalars())


def lying(registry: Registry) -> set[str]:
    return {str(blob.digest) for blob in registry.storage.list_blobs()}


def stray_blob(registry: Registry, data: bytes = b"stray") -> Digest:
    """A file without a row, as a crash leaves it."""
    digest = Digest.compute(data)
    temporary = registry.settings.uploads / "temporary"
    temporary.write_bytes(data)
    registry.storage.adopt(temporary, digest)
    return digest


def begin_upload(registry: Registry, owner: Identity, name: str, *, updated: float) -> Path:
    path = registry.settings.uploads / name
    path.write_bytes(b"half")
    os.utime(path, (updated, updated))
    with registry.database.write() as connection:
        row = {"id": name, "repository_id": 1, "user_id": owner.user_id, "size": 4}
        connection.execute(insert(UPLOADS).values(**row, created=updated, updated=updated))
    return path


def test_nothing_of_a_published_package_is_garbage(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    upload_and_publish(registry, owner, parcel)
    assert find_garbage(registry, now=later(1000)) == NOTHING
    assert remove_garbage(registry, now=later(1000)) == NOTHING
    pull_package(registry, parcel.name, parcel.package_digest)


def test_blobs_that_no_manifest_names_go_after_the_grace_period(
    registry: Registry, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    upload_blobs(registry, parcel)
    sizes = sum(map(len, parcel.blobs.values()))
    assert remove_garbage(registry, now=later(0.5)) == NOTHING
    assert known(registry) == lying(registry) == {str(digest) for digest in parcel.blobs}
    expected = GarbageSummary(len(parcel.blobs), sizes, 0)
    assert find_garbage(registry, now=later()) == expected
    assert known(registry) == lying(registry) != set()
    assert remove_garbage(registry, now=later()) == expected
    assert known(registry) == lying(registry) == set()
    assert remove_garbage(registry, now=later()) == NOTHING


def test_a_blob_that_two_repositories_have_goes_from_the_one_that_does_not_name_it(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    upload_and_publish(registry, owner, parcel)
    upload_blobs(
        registry, replace(parcel, name=template.make_package("acme/other", key=alice).name)
    )
    assert remove_garbage(registry, now=later()) == NOTHING
    with registry.database.read() as connection:
        links = connection.execute(select(REPOSITORY_BLOBS.c.repository_id)).scalars().all()
    assert set(links) == {1}
    pull_package(registry, parcel.name, parcel.package_digest)


def test_a_blob_that_comes_again_has_its_grace_period_anew(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    upload_blobs(registry, parcel)
    with registry.database.write() as connection:
        connection.execute(BLOBS.update().values(created=0))
        connection.execute(REPOSITORY_BLOBS.update().values(added=0))
    upload_blobs(registry, parcel)
    assert remove_garbage(registry, now=time.time()) == NOTHING
    publish_uploaded(registry, owner, parcel)


def test_a_manifest_that_was_deleted_gives_its_blobs_back(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcel = template.make_package(key=alice)
    upload_and_publish(registry, owner, parcel)
    with registry.database.write() as connection:
        manifests.remove_manifest(connection, 1, str(parcel.package_digest))
    assert remove_garbage(registry, now=later()).blobs == len(parcel.blobs)


def test_a_file_without_a_row_goes_when_it_is_old(registry: Registry) -> None:
    digest = stray_blob(registry)
    assert (
        find_garbage(registry, now=later(0.5))
        == remove_garbage(registry, now=later(0.5))
        == NOTHING
    )
    assert (
        find_garbage(registry, now=later())
        == remove_garbage(registry, now=later())
        == GarbageSummary(1, 5, 0)
    )
    assert registry.storage.size(digest) is None


def test_files_that_are_not_ours_are_left_alone(registry: Registry) -> None:
    strange = registry.settings.blobs / "sha256" / "ab" / "README"
    strange.parent.mkdir(parents=True)
    strange.write_text("mine")
    assert remove_garbage(registry, now=later()) == NOTHING
    assert strange.read_text() == "mine"


def test_uploads_that_nobody_continued_go_with_their_files(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    upload_blobs(registry, template.make_package(key=alice))
    now = time.time()
    old = begin_upload(registry, owner, "old", updated=now - 2 * DAY)
    young = begin_upload(registry, owner, "young", updated=now - 60)
    assert find_garbage(registry, now=now) == GarbageSummary(0, 0, 1)
    assert remove_garbage(registry, now=now) == GarbageSummary(0, 0, 1)
    assert (old.exists(), young.exists()) == (False, True)
    with registry.database.read() as connection:
        assert connection.execute(select(UPLOADS.c.id)).scalars().all() == ["young"]


def test_files_of_uploads_without_a_row_go_when_they_are_old(registry: Registry) -> None:
    now = time.time()
    for name, age in (("left", 2 * DAY), ("fresh", 0)):
        path = registry.settings.uploads / name
        path.write_bytes(b"x")
        os.utime(path, (now - age, now - age))
    assert (
        find_garbage(registry, now=now)
        == remove_garbage(registry, now=now)
        == GarbageSummary(0, 0, 1)
    )
    assert [path.name for path in registry.settings.uploads.iterdir()] == ["fresh"]


def test_garbage_beyond_one_batch_goes_too(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("registry_server.operation.gc.BATCH", 3)
    for number in range(8):
        stray_blob(registry, b"stray %d" % number)
    assert remove_garbage(registry, now=later()).blobs == 8
    assert lying(registry) == set()


STEPS = ("remove_stale_uploads", "_collect_links", "_collect_rows", "_collect_files")


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_between_two_steps_leaves_no_row_without_its_file(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    kept = template.make_package(key=alice)
    upload_and_publish(registry, owner, kept)
    upload_blobs(registry, template.make_package("acme/gone", key=alice, description="gone"))

    def crash(*_: object) -> None:
        raise StoreError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(f"registry_server.operation.gc.{step}", crash)
        with pytest.raises(StoreError, match="killed"):
            remove_garbage(registry, now=later())
    assert known(registry) <= lying(registry)
    pull_package(registry, kept.name, kept.package_digest)
    remove_garbage(registry, now=later())
    assert known(registry) == lying(registry) == {str(digest) for digest in kept.blobs}


@pytest.mark.parametrize("after", range(1, 5))
def test_a_crash_in_the_middle_of_removing_files_leaves_no_row_without_its_file(
    registry: Registry,
    template: PackageTemplate,
    alice: PrivateKey,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
) -> None:
    upload_blobs(registry, template.make_package(key=alice))
    real = type(registry.storage).remove
    left = iter(range(after))

    def remove(storage: object, digest: object) -> None:
        if next(left, None) is None:
            raise StoreError("killed")
        real(storage, digest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(type(registry.storage), "remove", remove)
        with pytest.raises(StoreError, match="killed"):
            remove_garbage(registry, now=later())
    assert known(registry) == set() != lying(registry)
    remove_garbage(registry, now=later())
    assert lying(registry) == set()


def test_a_publish_whose_blobs_were_just_collected_is_refused_and_can_be_repeated(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    """What was found before the bytes were read is asked again in the transaction (attack 87)."""
    parcel = template.make_package(key=alice)
    upload_blobs(registry, parcel)
    remove_garbage(registry, now=later())
    with pytest.raises(OciError, match="of its blobs are not in acme/sql"):
        publish_uploaded(registry, owner, parcel)
    assert upload_and_publish(registry, owner, parcel).created
    pull_package(registry, parcel.name, parcel.package_digest)


def test_a_collection_between_reading_the_bytes_and_the_commit_loses_nothing(
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parcel = template.make_package(key=alice)
    upload_blobs(registry, parcel)
    real = releases._read_contents

    def slow(*arguments: object) -> object:
        found = real(*arguments)  # type: ignore[arg-type]
        remove_garbage(registry, now=later())
        return found

    monkeypatch.setattr(releases, "_read_contents", slow)
    with pytest.raises(OciError, match="of its blobs are not in acme/sql"):
        publish_uploaded(registry, owner, parcel)
    assert known(registry) == lying(registry) == set()


def test_collections_beside_publishes_lose_nothing(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    parcels = [
        template.make_package(f"acme/p{n}", key=alice, description=f"number {n}") for n in range(12)
    ]
    barrier = Barrier(3)
    failures: list[BaseException] = []
    other = open_registry(registry.settings)  # as `registry gc` beside a server has it

    def publisher(mine: list[InMemoryPackage]) -> None:
        barrier.wait()
        try:
            for parcel in mine:
                _push_until_it_is_there(registry, owner, parcel)
        except Exception as error:  # noqa: BLE001  # shown by the test's thread
            failures.append(error)

    def collector() -> None:
        barrier.wait()
        try:
            for _ in range(40):
                remove_garbage(other, now=later())
        except Exception as error:  # noqa: BLE001  # shown by the test's thread
            failures.append(error)

    threads = [
        Thread(target=publisher, args=(parcels[:6],)),
        Thread(target=publisher, args=(parcels[6:],)),
        Thread(target=collector),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other.close()
    assert failures == []
    remove_garbage(registry, now=later())
    for parcel in parcels:
        read_published_index(registry, owner, str(parcel.name))
        pull_package(registry, parcel.name, parcel.package_digest)
    registry.check_integrity()


def _push_until_it_is_there(registry: Registry, owner: Identity, parcel: InMemoryPackage) -> None:
    """As clients do: blobs that were collected meanwhile are uploaded again."""
    for _ in range(1000):
        try:
            upload_and_publish(registry, owner, parcel)
        except OciError:
            continue
        return
    raise AssertionError(f"{parcel.ref} could not be published")


def test_an_upload_that_became_a_blob_while_it_was_looked_at_is_no_stray(tmp_path: Path) -> None:
    assert not _is_old_file(tmp_path / "gone", later())
