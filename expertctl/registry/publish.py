"""Publishing: what a registry lacks, then those bytes, then the manifest, which is the commit.

Everything that can be refused is refused before a byte travels. Until the manifest is accepted
nothing is visible; afterwards the version never changes. Blobs that arrived need not be sent again,
and partial ones go on where they ended (`expertctl.registry.upload`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Literal

from expertctl.digest import Digest, Progress, no_progress
from expertctl.errors import (
    ConflictError,
    DigestError,
    ExpertError,
    InvalidPackageError,
    NotFoundError,
    RegistryError,
    RevokedError,
    SignatureError,
    TrustError,
    UsageError,
)
from expertctl.package.archive_reader import DISCARD
from expertctl.package.layout import CONFIG, Blobs
from expertctl.package.read import PackageContents, read_package
from expertctl.package.secrets_scan import secret_in
from expertctl.package.spool import Spool, with_document
from expertctl.package.verify import verify_contents
from expertctl.reference import PackageName, Reference
from expertctl.registry.api_client import ApiClient
from expertctl.registry.oci_client import OciClient
from expertctl.registry.package_pages import version_page
from expertctl.registry.people import Namespace, namespace
from expertctl.trust.bundle import read_bundle
from expertctl.trust.policy import TrustStore

WORKERS = 4
"""How many blobs travel at once."""

NEVER_CHANGES = "a version never changes: build this one with a higher `--version`"

_CONFIG = Digest.of(CONFIG)

State = Literal["new", "signed anew", "published"]
"""What a registry has of a version: nothing, its content under another signature, or this."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A package file that may be published: whole, without secrets, signed by a trusted key."""

    path: Path
    contents: PackageContents
    signer: str

    @property
    def ref(self) -> str:
        """``namespace/name@version``."""
        return self.contents.manifest.ref

    @property
    def package(self) -> PackageName:
        """The name."""
        return self.contents.manifest.package

    @property
    def blobs(self) -> tuple[tuple[Digest, int], ...]:
        """Digest and size of all that the manifest names, its configuration too."""
        return ((_CONFIG, len(CONFIG)), *self.contents.layout.blobs)


@dataclass(frozen=True, slots=True)
class Destination:
    """A registry to publish to; one without our API is any OCI registry."""

    oci: OciClient
    api: ApiClient | None
    beside: Path
    """Where blobs wait for their turn, on a disk with room."""

    @property
    def host(self) -> str:
        """What the registry is called."""
        return self.oci.address.host


@dataclass(frozen=True, slots=True)
class Shipment:
    """What publishing a package takes: the blobs that must travel, and the room there is."""

    parcel: Parcel
    state: State
    missing: tuple[tuple[Digest, int], ...]
    room: Namespace | None
    """The namespace as the registry describes it; None where a registry has none."""

    @property
    def size(self) -> int:
        """The bytes that must travel."""
        return sum(size for _, size in self.missing)

    @property
    def left(self) -> int | None:
        """The bytes that fit into the namespace; None when there is no limit."""
        if self.room is None or self.room.quota is None:
            return None
        return max(0, self.room.quota - self.room.used)


def read_parcel(path: Path, trust: TrustStore, *, progress: Progress = no_progress) -> Parcel:
    """Read a package file as strictly as install does, and look for secrets in it.

    Raises:
        InvalidPackageError: when it is malformed, or holds what must never be published.
        TrustError: when it is not signed, or not by a key that is trusted here.
    """
    parcel, problems = examine(path, trust, progress=progress)
    for problem in problems:
        raise problem
    return parcel


def examine(
    path: Path, trust: TrustStore, *, progress: Progress = no_progress
) -> tuple[Parcel, list[ExpertError]]:
    """Read a package file and return it with all that forbids to publish it.

    Raises:
        InvalidPackageError: when it is malformed.
    """
    contents = read_package(path, progress=progress)
    problems = list[ExpertError]()
    try:
        signer = verify_contents(contents, trust).signer or ""
    except TrustError as error:
        problems.append(error)
        signer = _claimed_signer(contents)
    found = [f"{name}: holds {what}" for name, what in _secrets(contents)]
    if found:
        hint = "take it out, consider it lost, and build the package again"
        what = f"{path.name}: must not be published"
        problems.append(InvalidPackageError(what, found, hint=hint))
    return Parcel(path, contents, signer), problems


