"""The client, killed at random moments of installs: never a part of an expert, and it goes on."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.install.fixtures import InstallClient, PublishingRegistry
from tests.store.fixtures import HomeFixture

pytestmark = pytest.mark.all

PROGRAM = "from expertctl.cli.app import main; main()"
REFS = ["acme/low@1.0.0", "acme/middle@1.0.0", "acme/top@1.0.0"]


@pytest.fixture
def stocked(publisher: PublishingRegistry) -> PublishingRegistry:
    """Three experts that require each other in a row, with some bytes in them."""
    noise = random.Random(7)
    for name, requires in (("low", []), ("middle", ["acme/low"]), ("top", ["acme/middle"])):
        notes = {"README.md": noise.randbytes(200_000).hex().encode()}
        publisher.publish(f"acme/{name}@1.0.0", requires=requires, files=notes)
    return publisher


def install(
    user_home: HomeFixture, publisher: PublishingRegistry, *, seconds: float | None
) -> int | None:
    """Run the real command; kill it after some time."""
    environment = {
        **os.environ,
        "EXPERT_HOME": str(user_home.root),
        "EXPERT_REGISTRY": publisher.host,
        "EXPERT_ENCODER": "lexical",
    }
    command = [sys.executable, "-B", "-c", PROGRAM, "install", "acme/top"]
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=user_home.root,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    assert process.returncode == 0, said.decode()
    return 0


def kill_repeatedly(
    buyer: InstallClient, publisher: PublishingRegistry, *, kills: int, seed: int
) -> None:
    """Kill so many installs; after each only whole experts are there, with what they require."""
    moments, user_home = random.Random(seed), buyer.user_home
    killed = 0
    for _ in range(kills):
        if install(user_home, publisher, seconds=moments.uniform(0.2, 1.6)) is None:
            killed += 1
        there = user_home.refs()
        assert there == REFS[: len(there)]
        user_home.store.check_integrity()
        if there:
            for ref in reversed(there):
                user_home.store.remove(
                    next(e for e in user_home.store.list_experts() if e.ref == ref)
                )
    assert killed, "no kill came in time"
    assert install(user_home, publisher, seconds=None) == 0
    assert user_home.refs() == REFS
    user_home.check_integrity()


def test_a_killed_install_leaves_whole_experts_and_goes_on(
    buyer: InstallClient, stocked: PublishingRegistry
) -> None:
    kill_repeatedly(buyer, stocked, kills=12, seed=1)


@pytest.mark.all
def test_two_hundred_killed_installs_leave_whole_experts(
    buyer: InstallClient, stocked: PublishingRegistry
) -> None:
    kill_repeatedly(buyer, stocked, kills=200, seed=2)


def test_a_home_that_was_killed_keeps_nothing_of_it_in_the_way(
    buyer: InstallClient, stocked: PublishingRegistry, tmp_path: Path
) -> None:
    """What a killed process left half is used or thrown away, whatever is in it."""
    registries = buyer.user_home.home.registries
    (registries / "arrived").mkdir(parents=True)
    parcel = stocked.published["acme/low@1.0.0"]
    for file in parcel.layout.layers:
        (registries / "arrived" / file.digest.hex).write_bytes(b"half")
    buyer.install("acme/low")
    buyer.user_home.check_integrity()
