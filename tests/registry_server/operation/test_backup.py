"""Backups of a registry that goes on meanwhile, and what may not end up in them."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from expertctl.digest import Digest
from expertctl.errors import DigestError, StoreError, UsageError
from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import Identity
from registry_server.database.tables import UPLOADS
from registry_server.operation import backup
from registry_server.operation.backup import (
    BackupDocument,
    copy_blob,
    create_backup,
    list_known_blobs,
)
from registry_server.operation.gc import remove_garbage
from registry_server.operation.new_registry import restore_backup
from registry_server.registry import BlobDigest, Registry, open_registry
from registry_server.settings import read_settings
from tests.registry_server.publishing.package_fixtures import (
    InMemoryPackage,
    PackageTemplate,
    pull_package,
    read_published_index,
    upload_and_publish,
    upload_blobs,
)


def check_all_present(data: Path, identity: Identity, parcels: list[InMemoryPackage]) -> None:
    """Demand that a registry has these packages, and that all its index documents can be pulled."""
    registry = open_registry(read_settings(data))
    try:
        registry.check_integrity()
        document = read_published_index(registry, identity)
        there = {str(release.version): release for release in document.releases}
        assert {parcel.version for parcel in parcels} <= set(there)
        for release in document.releases:
            for form in release.forms:
                contents = pull_package(registry, document.package, form.package_digest)
                assert contents.content_digest == release.content_digest
    finally:
        registry.close()


def files(folder: Path) -> dict[str, int]:
    """Every file below a folder with its inode."""
    return {str(p.relative_to(folder)): p.stat().st_ino for p in folder.rglob("*") if p.is_file()}


def test_a_backup_is_a_registry_again(
    tmp_path: Path,
    registry: Registry,
    owner: Identity,
    alice: PrivateKey,
    template: PackageTemplate,
) -> None:
    parcels = [template.make_package(version=f"1.0.{n}", key=alice) for n in range(3)]
    for parcel in parcels:
        upload_and_publish(registry, owner, parcel)
    made = create_backup(registry.settings, tmp_path / "backup")
    assert made.blobs == made.new == len(list_known_blobs(registry.settings.database))
    restored = restore_backup(tmp_path / "backup", tmp_path / "again")
    assert (restored.blobs, restored.bytes) == (made.blobs, made.bytes)
    check_all_present(tmp_path / "again", owner, parcels)
    assert (tmp_path / "again").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "again" / "keys" / "index.pem").stat().st_mode & 0o777 == 0o600


@pytest.mark.all
def test_a_backup_while_others_publish_has_all_that_was_acknowledged_before(
    tmp_path: Path,
    registry: Registry,
    owner: Identity,
    alice: PrivateKey,
    template: PackageTemplate,
) -> None:
    """And whatever else is in its index can be pulled too, in every of several backups."""
    acknowledged: list[InMemoryPackage] = []
    ended = threading.Event()
    began = threading.Event()

    def publish() -> None:
        for number in range(40):
            parcel = template.make_package(version=f"1.0.{number}", key=alice)
            upload_and_publish(registry, owner, parcel)
            acknowledged.append(parcel)
            began.set()
        ended.set()

    writer = threading.Thread(target=publish)
    writer.start()
    assert began.wait(60)
    rounds = 0
    while not ended.is_set() or rounds == 0:
        before = list(acknowledged)
        create_backup(registry.settings, tmp_path / "backup")
        restore_backup(tmp_path / "backup", tmp_path / f"again-{rounds}")
        check_all_present(tmp_path / f"again-{rounds}", owner, before)
        rounds += 1
    writer.join(60)
    assert len(acknowledged) == 40


def test_the_next_backup_takes_only_what_is_new(
    tmp_path: Path,
    registry: Registry,
    owner: Identity,
    alice: PrivateKey,
    template: PackageTemplate,
) -> None:
    target = tmp_path / "backup"
    upload_and_publish(registry, owner, template.make_package(version="1.0.0", key=alice))
    first = create_backup(registry.settings, target)
    kept = {name: n for name, n in files(target).items() if name.startswith("blobs/")}
    same = create_backup(registry.settings, target)
    assert (same.blobs, same.new, same.new_bytes) == (first.blobs, 0, 0)
    upload_and_publish(registry, owner, template.make_package(version="1.0.1", key=alice))
    next_ = create_backup(registry.settings, target)
    assert (next_.new, next_.blobs) == (2, first.blobs + 2)  # expert.json and the signature
    assert kept.items() <= files(target).items()
    assert len(list((target / "state").iterdir())) == 3


def test_blobs_that_are_no_longer_known_leave_the_backup(
    tmp_path: Path,
    registry: Registry,
    owner: Identity,
    alice: PrivateKey,
    template: PackageTemplate,
) -> None:
    upload_blobs(registry, template.make_package(key=alice))
    assert create_backup(registry.settings, tmp_path / "backup").blobs > 0
    now = registry.settings.limits.grace_seconds * 2 + 4e9
    remove_garbage(registry, now=now)
    assert create_backup(registry.settings, tmp_path / "backup").blobs == 0
    assert not [p for p in (tmp_path / "backup" / "blobs").rglob("*") if p.is_file()]


def test_garbage_that_goes_meanwhile_is_not_missed(
    tmp_path: Path,
    registry: Registry,
    owner: Identity,
    alice: PrivateKey,
    template: PackageTemplate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attack 87: collection between the copy of the database and that of the blobs."""
    upload_and_publish(registry, owner, template.make_package(version="1.0.0", key=alice))
    upload_blobs(registry, template.make_package(version="2.0.0", key=alice))
    copy_state = backup._copy_state_files

    def then_collect(*arguments: object) -> None:
        copy_state(*arguments)  # type: ignore[arg-type]
        remove_garbage(registry, now=registry.settings.limits.grace_seconds * 2 + 4e9)

    monkeypatch.setattr(backup, "_copy_state_files", then_collect)
    create_backup(registry.settings, tmp_path / "backup")
    restore_backup(tmp_path / "backup", tmp_path / "again")
    check_all_present(tmp_path / "again", owner, [])
    assert len(list_known_blobs(tmp_path / "again" / "registry.db")) == 5