def _claimed_signer(contents: PackageContents) -> str:
    """Return the key that a signature names, not verified; empty where that cannot be read."""
    with suppress(SignatureError):
        return read_bundle(contents.signature or b"").key_id
    return ""


def _secrets(contents: PackageContents) -> Iterator[tuple[str, str]]:
    for name, data in contents.small.items():
        if what := secret_in(data):
            yield name, what


def in_order(parcels: Sequence[Parcel]) -> list[Parcel]:
    """Sort packages so that each comes after those it requires.

    Raises:
        UsageError: when two are the same version, or they require each other in a circle.
    """
    by_ref = {parcel.ref: parcel for parcel in parcels}
    if len(by_ref) < len(parcels):
        raise UsageError("two of the files are the same version of a package", hint="name one")
    graph = {parcel.ref: _required(parcel, parcels) for parcel in parcels}
    try:
        return [by_ref[ref] for ref in TopologicalSorter(graph).static_order()]
    except CycleError as error:
        circle = " → ".join(error.args[1])
        raise UsageError(f"these packages require each other: {circle}") from error


def _required(parcel: Parcel, among: Sequence[Parcel]) -> list[str]:
    wanted = [Reference.parse(text) for text in parcel.contents.manifest.composition.requires]
    return [
        other.ref
        for other in among
        for ref in wanted
        if ref.package == other.package and ref.constraint.allows(other.contents.manifest.semver)
    ]


def plan_shipment(parcel: Parcel, to: Destination) -> Shipment:
    """Ask a registry what it has; nothing is sent.

    Raises:
        NotFoundError: when there is no such namespace.
        TrustError: when the signer's key may not sign there.
        ConflictError: when the version is there with other content.
    """
    shipment, problems = check_shipment(parcel, to)
    for problem in problems:
        raise problem
    assert shipment is not None, "there are problems without it"
    return shipment


def check_shipment(
    parcel: Parcel, to: Destination
) -> tuple[Shipment | None, list[NotFoundError | TrustError | ConflictError]]:
    """Ask a registry what it has, and return all that is in the way; nothing is sent.

    Raises:
        RegistryError: when it cannot be asked.
    """
    room, problems = _room(parcel, to.api) if to.api is not None else (None, [])
    try:
        state = _state(parcel, to.api) if to.api is not None else _plain_state(parcel, to.oci)
    except ConflictError as error:
        return None, [*problems, error]
    if problems:
        return None, problems
    missing = () if state == "published" else _missing(parcel, to.oci)
    return Shipment(parcel, state, missing, room), []


def send(shipment: Shipment, to: Destination, *, progress: Progress = no_progress) -> None:
    """Send what is missing, then the manifest; afterwards the package is published, or not at all.

    Raises:
        RegistryError: when the network or the registry fails; the same call goes on from there.
        ConflictError: when another content was published under this version meanwhile.
        BudgetError: when there is no room.
    """
    if shipment.state == "published":
        return
    parcel = shipment.parcel
    if shipment.missing:
        with _spooled(parcel, shipment.missing, to.beside) as blobs:
            _upload_all(str(parcel.package), shipment.missing, blobs, to.oci, progress)
    version = parcel.contents.manifest.version
    to.oci.put_manifest(str(parcel.package), version, parcel.contents.layout.manifest)


