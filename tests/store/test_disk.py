"""A disk that is full or may not be written, as the system itself refuses it."""

import errno
import os
import resource
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from expertctl.errors import DiskFullError, NotFoundError, StoreError
from expertctl.settings import Home
from expertctl.store.disk import disk_errors
from expertctl.store.store import Store
from tests.store.fault_injection import run_with_fault
from tests.store.fixtures import HomeFixture, PackageFactory, record_use

NOBODY = 65534
ROOT = os.geteuid() == 0


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 256 KiB."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("mounting is not allowed here")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def powerless() -> None:
    """Go on as a user that owns nothing; root ignores permission bits."""
    if ROOT:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def protect(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222 | 0o444 | (0o111 if path.is_dir() else 0))


def test_a_full_disk_is_told_and_changes_nothing(
    small_disk: Path, package_factory: PackageFactory, user_home: HomeFixture
) -> None:
    full = HomeFixture(small_disk / "home").trust_keys("acme")
    full.install(package_factory.package("acme/first"), catalogue=full.catalogue)
    before = full.read_files()
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (free - 8192))
    with pytest.raises(DiskFullError) as error:
        full.install(package_factory.package("acme/second", seed=3))
    assert "free some space" in error.value.hint
    assert full.read_files() == before
    assert full.refs() == ["acme/first@1.0.0"]
    filler.unlink()
    full.install(package_factory.package("acme/second", seed=3), catalogue=full.catalogue)
    assert full.refs() == ["acme/first@1.0.0", "acme/second@1.0.0"]
    full.check_integrity()


def test_an_expert_can_be_removed_from_a_full_disk(
    small_disk: Path, package_factory: PackageFactory
) -> None:
    full = HomeFixture(small_disk / "home").trust_keys("acme")
    (done,) = full.install(package_factory.package("acme/first"))
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(b"x" * (256 << 10))
    freed = full.store.remove(done.expert)
    assert freed.size > 0
    assert full.refs() == []


def test_experts_are_used_from_a_full_disk(
    small_disk: Path, package_factory: PackageFactory
) -> None:
    full = HomeFixture(small_disk / "home").trust_keys("acme")
    (done,) = full.install(package_factory.package("acme/first"))
    filler, leases = small_disk / "filler", full.store.paths.leases
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(b"x" * (256 << 10))
    with full.store.lease_experts([done.expert]):
        assert full.store.read_manifest(done.expert).name == "acme/first"
        assert not list(leases.iterdir()), "there is no room for a lease, and no half of one"
        full.store.remove(done.expert)
        with pytest.raises(StoreError, match="missing"):
            full.store.read_manifest(done.expert)
    filler.unlink()
    with pytest.raises(NotFoundError), full.store.lease_experts([done.expert]):
        pass
    assert not list(leases.iterdir())