def test_a_blob_that_is_needed_and_gone_is_told(
    tmp_path: Path,
    registry: Registry,
    owner: Identity,
    alice: PrivateKey,
    template: PackageTemplate,
) -> None:
    parcel = template.make_package(key=alice)
    upload_and_publish(registry, owner, parcel)
    create_backup(registry.settings, tmp_path / "good")
    lost = parcel.layout.files[0].digest
    registry.storage.path(lost).unlink()
    with pytest.raises(StoreError, match=f"blob {lost} is needed"):
        create_backup(registry.settings, tmp_path / "bad")
    assert not (tmp_path / "bad" / "backup.json").exists()


@pytest.mark.parametrize("step", ["_copy_state_files", "_copy_blobs", "hash_file", "publish_file"])
def test_an_interrupted_backup_leaves_the_one_before_it(
    step: str,
    tmp_path: Path,
    registry: Registry,
    owner: Identity,
    alice: PrivateKey,
    template: PackageTemplate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = template.make_package(version="1.0.0", key=alice)
    upload_and_publish(registry, owner, first)
    create_backup(registry.settings, tmp_path / "backup")
    upload_and_publish(registry, owner, template.make_package(version="2.0.0", key=alice))
    real = getattr(backup, step)

    def dies(*arguments: object) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(backup, step, dies)
        with pytest.raises(KeyboardInterrupt):
            create_backup(registry.settings, tmp_path / "backup")
    restore_backup(tmp_path / "backup", tmp_path / "again")
    check_all_present(tmp_path / "again", owner, [first])
    assert create_backup(registry.settings, tmp_path / "backup").blobs == 7


def test_on_another_file_system_blobs_are_copied_and_hashed(
    tmp_path: Path,
    registry: Registry,
    owner: Identity,
    alice: PrivateKey,
    template: PackageTemplate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    parcel = template.make_package(key=alice)
    upload_and_publish(registry, owner, parcel)
    monkeypatch.setattr(os, "link", refuse)
    create_backup(registry.settings, tmp_path / "backup")
    restore_backup(tmp_path / "backup", tmp_path / "again")
    check_all_present(tmp_path / "again", owner, [parcel])
    lost = registry.storage.path(parcel.layout.files[0].digest)
    lost.write_bytes(b"x" * lost.stat().st_size)
    with pytest.raises(DigestError, match="are not those of"):
        create_backup(registry.settings, tmp_path / "other")


def test_a_blob_of_another_size_is_taken_anew(
    tmp_path: Path,
    registry: Registry,
    owner: Identity,
    alice: PrivateKey,
    template: PackageTemplate,
) -> None:
    parcel = template.make_package(key=alice)
    upload_and_publish(registry, owner, parcel)
    create_backup(registry.settings, tmp_path / "backup")
    digest = str(parcel.layout.files[0].digest).partition(":")[2]
    cut = tmp_path / "backup" / "blobs" / "sha256" / digest[:2] / digest
    cut.unlink()
    cut.write_bytes(b"")
    assert create_backup(registry.settings, tmp_path / "backup").new == 1
    restore_backup(tmp_path / "backup", tmp_path / "again")


def test_uploads_that_go_on_are_no_part_of_it(tmp_path: Path, registry: Registry) -> None:
    row = {"id": "a" * 32, "repository_id": 1, "user_id": 1, "size": 9, "created": 0, "updated": 0}
    with registry.database.write() as connection:
        connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
        connection.exec_driver_sql(
            "INSERT INTO repositories (id, namespace_id, name, created) VALUES (1, 1, 'acme/a', 0)"
        )
        connection.execute(UPLOADS.insert().values(row))
    create_backup(registry.settings, tmp_path / "backup")
    restore_backup(tmp_path / "backup", tmp_path / "again")
    again = open_registry(read_settings(tmp_path / "again"))
    with again.database.read() as connection:
        assert connection.execute(UPLOADS.select()).all() == []
    again.close()


def test_a_backup_is_never_written_among_other_things(tmp_path: Path, registry: Registry) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "thesis.tex").write_text("dear")
    with pytest.raises(UsageError, match=r"holds thesis\.tex"):
        create_backup(registry.settings, tmp_path / "docs")
    data = registry.settings.data
    for inside in (data, data / "blobs" / "backup"):
        with pytest.raises(UsageError, match="cannot lie in the registry"):
            create_backup(registry.settings, inside)


def test_two_backups_into_one_folder_are_one_too_many(tmp_path: Path, registry: Registry) -> None:
    (tmp_path / "backup").mkdir()
    with (
        FileLock(tmp_path / "backup" / "backup.lock", thread_local=False),
        pytest.raises(StoreError, match="another backup"),
    ):
        create_backup(registry.settings, tmp_path / "backup")


def test_a_registry_without_its_database_is_not_backed_up(
    tmp_path: Path, registry: Registry
) -> None:
    settings = replace(registry.settings, data=registry.settings.data)
    registry.database.close()
    settings.database.unlink()
    with pytest.raises(StoreError, match="is not there"):
        create_backup(settings, tmp_path / "backup")


def test_a_damaged_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "registry.db").write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000)
    with pytest.raises(StoreError, match="cannot be read"):
        list_known_blobs(tmp_path / "registry.db")


def test_a_copy_that_is_not_its_digest_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"other bytes")
    digest = BlobDigest.compute(b"these bytes")
    with pytest.raises(DigestError):
        copy_blob(tmp_path / "source", tmp_path / "to" / "blob", digest)
    assert list((tmp_path / "to").iterdir()) == []


def test_the_document_names_what_is_there(tmp_path: Path, registry: Registry) -> None:
    create_backup(registry.settings, tmp_path / "backup")
    document = BackupDocument.read(tmp_path / "backup")
    for name, digest in document.state.items():
        data = (tmp_path / "backup" / "state" / digest.hex).read_bytes()
        assert Digest.compute(data) == digest
        if name != "registry.db":
            assert data == (registry.settings.data / name).read_bytes()
    assert (tmp_path / "backup").stat().st_mode & 0o777 == 0o700
