"""A disk that fills or goes away under a server: it refuses, says so, and loses nothing."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from expertctl.cli.process import get_exit_code
from expertctl.errors import ExpertError
from expertctl.registry.address import RegistryAddress
from expertctl.registry.errors import RetrySchedule
from expertctl.registry.publish import PublishPackage, plan_upload, publish_package
from expertctl.settings import Home
from expertctl.trust.grants import KnownRegistry
from expertctl.trust.keys import PublicKey
from expertctl.trust.trust_store import TrustStore
from registry_server.operation.new_registry import CreatedRegistry
from registry_server.registry import open_registry
from registry_server.settings import RegistryLimits
from tests.install.fixtures import InstallClient
from tests.registry_server.crashes.kill_harness import (
    LIMITS,
    MemoryDisk,
    PublishLog,
    disk,
    make_acme_registry,
    open_publisher,
    write_packages,
)
from tests.registry_server.operation.server_process import ServerProcess, run_server
from tests.registry_server.publishing.package_fixtures import PackageTemplate, build_template

pytestmark = pytest.mark.all

__all__ = ["disk"]

REGISTRY_FAILED = 6
SPARE = 1 << 20
SMALL = replace(LIMITS, free_bytes=SPARE)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> PackageTemplate:
    return build_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tries again what the server refuses."""
    monkeypatch.setattr(
        "expertctl.registry.http.RetrySchedule", lambda tell=None: RetrySchedule(attempts=1)
    )


@dataclass
class FullDiskScene:
    """A server whose data lie on a small disk, somebody who publishes and others who install."""

    disk: MemoryDisk
    made: CreatedRegistry
    folder: Path
    parcels: list[PublishPackage]
    key: PublicKey
    server: ServerProcess
    published: list[str] = field(default_factory=list)

    @property
    def data(self) -> Path:
        return self.made.settings.data

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def publish(self) -> str:
        """Publish the next package; return its reference."""
        parcel = self.parcels[len(self.published)]
        with open_publisher(self.host, self.made.token, self.folder, PublishLog(), tries=1) as one:
            publish_package(plan_upload(parcel, one.destination), one.destination)
        self.published.append(parcel.ref)
        return parcel.ref

    def refuses(self) -> str:
        """Try to publish the next one; return what the client says of the failure."""
        with pytest.raises(ExpertError) as caught:
            self.publish()
        assert get_exit_code(caught.value) == REGISTRY_FAILED, caught.value
        return caught.value.message

    def ready(self) -> tuple[int, list[str]]:
        """The status of ``/readyz``, and what is wrong."""
        status, body = self.server.get("/readyz")
        checks = json.loads(body)["checks"]
        return status, [name for name, fact in checks.items() if fact != "ok"]

    def whoami(self) -> int:
        status, _ = self.server.get("/api/v1/whoami", Authorization=f"Bearer {self.made.token}")
        return status

    def install(self, name: str) -> list[str]:
        """Install all that was published into a new home elsewhere."""
        address = RegistryAddress.parse(self.host)
        buyer = InstallClient.create(self.folder / name)
        buyer.user_home.trust.add_registry(KnownRegistry(address.host, address.url, self.key))
        buyer = replace(buyer, settings=replace(buyer.settings, registry=address.host))
        buyer.install(*self.published)
        buyer.user_home.check_integrity()
        return buyer.refs()


@contextmanager
def scene_at(
    disk: MemoryDisk,
    folder: Path,
    home: Path,
    template: PackageTemplate,
    limits: RegistryLimits = SMALL,
) -> Iterator[FullDiskScene]:
    """Run a registry on a disk; at the end nothing in it may be damaged or lost."""
    packages = folder / "packages"
    packages.mkdir()
    parcels = write_packages(
        template, packages, TrustStore(Home(home).trust), count=5, name_count=5
    )
    made = make_acme_registry(disk.folder / "registry", limits=limits)
    registry = open_registry(made.settings)
    key = registry.index_key.public
    registry.close()
    with run_server(made.settings.data) as server:
        scene = FullDiskScene(disk, made, folder, parcels, key, server)
        yield scene
        server.stop()
    registry = open_registry(made.settings)
    registry.check_integrity()
    registry.close()
    with run_server(made.settings.data) as server:
        scene.server = server
        assert scene.install("after-all") == sorted(scene.published)


