"""Many publish at once to a server that is killed again and again by a clock with a seed."""

import os
import random
import signal
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

from expertctl.cli.exit_codes import exit_code
from expertctl.digest import Digest
from expertctl.errors import RegistryError
from expertctl.package.write import write_package
from expertctl.registry.address import RegistryAddress
from expertctl.registry.api_client import ApiClient
from expertctl.registry.credentials import Credential, OneCredential
from expertctl.registry.http import Http
from expertctl.registry.oci_client import OciClient
from expertctl.registry.publish import (
    Destination,
    Parcel,
    Shipment,
    plan_shipment,
    read_parcel,
    send,
)
from expertctl.registry.retry import Retries
from expertctl.trust.policy import TrustStore
from tests.registry_server.operation.running import Running, running
from tests.registry_server.publishing.parcels import Parcel as InMemory
from tests.registry_server.publishing.parcels import Template
from tests.store.shop import a_key

PUBLISHERS = 4
TRIES = 50
"""More than any publish needs: between two kills something always comes through."""
LONGEST = 120.0
"""Seconds without a publish after which a storm is given up."""
REGISTRY_FAILED = 6


@dataclass
class Ledger:
    """What publishers were told, shared by their threads and by the one who kills."""

    acknowledged: dict[str, Digest] = field(default_factory=dict)
    interrupted: Counter[str] = field(default_factory=Counter)
    """How often, by what was there when the publisher came back."""
    standing: Event = field(default_factory=Event)
    changed: Condition = field(default_factory=Condition)

    def enter(self, parcel: Parcel) -> None:
        with self.changed:
            self.acknowledged[parcel.ref] = parcel.contents.package_digest
            self.changed.notify_all()

    def interrupt(self, stage: str) -> None:
        with self.changed:
            self.interrupted[stage] += 1

    def wait_for(self, count: int) -> None:
        """Wait until so many publishes were acknowledged."""
        with self.changed:
            enough = self.changed.wait_for(lambda: len(self.acknowledged) >= count, LONGEST)
        assert enough, f"no {count} publishes in {LONGEST} seconds"


@dataclass(frozen=True)
class Publisher:
    """One who publishes packages, each until it is acknowledged."""

    ledger: Ledger
    to: Destination

    def publish(self, parcels: Sequence[Parcel]) -> None:
        for parcel in parcels:
            sent = False
            for _ in range(TRIES):
                self.ledger.standing.wait(LONGEST)
                try:
                    shipment = plan_shipment(parcel, self.to)
                    if sent:
                        self.ledger.interrupt(stage_of(shipment))
                    sent = True
                    send(shipment, self.to)
                except RegistryError as error:
                    demand_clear(error, self.to.host)
                    continue
                self.ledger.enter(parcel)
                break
            else:
                raise AssertionError(f"{parcel.ref} never came through")


def demand_clear(error: RegistryError, host: str) -> None:
    """Demand that an error says whose fault it is."""
    assert exit_code(error) == REGISTRY_FAILED
    assert host in error.message


def stage_of(shipment: Shipment) -> str:
    """How far the interrupted publish came."""
    if shipment.state == "published":
        return "after the commit"
    if not shipment.missing:
        return "at the manifest"
    fresh = len(shipment.missing) >= len(shipment.parcel.blobs) - 1
    return "before the first blob" if fresh else "among the blobs"


@contextmanager
def publisher(
    host: str, token: str, folder: Path, ledger: Ledger, *, tries: int
) -> Iterator[Publisher]:
    """Lend a publisher whose client tries each request so often before it says that it failed."""
    address = RegistryAddress.parse(host)
    retries = Retries(attempts=tries, first_pause=0.2)
    with Http(OneCredential(address, Credential("admin", token)), retries=retries) as http:
        oci = OciClient(http, address, folder / "uploads")
        yield Publisher(ledger, Destination(oci, ApiClient(http, address), folder))


@dataclass(frozen=True)
class Storm:
    """A registry in a folder, and those who publish there."""

    data: Path
    token: str
    parcels: Sequence[Parcel]
    ledger: Ledger = field(default_factory=Ledger)

    def rage(self, *, kills: int, seed: int, folder: Path) -> Iterator[None]:
        """Publish everything, killing the server so often; yield after each kill, while it is down.

        The clock counts acknowledged publishes, then waits for a moment within the next ones.
        """
        clock, calm = random.Random(seed), Event()
        moments = sorted(clock.randrange(len(self.parcels) - PUBLISHERS) for _ in range(kills))
        port, crew = 0, Crew(self, folder)
        try:
            for moment in moments:
                with self._standing(port) as server:
                    port = server.port
                    crew.begin(f"127.0.0.1:{port}")
                    self.ledger.wait_for(moment)
                    calm.wait(clock.uniform(0, 0.25))
                    self.ledger.standing.clear()
                    kill(server, clock)
                yield
            with self._standing(port):
                crew.finish()
        finally:
            self.ledger.standing.set()
            crew.close()

    @contextmanager
    def _standing(self, port: int) -> Iterator[Running]:
        with running(self.data, "--port", str(port)) as server:
            self.ledger.standing.set()
            yield server


class Crew:
    """The threads of the publishers; every second one gives up at the first failure."""

    def __init__(self, storm: Storm, folder: Path) -> None:
        self._storm = storm
        self._folder = folder
        self._pool = ThreadPoolExecutor(PUBLISHERS)
        self._jobs: list[Future[None]] = []

    def begin(self, host: str) -> None:
        """Start them, when they do not run yet; raise what went wrong in one."""
        for number in range(0 if self._jobs else PUBLISHERS):
            self._jobs.append(self._pool.submit(self._publish, number, host))
        for job in self._jobs:
            if job.done():
                job.result()

    def _publish(self, number: int, host: str) -> None:
        storm, folder = self._storm, self._folder / f"publisher-{number}"
        tries = 1 if number % 2 else 6
        with publisher(host, storm.token, folder, storm.ledger, tries=tries) as one:
            one.publish(storm.parcels[number::PUBLISHERS])

    def finish(self) -> None:
        for job in self._jobs:
            job.result(LONGEST)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def kill(server: Running, clock: random.Random) -> None:
    """Kill the whole server, or only the process that answers."""
    pid = server.process.pid
    if clock.random() < 0.3:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(clock.choice(children)), signal.SIGKILL)
        server.process.wait(LONGEST)
    else:
        server.process.kill()
        server.process.wait(LONGEST)


def make_parcels(
    template: Template, folder: Path, trust: TrustStore, *, count: int, names: int
) -> list[Parcel]:
    """Make signed package files: versions of some names, each with some bytes of its own."""
    trust.add(a_key("acme").public, name="acme", namespaces=["acme"])
    noise = random.Random(count)
    made = []
    for number in range(count):
        size = 2_000_000 if number % 20 == 0 else noise.randrange(1000, 100_000)
        ref = f"acme/p{number % names}", f"1.{number // names}.0"
        notes = {"README.md": noise.randbytes(size // 2).hex().encode()}
        package = template.parcel(*ref, key=a_key("acme"), files=notes)

        path = folder / f"{number}.expert"
        write_package(path, package.layout, partial(opened, package))
        made.append(read_parcel(path, trust))
    return made


def opened(package: InMemory, digest: Digest) -> AbstractContextManager[BinaryIO]:
    return BytesIO(package.blobs[digest])
