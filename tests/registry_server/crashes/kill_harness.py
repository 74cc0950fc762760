"""A registry with the namespace ``acme``, ready to be run by itself.

File systems in memory, which fill and go away as disks do.

Many publish at once to a server that is killed again and again by a clock with a seed.
"""

import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from threading import Condition, Event
from typing import BinaryIO

import pytest

from expertctl.cli.process import get_exit_code
from expertctl.digest import Digest
from expertctl.errors import RegistryError
from expertctl.package.write import write_package
from expertctl.registry.address import RegistryAddress
from expertctl.registry.client import ApiClient, OciClient
from expertctl.registry.credentials import Credential, UnsavedCredential
from expertctl.registry.errors import RetrySchedule
from expertctl.registry.http import RegistryHttp
from expertctl.registry.publish import (
    PublishPackage,
    PublishTarget,
    UploadPlan,
    examine_publish_package,
    plan_upload,
    publish_package,
)
from expertctl.trust.trust_store import TrustStore
from registry_server.operation.new_registry import CreatedRegistry
from registry_server.publishing.releases import add_key
from registry_server.settings import RegistryLimits
from tests.registry_server.harness import open_harness
from tests.registry_server.operation.server_process import (
    ServerProcess,
    init_registry_folder,
    run_server,
)
from tests.registry_server.publishing.package_fixtures import (
    InMemoryPackage,
    PackageTemplate,
    upload_and_publish,
)
from tests.registry_server.publishing.package_fixtures import InMemoryPackage as InMemory
from tests.store.fixtures import make_key

LIMITS = RegistryLimits(requests_per_minute=1_000_000, grace_seconds=0)


def make_acme_registry(
    folder: Path, packages: Sequence[InMemoryPackage] = (), limits: RegistryLimits = LIMITS
) -> CreatedRegistry:
    """Make a registry where everybody may read ``acme``, with these packages in it."""
    made = init_registry_folder(folder, limits=limits)
    served = open_harness(made.settings)
    served.create_namespace("acme", kind="expert", read="public", owner="admin")
    admin = served.authenticate(made.token)
    key = make_key("acme").public.pem()
    add_key(served.registry, admin, namespace="acme", public_key=key, statement=None)
    for parcel in packages:
        upload_and_publish(served.registry, admin, parcel)
    served.close()
    return made


MEGABYTES = 24


@dataclass(frozen=True)
class MemoryDisk:
    """A small file system at ``folder``, and once more at ``behind``, where it always stays."""

    folder: Path
    mirror: Path

    @property
    def free(self) -> int:
        state = os.statvfs(self.folder)
        return state.f_bavail * state.f_frsize

    def fill(self, *, remaining: int = 0) -> None:
        """Fill it up to so many bytes."""
        (self.mirror / "filler").write_bytes(bytes(self.free - remaining))

    def clear(self) -> None:
        """Take the filling away."""
        (self.mirror / "filler").unlink()

    def unmount(self) -> None:
        """Leave an empty folder, as a disk does that is gone; open files stay open."""
        _run_command("umount", "--lazy", str(self.folder))

    def remount(self) -> None:
        _run_command("mount", "--bind", str(self.mirror), str(self.folder))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[MemoryDisk]:
    """A file system of a few megabytes."""
    made = MemoryDisk(tmp_path / "disk", tmp_path / "behind")
    for folder in (made.folder, made.mirror):
        folder.mkdir()
    size = f"size={MEGABYTES}m"
    mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(made.mirror)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        made.remount()
        yield made
    finally:
        for folder in (made.folder, made.mirror):
            subprocess.run(["umount", "--lazy", folder], capture_output=True, check=False)


def _run_command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


PUBLISHERS = 4
MAX_TRIES = 50
"""More than any publish needs: between two kills something always comes through."""
MAX_WAIT_SECONDS = 120.0
"""Seconds without a publish after which a storm is given up."""
REGISTRY_FAILED = 6


@dataclass
class PublishLog:
    """What publishers were told, shared by their threads and by the one who kills."""

    acknowledged: dict[str, Digest] = field(default_factory=dict)
    interrupted: Counter[str] = field(default_factory=Counter)
    """How often, by what was there when the publisher came back."""
    server_up: Event = field(default_factory=Event)
    changed: Condition = field(default_factory=Condition)

    def record_acknowledged(self, parcel: PublishPackage) -> None:
        with self.changed:
            self.acknowledged[parcel.ref] = parcel.contents.package_digest
            self.changed.notify_all()

    def record_interrupted(self, stage: str) -> None:
        with self.changed:
            self.interrupted[stage] += 1

    def wait_for(self, count: int) -> None:
        """Wait until so many publishes were acknowledged."""
        with self.changed:
            enough = self.changed.wait_for(
                lambda: len(self.acknowledged) >= count, MAX_WAIT_SECONDS
            )
        assert enough, f"no {count} publishes in {MAX_WAIT_SECONDS} seconds"


@dataclass(frozen=True)
class RetryingPublisher:
    """One who publishes packages, each until it is acknowledged."""

    ledger: PublishLog
    destination: PublishTarget

    def publish(self, parcels: Sequence[PublishPackage]) -> None:
        for parcel in parcels:
            sent = False
            for _ in range(MAX_TRIES):
                self.ledger.server_up.wait(MAX_WAIT_SECONDS)
                try:
                    shipment = plan_upload(parcel, self.destination)
                    if sent:
                        self.ledger.record_interrupted(describe_stage(shipment))
                    sent = True
                    publish_package(shipment, self.destination)
                except RegistryError as error:
                    check_error_names_host(error, self.destination.host)
                    continue
                self.ledger.record_acknowledged(parcel)
                break
            else:
                raise AssertionError(f"{parcel.ref} never came through")


