"""``kill -9`` of the client while it installs: whole experts only, and the next run goes on."""

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from expertctl.reference import hash_file
from expertctl.registry.address import RegistryAddress
from expertctl.store.store import Store
from expertctl.trust.grants import KnownRegistry
from registry_server.registry import open_registry
from tests.registry_server.crashes.forkserver import (
    KILLED_EXIT_CODE,
    CommandForkServer,
    run_fork_server,
)
from tests.registry_server.crashes.kill_harness import make_acme_registry
from tests.registry_server.operation.server_process import ServerProcess, run_server
from tests.registry_server.publishing.package_fixtures import PackageTemplate, build_template
from tests.store.fixtures import HomeFixture, make_key

pytestmark = pytest.mark.all

MEGABYTES = {"low": 3, "middle": 5, "top": 8}
REFS = [f"acme/{name}@1.0.0" for name in MEGABYTES]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> PackageTemplate:
    return build_template(tmp_path_factory.mktemp("template"))


@dataclass(frozen=True)
class KilledClientScene:
    """A registry that runs, with three experts that require each other in a row."""

    server: ServerProcess
    known: KnownRegistry

    def home(self, root: Path) -> HomeFixture:
        """A home that knows it."""
        user_home = HomeFixture(root)
        user_home.trust.add_registry(self.known)
        return user_home

    def continued(self) -> int:
        """How often a blob was asked for from its middle on."""
        lines = self.server.log.read_text().splitlines()
        said = [json.loads(line) for line in lines if line.startswith("{")]
        return sum(line.get("status") == 206 for line in said)


@pytest.fixture
def scene(tmp_path: Path, template: PackageTemplate) -> Iterator[KilledClientScene]:
    noise, required, parcels = random.Random(7), [], []
    for name, megabytes in MEGABYTES.items():
        notes = {"README.md": noise.randbytes(megabytes * 500_000).hex().encode()}
        composition = {"requires": required, "conflicts": []}
        parcels.append(
            template.make_package(
                f"acme/{name}", key=make_key("acme"), files=notes, composition=composition
            )
        )
        required = [f"acme/{name}"]
    made = make_acme_registry(tmp_path / "registry", parcels)
    registry = open_registry(made.settings)
    key = registry.index_key.public
    registry.close()
    with run_server(made.settings.data) as server:
        address = RegistryAddress.parse(f"127.0.0.1:{server.port}")
        yield KilledClientScene(server, KnownRegistry(address.host, address.url, key))


@dataclass
class ClientKillMachine:
    """Installs into some homes, killed by a clock with a seed."""

    scene: KilledClientScene
    forkserver: CommandForkServer
    homes: list[HomeFixture]
    clock: random.Random
    kills: int = 0
    stages: Counter[str] = field(default_factory=Counter)
    """What was there after each kill."""

    def install(self, user_home: HomeFixture, seconds: float | None = None) -> int:
        return self.forkserver.run(user_home.root, "install", "acme/top", seconds=seconds)

    def rage(self, kills: int) -> None:
        """Kill within the time that an install takes that is not killed, as it is by now."""
        longest = 0.0
        for number in range(kills * 10):
            if self.kills == kills:
                return
            user_home = self.homes[number % len(self.homes)]
            begun = time.monotonic()
            code = self.install(user_home, self.clock.uniform(0, longest) if number else None)
            assert code in {0, KILLED_EXIT_CODE}, self.forkserver.log.read_text()
            if code == KILLED_EXIT_CODE:
                self.kills += 1
                self.stages.update(stages_of(user_home))
            else:
                longest = max(time.monotonic() - begun, longest * 0.8)
            look(user_home)
            if user_home.refs() == REFS:
                empty(user_home)
        raise AssertionError(f"only {self.stages} were killed in time")

    def end(self) -> None:
        """Install everywhere, undisturbed."""
        for user_home in self.homes:
            assert self.install(user_home) == 0, self.forkserver.log.read_text()
            assert user_home.refs() == REFS
            user_home.check_integrity()


def stages_of(user_home: HomeFixture) -> set[str]:
    """How far an install came; one that has whole blobs may be in the middle of another."""
    if user_home.refs():
        return {"all there" if user_home.refs() == REFS else "some there"}
    registries = user_home.home.registries
    found = {
        "half a blob": any(p.stat().st_size for p in (registries / "partial").glob("*.part")),
        "some blobs": any((registries / "arrived").glob("*")),
    }
    return {stage for stage, is_so in found.items() if is_so} or {"no blob"}


def look(user_home: HomeFixture) -> None:
    """Only whole experts are there, each with what it requires."""
    store: Store = user_home.store
    store.check_integrity()
    there = user_home.refs()
    assert there == REFS[: len(there)]
    for expert in store.list_experts():
        for file in expert.layers:
            assert hash_file(store.paths.blob(file.digest)) == (file.size, file.digest)


def empty(user_home: HomeFixture) -> None:
    """Remove every expert; what was downloaded for others stays."""
    for ref in reversed(user_home.refs()):
        user_home.store.remove(
            next(expert for expert in user_home.store.list_experts() if expert.ref == ref)
        )


def survive(
    scene: KilledClientScene, tmp_path: Path, *, kills: int, homes: int, seed: int
) -> Counter[str]:
    environment = {
        "EXPERT_REGISTRY": scene.known.host,
        "EXPERT_ENCODER": "lexical",
        "PYTHONFAULTHANDLER": "1",  # a crash of the command itself is told in the log
    }
    with run_fork_server(tmp_path / "said.txt", **environment) as copies:
        homes = [scene.home(tmp_path / f"home-{number}") for number in range(homes)]
        machine = ClientKillMachine(scene, copies, homes, random.Random(seed))
        machine.rage(kills)
        machine.end()
    return machine.stages


def test_an_install_that_is_killed_leaves_whole_experts(
    scene: KilledClientScene, tmp_path: Path
) -> None:
    stages = survive(scene, tmp_path, kills=12, homes=2, seed=1)
    assert len(stages) > 1


@pytest.mark.all
def test_two_hundred_killed_installs_leave_whole_experts_and_use_what_came(
    scene: KilledClientScene, tmp_path: Path
) -> None:
    stages = survive(scene, tmp_path, kills=200, homes=4, seed=2)
    assert {"no blob", "half a blob", "some blobs"} <= set(stages)
    assert scene.continued() > 0
