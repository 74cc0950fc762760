"""A registry without its index key, or with another one, does nothing."""

import os
import stat
from pathlib import Path

import pytest

from expertctl.errors import StoreError, UsageError
from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import Identity
from registry_server.database.tables import PACKAGES
from registry_server.registry import (
    Registry,
    check_index_key,
    create_index_key,
    load_index_key,
    open_registry,
)
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.publishing.package_fixtures import PackageTemplate, upload_and_publish


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys" / "index.pem"


def test_a_new_index_key_is_readable_by_its_owner_alone(path: Path) -> None:
    key = create_index_key(path)
    assert load_index_key(path).public == key.public
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    check_index_key(path, key.public.key_id)


def test_an_index_key_is_never_overwritten(path: Path) -> None:
    before = create_index_key(path)
    with pytest.raises(UsageError, match="exists already"):
        create_index_key(path)
    assert load_index_key(path).public == before.public


def test_a_missing_index_key_says_to_restore_it(path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be used") as caught:
        load_index_key(path)
    assert "backup" in caught.value.hint


@pytest.mark.parametrize("data", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\nAA\n"])
def test_a_damaged_index_key_is_refused(path: Path, data: bytes) -> None:
    create_index_key(path)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="cannot be used"):
        load_index_key(path)


def test_an_index_key_that_others_can_read_is_refused(path: Path) -> None:
    create_index_key(path)
    path.chmod(0o644)
    with pytest.raises(StoreError, match="others may read") as caught:
        load_index_key(path)
    assert "chmod 600" in caught.value.hint


def test_a_folder_in_the_place_of_the_index_key_is_refused(path: Path) -> None:
    path.mkdir(parents=True)
    path.parent.chmod(0o700)
    with pytest.raises(StoreError):
        load_index_key(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_index_key_that_cannot_be_read_is_refused(path: Path) -> None:
    create_index_key(path)
    path.chmod(0o000)
    with pytest.raises(StoreError):
        load_index_key(path)


def test_another_index_key_in_its_place_is_noticed(path: Path) -> None:
    create_index_key(path)
    other = PrivateKey.generate()
    with pytest.raises(StoreError, match="signs with"):
        check_index_key(path, other.public.key_id)


def test_a_registry_does_not_open_with_another_key_than_the_one_that_signed(
    served: RegistryHarness,
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
) -> None:
    upload_and_publish(registry, owner, template.make_package(key=alice))
    registry.close()
    kept = served.settings.index_key.read_bytes()
    served.settings.index_key.write_bytes(PrivateKey.generate().pem())
    with pytest.raises(StoreError, match="packages were signed by") as caught:
        open_registry(served.settings)
    assert "backup" in caught.value.hint
    served.settings.index_key.write_bytes(kept)
    open_registry(served.settings).close()


def test_a_damaged_document_in_the_database_is_noticed(
    served: RegistryHarness,
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
) -> None:
    upload_and_publish(registry, owner, template.make_package(key=alice))
    with registry.database.write() as connection:
        connection.execute(PACKAGES.update().values(index_document=b"{}"))
    with pytest.raises(StoreError, match="damaged"):
        open_registry(served.settings)
