"""A restore is whole or nothing."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from expertctl.errors import InvalidPackageError, NotFoundError, UsageError
from expertctl.reference import Digest
from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import Identity
from registry_server.operation import new_registry as restoring
from registry_server.operation.backup import BackupDocument, create_backup
from registry_server.operation.new_registry import CHANGES_PER_SECOND, restore_backup
from registry_server.registry import Registry, open_registry
from registry_server.settings import read_settings
from tests.registry_server.publishing.package_fixtures import (
    PackageTemplate,
    read_published_index,
    upload_and_publish,
)


@pytest.fixture
def backup(
    tmp_path: Path,
    registry: Registry,
    owner: Identity,
    alice: PrivateKey,
    template: PackageTemplate,
) -> Path:
    upload_and_publish(registry, owner, template.make_package(key=alice))
    create_backup(registry.settings, tmp_path / "backup")
    for path in (tmp_path / "backup" / "blobs").rglob("*"):
        if path.is_file():  # a link to the blob of the registry itself, which is not to be harmed
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
    return tmp_path / "backup"


def blob(backup: Path) -> Path:
    return max((p for p in (backup / "blobs").rglob("*") if p.is_file()), key=os.path.getsize)


def state(backup: Path, name: str) -> Path:
    return backup / "state" / BackupDocument.read(backup).state[name].hex


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda b: blob(b).unlink(), "is missing"),
        (lambda b: flip(blob(b)), "is damaged"),
        (lambda b: blob(b).write_bytes(b""), "has 0 bytes instead of"),
        (lambda b: state(b, "registry.db").unlink(), "registry.db is missing"),
        (lambda b: flip(state(b, "registry.db")), "registry.db is damaged"),
        (lambda b: flip(state(b, "registry.toml")), "registry.toml is damaged"),
        (lambda b: flip(state(b, "keys/index.pem")), "keys/index.pem is damaged"),
        (lambda b: state(b, "keys/index.pem").unlink(), "keys/index.pem is missing"),
    ],
)
def test_a_damaged_backup_restores_nothing(
    harm: Callable[[Path], object], problem: str, tmp_path: Path, backup: Path
) -> None:
    harm(backup)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(InvalidPackageError, match=problem):
        restore_backup(backup, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_index_documents_are_newer_than_any_that_was_lost(
    tmp_path: Path,
    backup: Path,
    registry: Registry,
    owner: Identity,
    alice: PrivateKey,
    template: PackageTemplate,
) -> None:
    """Else clients that have seen the lost ones would refuse them, as the rollback that it is."""
    saved = read_published_index(registry, owner)
    for version in ("1.1.0", "1.2.0", "1.3.0"):
        upload_and_publish(registry, owner, template.make_package(version=version, key=alice))
    lost = read_published_index(registry, owner)
    restore_backup(backup, tmp_path / "again")
    again = open_registry(read_settings(tmp_path / "again"))
    found = read_published_index(again, owner)
    again.close()
    assert found.revision > lost.revision > saved.revision
    assert replace(found, revision=0) == replace(saved, revision=0)


def test_the_older_a_backup_is_the_newer_are_its_documents(
    tmp_path: Path, backup: Path, owner: Identity
) -> None:
    document = BackupDocument.read(backup)
    replace(document, created="2020-01-01T00:00:00+00:00").write(backup)
    restore_backup(backup, tmp_path / "again")
    again = open_registry(read_settings(tmp_path / "again"))
    assert read_published_index(again, owner).revision > CHANGES_PER_SECOND * 365 * 86400
    again.close()


def test_a_backup_of_no_time_restores_nothing(tmp_path: Path, backup: Path) -> None:
    replace(BackupDocument.read(backup), created="yesterday").write(backup)
    with pytest.raises(InvalidPackageError, match="'yesterday' is not a time"):
        restore_backup(backup, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_all_damage_is_told_at_once_but_not_endlessly(tmp_path: Path, backup: Path) -> None:
    for path in (backup / "blobs").rglob("*"):
        if path.is_file():
            path.unlink()
    with pytest.raises(InvalidPackageError) as caught:
        restore_backup(backup, tmp_path / "again")
    assert len(caught.value.problems) == 5


def test_many_problems_are_counted(
    tmp_path: Path, backup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring, "MAX_REPORTED_PROBLEMS", 2)
    for path in (backup / "blobs").rglob("*"):
        if path.is_file():
            flip(path)
    with pytest.raises(InvalidPackageError) as caught:
        restore_backup(backup, tmp_path / "again")
    assert caught.value.problems[2:] == ("3 more",)


def test_a_folder_in_use_is_left_alone(tmp_path: Path, backup: Path) -> None:
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "thesis.tex").write_text("dear")
    with pytest.raises(UsageError, match="not an empty folder"):
        restore_backup(backup, tmp_path / "again")
    with pytest.raises(UsageError, match="not an empty folder"):
        restore_backup(backup, backup / "backup.json")


def test_an_empty_folder_will_do(tmp_path: Path, backup: Path) -> None:
    (tmp_path / "again").mkdir()
    restore_backup(backup, tmp_path / "again")
    assert (tmp_path / "again" / "registry.toml").exists()


def test_what_is_no_backup_is_told(tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(NotFoundError, match="no finished backup"):
        restore_backup(registry.settings.data, tmp_path / "again")


@pytest.mark.parametrize("name", ["registry.db", "registry.toml", "keys/index.pem"])
def test_a_consistent_lie_is_found_when_the_registry_is_opened(
    name: str, tmp_path: Path, backup: Path
) -> None:
    """The document names other bytes than the registry wrote, with the right digest."""
    document = BackupDocument.read(backup)
    nonsense = b"nonsense = "
    (backup / "state" / Digest.compute(nonsense).hex).write_bytes(nonsense)
    BackupDocument(
        document.created, {**document.state, name: Digest.compute(nonsense)}, 0, 0
    ).write(backup)
    with pytest.raises(InvalidPackageError):
        restore_backup(backup, tmp_path / "again")
    assert not (tmp_path / "again").exists()