@pytest.mark.parametrize("floor", [0, SPARE], ids=["to the last byte", "but for a reserve"])
def test_a_disk_that_fills_stops_publishing_and_nothing_else(
    floor: int, disk: MemoryDisk, tmp_path: Path, home: Path, template: PackageTemplate
) -> None:
    """Attack 58: as the system itself refuses, or before."""
    with scene_at(disk, tmp_path, home, template, replace(LIMITS, free_bytes=floor)) as scene:
        scene.publish()
        assert scene.ready() == (200, [])
        disk.fill(remaining=floor // 2)
        for _ in range(2):
            assert "is full" in scene.refuses()
        status, wrong = scene.ready()
        assert (status, bool(wrong)) == (503, True)
        assert scene.server.get("/healthz")[0] == 200
        assert scene.whoami() == 200
        assert scene.install("meanwhile") == scene.published
        disk.clear()
        assert scene.ready() == (200, [])
        scene.publish()


def test_a_disk_that_fills_while_blobs_arrive_keeps_none_of_them_half(
    disk: MemoryDisk, tmp_path: Path, home: Path, template: PackageTemplate
) -> None:
    with scene_at(disk, tmp_path, home, template, replace(LIMITS, free_bytes=0)) as scene:
        disk.fill(remaining=SPARE)
        assert "is full" in scene.refuses()
        disk.clear()
        assert scene.ready() == (200, [])
        scene.publish()


def test_a_disk_that_goes_away_takes_nothing_along(
    disk: MemoryDisk, tmp_path: Path, home: Path, template: PackageTemplate
) -> None:
    """Attack 88: fail closed, and health says so."""
    with scene_at(disk, tmp_path, home, template) as scene:
        first = scene.publish()
        disk.unmount()
        scene.refuses()
        assert scene.ready() == (503, ["database", "storage", "space", "index_key"])
        assert scene.server.get("/healthz")[0] == 200
        with pytest.raises(ExpertError) as caught:
            scene.install("meanwhile")
        assert get_exit_code(caught.value) == REGISTRY_FAILED, caught.value
        assert [*disk.folder.iterdir()] == []
        disk.remount()
        assert scene.ready() == (200, [])
        assert scene.install("again") == [first]
        scene.publish()


def test_a_database_that_is_replaced_under_the_server_takes_no_publish(
    disk: MemoryDisk, tmp_path: Path, home: Path, template: PackageTemplate
) -> None:
    with scene_at(disk, tmp_path, home, template) as scene:
        scene.publish()
        path = scene.made.settings.database
        kept = path.rename(path.with_suffix(".kept"))
        shutil.copyfile(kept, path)
        scene.refuses()
        assert scene.ready() == (503, ["database"])
        kept.replace(path)
        assert scene.ready() == (200, [])
        scene.publish()


def test_a_storage_that_is_gone_is_no_answer_that_blobs_never_were_there(
    disk: MemoryDisk, tmp_path: Path, home: Path, template: PackageTemplate
) -> None:
    with scene_at(disk, tmp_path, home, template) as scene:
        scene.publish()
        kept = scene.made.settings.blobs.rename(scene.data / "kept")
        with pytest.raises(ExpertError) as caught:
            scene.install("meanwhile")
        assert get_exit_code(caught.value) == REGISTRY_FAILED, caught.value
        scene.refuses()
        assert scene.ready() == (503, ["storage"])
        assert not scene.made.settings.blobs.exists()
        kept.rename(scene.made.settings.blobs)
        assert scene.ready() == (200, [])
        scene.publish()