def check_error_names_host(error: RegistryError, host: str) -> None:
    """Demand that an error says whose fault it is."""
    assert get_exit_code(error) == REGISTRY_FAILED
    assert host in error.message


def describe_stage(shipment: UploadPlan) -> str:
    """How far the interrupted publish came."""
    if shipment.state == "published":
        return "after the commit"
    if not shipment.missing:
        return "at the manifest"
    fresh = len(shipment.missing) >= len(shipment.source.blobs) - 1
    return "before the first blob" if fresh else "among the blobs"


@contextmanager
def open_publisher(
    host: str, token: str, folder: Path, ledger: PublishLog, *, tries: int
) -> Iterator[RetryingPublisher]:
    """Lend a publisher whose client tries each request so often before it says that it failed."""
    address = RegistryAddress.parse(host)
    retries = RetrySchedule(attempts=tries, first_pause=0.2)
    with RegistryHttp(
        UnsavedCredential(address, Credential("admin", token)), retries=retries
    ) as http:
        oci = OciClient(http, address, folder / "uploads")
        yield RetryingPublisher(ledger, PublishTarget(oci, ApiClient(http, address), folder))


@dataclass(frozen=True)
class KillScenario:
    """A registry in a folder, and those who publish there."""

    data: Path
    token: str
    packages: Sequence[PublishPackage]
    ledger: PublishLog = field(default_factory=PublishLog)

    def run(self, *, kills: int, seed: int, folder: Path) -> Iterator[None]:
        """Publish everything, killing the server so often; yield after each kill, while it is down.

        The clock counts acknowledged publishes, then waits for a moment within the next ones.
        """
        clock, calm = random.Random(seed), Event()
        moments = sorted(clock.randrange(len(self.packages) - PUBLISHERS) for _ in range(kills))
        port, crew = 0, PublisherThreads(self, folder)
        try:
            for moment in moments:
                with self._run_server(port) as server:
                    port = server.port
                    crew.start(f"127.0.0.1:{port}")
                    self.ledger.wait_for(moment)
                    calm.wait(clock.uniform(0, 0.25))
                    self.ledger.server_up.clear()
                    kill_server(server, clock)
                yield
            with self._run_server(port):
                crew.finish()
        finally:
            self.ledger.server_up.set()
            crew.close()

    @contextmanager
    def _run_server(self, port: int) -> Iterator[ServerProcess]:
        with run_server(self.data, "--port", str(port)) as server:
            self.ledger.server_up.set()
            yield server


class PublisherThreads:
    """The threads of the publishers; every second one gives up at the first failure."""

    def __init__(self, storm: KillScenario, folder: Path) -> None:
        self._storm = storm
        self._folder = folder
        self._pool = ThreadPoolExecutor(PUBLISHERS)
        self._jobs: list[Future[None]] = []

    def start(self, host: str) -> None:
        """Start them, when they do not run yet; raise what went wrong in one."""
        for number in range(0 if self._jobs else PUBLISHERS):
            self._jobs.append(self._pool.submit(self._publish, number, host))
        for job in self._jobs:
            if job.done():
                job.result()

    def _publish(self, number: int, host: str) -> None:
        storm, folder = self._storm, self._folder / f"publisher-{number}"
        tries = 1 if number % 2 else 6
        with open_publisher(host, storm.token, folder, storm.ledger, tries=tries) as one:
            one.publish(storm.packages[number::PUBLISHERS])

    def finish(self) -> None:
        for job in self._jobs:
            job.result(MAX_WAIT_SECONDS)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def kill_server(server: ServerProcess, clock: random.Random) -> None:
    """Kill the whole server, or only the process that answers."""
    pid = server.process.pid
    if clock.random() < 0.3:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(clock.choice(children)), signal.SIGKILL)
        server.process.wait(MAX_WAIT_SECONDS)
    else:
        server.process.kill()
        server.process.wait(MAX_WAIT_SECONDS)


def write_packages(
    template: PackageTemplate, folder: Path, trust: TrustStore, *, count: int, name_count: int
) -> list[PublishPackage]:
    """Make signed package files: versions of some names, each with some bytes of its own."""
    trust.add(make_key("acme").public, name="acme", namespaces=["acme"])
    noise = random.Random(count)
    made = []
    for number in range(count):
        size = 2_000_000 if number % 20 == 0 else noise.randrange(1000, 100_000)
        ref = f"acme/p{number % name_count}", f"1.{number // name_count}.0"
        notes = {"README.md": noise.randbytes(size // 2).hex().encode()}
        package = template.make_package(*ref, key=make_key("acme"), files=notes)

        path = folder / f"{number}.expert"
        write_package(path, package.layout, partial(open_blob, package))
        parcel, problems = examine_publish_package(path, trust)
        assert not problems, problems
        made.append(parcel)
    return made


def open_blob(package: InMemory, digest: Digest) -> AbstractContextManager[BinaryIO]:
    return BytesIO(package.blobs[digest])
