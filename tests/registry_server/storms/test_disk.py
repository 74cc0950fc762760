"""A disk that fills or goes away under a server: it refuses, says so, and loses nothing."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from expertctl.cli.exit_codes import exit_code
from expertctl.errors import ExpertError
from expertctl.registry.address import RegistryAddress
from expertctl.registry.publish import Parcel, plan_shipment, send
from expertctl.registry.retry import Retries
from expertctl.settings import Home
from expertctl.trust.grant import KnownRegistry
from expertctl.trust.keys import PublicKey
from expertctl.trust.policy import TrustStore
from registry_server.operation.new_registry import NewRegistry
from registry_server.registry import open_registry
from registry_server.settings import Limits
from tests.install.market import Buyer
from tests.registry_server.operation.running import Running, running
from tests.registry_server.publishing.parcels import Template, make_template
from tests.registry_server.storms.disks import Disk, disk
from tests.registry_server.storms.grounds import LIMITS, grounds
from tests.registry_server.storms.server_storm import Ledger, make_parcels, publisher

pytestmark = pytest.mark.all

__all__ = ["disk"]

REGISTRY_FAILED = 6
SPARE = 1 << 20
SMALL = replace(LIMITS, free_bytes=SPARE)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tries again what the server refuses."""
    monkeypatch.setattr("expertctl.registry.http.Retries", lambda tell=None: Retries(attempts=1))


@dataclass
class Scene:
    """A server whose data lie on a small disk, somebody who publishes and others who install."""

    disk: Disk
    made: NewRegistry
    folder: Path
    parcels: list[Parcel]
    key: PublicKey
    server: Running
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
        with publisher(self.host, self.made.token, self.folder, Ledger(), tries=1) as one:
            send(plan_shipment(parcel, one.to), one.to)
        self.published.append(parcel.ref)
        return parcel.ref

    def refuses(self) -> str:
        """Try to publish the next one; return what the client says of the failure."""
        with pytest.raises(ExpertError) as caught:
            self.publish()
        assert exit_code(caught.value) == REGISTRY_FAILED, caught.value
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
        buyer = Buyer.at(self.folder / name)
        buyer.house.trust.add_registry(KnownRegistry(address.host, address.url, self.key))
        buyer = replace(buyer, settings=replace(buyer.settings, registry=address.host))
        buyer.buy(*self.published)
        buyer.house.check()
        return buyer.refs()


@contextmanager
def scene_at(
    disk: Disk, folder: Path, home: Path, template: Template, limits: Limits = SMALL
) -> Iterator[Scene]:
    """Run a registry on a disk; at the end nothing in it may be damaged or lost."""
    packages = folder / "packages"
    packages.mkdir()
    parcels = make_parcels(template, packages, TrustStore(Home(home).trust), count=5, names=5)
    made = grounds(disk.folder / "registry", limits=limits)
    registry = open_registry(made.settings)
    key = registry.index_key.public
    registry.close()
    with running(made.settings.data) as server:
        scene = Scene(disk, made, folder, parcels, key, server)
        yield scene
        server.stop()
    registry = open_registry(made.settings)
    registry.check_integrity()
    registry.close()
    with running(made.settings.data) as server:
        scene.server = server
        assert scene.install("after-all") == sorted(scene.published)


@pytest.mark.parametrize("floor", [0, SPARE], ids=["to the last byte", "but for a reserve"])
def test_a_disk_that_fills_stops_publishing_and_nothing_else(
    floor: int, disk: Disk, tmp_path: Path, home: Path, template: Template
) -> None:
    """Attack 58: as the system itself refuses, or before."""
    with scene_at(disk, tmp_path, home, template, replace(LIMITS, free_bytes=floor)) as scene:
        scene.publish()
        assert scene.ready() == (200, [])
        disk.fill(but=floor // 2)
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
    disk: Disk, tmp_path: Path, home: Path, template: Template
) -> None:
    with scene_at(disk, tmp_path, home, template, replace(LIMITS, free_bytes=0)) as scene:
        disk.fill(but=SPARE)
        assert "is full" in scene.refuses()
        disk.clear()
        assert scene.ready() == (200, [])
        scene.publish()


def test_a_disk_that_goes_away_takes_nothing_along(
    disk: Disk, tmp_path: Path, home: Path, template: Template
) -> None:
    """Attack 88: fail closed, and health says so."""
    with scene_at(disk, tmp_path, home, template) as scene:
        first = scene.publish()
        disk.take_away()
        scene.refuses()
        assert scene.ready() == (503, ["database", "storage", "space", "index_key"])
        assert scene.server.get("/healthz")[0] == 200
        with pytest.raises(ExpertError) as caught:
            scene.install("meanwhile")
        assert exit_code(caught.value) == REGISTRY_FAILED, caught.value
        assert [*disk.folder.iterdir()] == []
        disk.put_back()
        assert scene.ready() == (200, [])
        assert scene.install("again") == [first]
        scene.publish()


def test_a_database_that_is_replaced_under_the_server_takes_no_publish(
    disk: Disk, tmp_path: Path, home: Path, template: Template
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
    disk: Disk, tmp_path: Path, home: Path, template: Template
) -> None:
    with scene_at(disk, tmp_path, home, template) as scene:
        scene.publish()
        kept = scene.made.settings.blobs.rename(scene.data / "kept")
        with pytest.raises(ExpertError) as caught:
            scene.install("meanwhile")
        assert exit_code(caught.value) == REGISTRY_FAILED, caught.value
        scene.refuses()
        assert scene.ready() == (503, ["storage"])
        assert not scene.made.settings.blobs.exists()
        kept.rename(scene.made.settings.blobs)
        assert scene.ready() == (200, [])
        scene.publish()