def _room(
    parcel: Parcel, api: ApiClient
) -> tuple[Namespace | None, list[NotFoundError | TrustError | ConflictError]]:
    """Return the namespace, and why the signer's key may not sign there."""
    name, host = parcel.package.namespace, api.address.host
    unknown = TrustError(
        f"{host} does not know the key {parcel.signer} for {name}/*",
        hint=f"an owner adds it: `expertctl registry keys add KEY --namespace {name}`",
    )
    try:
        found = namespace(api, name)
    except NotFoundError:
        message = f"{host} has no namespace {name!r} that you may use"
        hint = f"an administrator makes it: `expertctl registry namespace add {name}`"
        absent = NotFoundError(message, hint=f"{hint}, with `--owner USER` for you")
        return None, [absent, *([unknown] if parcel.signer else [])]
    if not parcel.signer:
        return found, []
    key = found.key(parcel.signer)
    if key is None:
        return found, [unknown]
    if key.revoked:
        hint = "sign with another key: `expertctl sign FILE --key NAME`"
        revoked = RevokedError(f"the key {parcel.signer} was revoked for {name}/*", hint=hint)
        return found, [revoked]
    return found, []


def _state(parcel: Parcel, api: ApiClient) -> State:
    manifest, contents = parcel.contents.manifest, parcel.contents
    try:
        there = version_page(api, manifest.package, manifest.semver).release
    except NotFoundError:
        return "new"
    if there.content_digest != str(contents.content_digest):
        message = f"{parcel.ref} is on {api.address.host} with other content"
        raise ConflictError(message, hint=NEVER_CHANGES)
    same = there.package_digest == str(contents.package_digest)
    return "published" if same else "signed anew"


def _plain_state(parcel: Parcel, oci: OciClient) -> State:
    """Look at the tag, which a registry without our rules would let anybody move."""
    version = parcel.contents.manifest.version
    there = oci.manifest_digest(str(parcel.package), version)
    if there is None:
        return "new"
    if there != parcel.contents.package_digest:
        message = f"{parcel.ref} is on {oci.address.host} with other bytes"
        raise ConflictError(message, hint=NEVER_CHANGES)
    return "published"


def _missing(parcel: Parcel, oci: OciClient) -> tuple[tuple[Digest, int], ...]:
    with ThreadPoolExecutor(WORKERS) as pool, oci.http.ended_by_ctrl_c():
        there = pool.map(lambda blob: oci.has_blob(str(parcel.package), blob[0]), parcel.blobs)
        return tuple(b for b, found in zip(parcel.blobs, there, strict=True) if not found)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A sink that keeps some blobs and passes over the others."""

    spool: Spool
    digests: frozenset[Digest]

    def open(
        self, digest: Digest, size: int
    ) -> AbstractContextManager[Callable[[memoryview], object]]:
        """Take a blob."""
        return (self.spool if digest in self.digests else DISCARD).open(digest, size)


@contextmanager
def _spooled(
    parcel: Parcel, missing: Sequence[tuple[Digest, int]], beside: Path
) -> Iterator[Blobs]:
    """Write the missing blobs to files: the frame yields them in one order only."""
    beside.mkdir(mode=0o700, parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".publish-", dir=beside) as name:
        spool = Spool(Path(name))
        wanted = _Wanted(spool, frozenset(digest for digest, _ in missing))
        again = read_package(parcel.path, sink=wanted)
        if again.package_digest != parcel.contents.package_digest:
            raise DigestError(f"{parcel.path} was changed while it was being published")
        yield with_document(spool.blob, CONFIG)


def _upload_all(
    repository: str,
    missing: Sequence[tuple[Digest, int]],
    blobs: Blobs,
    oci: OciClient,
    progress: Progress,
) -> None:
    """Send blobs, several at once; the first that fails stops the others."""
    stop = Event()

    def report(count: int) -> None:
        if stop.is_set():
            raise RegistryError("stopped")
        progress(count)

    def upload(digest: Digest, size: int) -> None:
        oci.upload(repository, digest, size, partial(blobs, digest), progress=report)

    with ThreadPoolExecutor(WORKERS, thread_name_prefix="upload") as pool:
        waiting: Iterable[object] = missing
        try:
            running = [pool.submit(upload, digest, size) for digest, size in missing]
            done, waiting = wait(running, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            if waiting:  # one failed, or the person pressed Ctrl-C
                oci.http.interrupt()
            pool.shutdown(cancel_futures=True)
    failures = [error for each in done if (error := each.exception())]
    for failure in failures:
        raise failure