def test_what_is_known_of_experts_is_read_from_a_full_disk(
    small_disk: Path, package_factory: PackageFactory
) -> None:
    """Whoever closed the catalogue last removed its log, and there is no room for another."""
    full = HomeFixture(small_disk / "home").trust_keys("acme")
    (done,) = full.install(package_factory.package("acme/first"), catalogue=full.catalogue)
    digest = done.expert.content_digest
    assert record_use(full.catalogue, digest)
    index = full.home.index
    with closing(sqlite3.connect(index)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert not list(index.parent.glob(f"{index.name}-*"))
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(b"x" * (256 << 10))
    usage = full.catalogue.history.read_usage_counts().get(digest)
    assert usage is not None
    assert usage.uses == 1
    assert not record_use(full.catalogue, digest)
    filler.unlink()
    assert record_use(full.catalogue, digest)
    usage = full.catalogue.history.read_usage_counts().get(digest)
    assert usage is not None
    assert usage.uses == 2


def test_a_limit_on_file_size_is_told_and_changes_nothing(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.install(package_factory.package("acme/first"))
    file, before = package_factory.package("acme/second", seed=3), user_home.read_files()

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
        user_home.install(file)

    ended = run_with_fault(limited)
    assert ended.errors[0] == "DiskFullError", ended.trace
    assert user_home.read_files() == before
    user_home.install(file)
    user_home.check_integrity()


def test_a_file_system_without_room_for_a_folder_is_told(
    small_disk: Path, package_factory: PackageFactory
) -> None:
    (small_disk / "filler").write_bytes(b"x" * (200 << 10))
    with pytest.raises(OSError, match="No space"):
        (small_disk / "rest").write_bytes(b"x" * (100 << 10))
    full = HomeFixture(small_disk / "home")
    with pytest.raises(DiskFullError):
        full.bases.add_copy(package_factory.base_dir)
    assert full.bases.list_bases() == []


def test_a_store_that_may_not_be_written_is_read_and_refuses_the_rest(
    public: Path, package_factory: PackageFactory
) -> None:
    user_home = HomeFixture(public / "home").trust_keys("acme")
    (done,) = user_home.install(
        package_factory.package("acme/first"), catalogue=user_home.catalogue
    )
    user_home.bases.add_copy(package_factory.base_dir, name="base")
    record_use(user_home.catalogue, done.expert.content_digest)
    package = public / "second.expert"
    package.write_bytes(package_factory.package("acme/second", seed=3).read_bytes())
    package.chmod(0o644)
    before = user_home.read_files()
    protect(user_home.root)
    (user_home.root / "trust.json").chmod(0o444)

    def use() -> None:
        powerless()
        (expert,) = user_home.store.list_experts()
        with user_home.store.lease_experts([expert]):
            assert user_home.store.read_manifest(expert).name == "acme/first"
        user_home.store.check_integrity()
        user_home.bases.check(user_home.bases.find("base"))
        user_home.store.find_garbage()

    def refuse(action: str) -> None:
        powerless()
        (expert,) = user_home.store.list_experts()
        match action:
            case "install":
                user_home.install(package)
            case "remove":
                user_home.store.remove(expert)
            case "gc":
                user_home.store.collect_garbage()
            case "base":
                user_home.bases.remove(user_home.bases.find("base"))

    ended = run_with_fault(use)
    assert not ended.errors, ended.trace
    for action in ("install", "remove", "gc", "base"):
        ended = run_with_fault(lambda action=action: refuse(action))
        assert ended.errors[0] == "StoreError", ended.trace
        assert "is read-only" in ended.trace, ended.trace
    assert user_home.read_files() == before


def test_the_history_is_read_and_not_written_where_nothing_may_be_written(
    public: Path, package_factory: PackageFactory
) -> None:
    user_home = HomeFixture(public / "home").trust_keys("acme")
    (done,) = user_home.install(
        package_factory.package("acme/first"), catalogue=user_home.catalogue
    )
    digest = done.expert.content_digest
    record_use(user_home.catalogue, digest)
    protect(user_home.root)

    def use() -> None:
        powerless()
        catalogue = user_home.catalogue
        usage = catalogue.history.read_usage_counts().get(digest)
        assert usage is not None
        assert usage.uses == 1
        assert catalogue.read_success_rates().find_rate(digest) is None
        assert catalogue.list_refs() == ["acme/first@1.0.0"]
        assert not record_use(catalogue, digest)
        assert "not recorded" in catalogue.notes[0]

    ended = run_with_fault(use)
    assert not ended.errors, ended.trace


def test_a_read_only_file_system_is_told(small_disk: Path, package_factory: PackageFactory) -> None:
    user_home = HomeFixture(small_disk / "home").trust_keys("acme")
    (done,) = user_home.install(package_factory.package("acme/first"))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="is read-only") as error:
        user_home.install(package_factory.package("acme/second", seed=3))
    assert "EXPERT_HOME" in error.value.hint
    with pytest.raises(StoreError, match="is read-only"):
        user_home.store.remove(done.expert)
    with user_home.store.lease_experts([done.expert]):
        user_home.store.check_integrity()
    assert not record_use(user_home.catalogue, done.expert.content_digest)


def test_blobs_on_another_file_system_are_copied_there(
    small_disk: Path, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    (user_home.home.store / "blobs").mkdir(parents=True)
    (user_home.home.store / "blobs" / "sha256").symlink_to(small_disk)
    (done,) = user_home.install(package_factory.package("acme/first"))
    user_home.check_integrity()
    assert {path.name for path in small_disk.iterdir()} == {
        file.digest.hex for file in done.expert.layers
    }


def test_a_home_that_is_a_file_is_told(tmp_path: Path, package_factory: PackageFactory) -> None:
    (tmp_path / "home").write_text("")
    store = Store(Home(tmp_path / "home").store)
    assert store.list_experts() == []
    with pytest.raises(StoreError), store.stage_package():
        pass


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EFBIG, DiskFullError),
        (errno.EROFS, StoreError),
        (errno.EIO, StoreError),
    ],
)
def test_each_refusal_has_its_error(number: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="the thing"), disk_errors("the thing"):
        raise OSError(number, os.strerror(number))
    with pytest.raises(error, match="/a/file"), disk_errors("the thing"):
        raise OSError(number, os.strerror(number), "/a/file")


def test_what_nobody_here_may_clear_counts_as_in_use(
    public: Path, package_factory: PackageFactory
) -> None:
    user_home = HomeFixture(public / "home").trust_keys("acme")
    user_home.install(package_factory.package("acme/first"))
    folder = user_home.store.paths.staging / "left"
    folder.mkdir()
    (folder / "lock").touch()
    os.utime(folder, (0, 0))
    protect(user_home.root)

    def look() -> None:
        powerless()
        assert user_home.store.find_garbage().folders == ()

    ended = run_with_fault(look)
    assert not ended.errors, ended.trace
