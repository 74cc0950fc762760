"""Publishing a package: check, plan, upload the missing blobs, then the manifest as the commit.

Everything that can be refused is refused before a byte is sent. Until the manifest is accepted
nothing is visible; afterwards the version never changes. Blobs that arrived need not be sent again,
and interrupted uploads resume (`expertctl.registry.upload`).
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

from expertctl.digest import Digest, Progress, ignore_progress
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
from expertctl.package.archive import DISCARD
from expertctl.package.directory import find_secret
from expertctl.package.layout import CONFIG, Blobs
from expertctl.package.read import PackageContents, read_package, verify_contents
from expertctl.package.write import BlobSpool, add_document
from expertctl.reference import PackageName, Reference
from expertctl.registry.accounts import NamespaceDetails, fetch_namespace
from expertctl.registry.client import ApiClient, OciClient, fetch_version
from expertctl.trust.bundle import read_bundle
from expertctl.trust.trust_store import TrustStore

WORKERS = 4
"""How many blobs are sent at once."""

IMMUTABLE_HINT = "a version never changes: build this one with a higher `--version`"

_CONFIG = Digest.compute(CONFIG)

PublishState = Literal["new", "signed anew", "published"]
"""What a registry has of a version: nothing, its content under another signature, or this package.
"""


@dataclass(frozen=True, slots=True)
class PublishPackage:
    """A package file that may be published: valid, without secrets, signed by a trusted key."""

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
        """Digest and size of every blob that the manifest names, the OCI configuration included."""
        return ((_CONFIG, len(CONFIG)), *self.contents.layout.blobs)


@dataclass(frozen=True, slots=True)
class PublishTarget:
    """A registry to publish to; one without our API is any OCI registry."""

    oci: OciClient
    api: ApiClient | None
    spool_folder: Path
    """Where blobs are unpacked before they are sent, on a disk with room."""

    @property
    def host(self) -> str:
        """The name of the registry."""
        return self.oci.address.host


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """The upload of one package: the blobs to send, and the room in the namespace."""

    source: PublishPackage
    state: PublishState
    missing: tuple[tuple[Digest, int], ...]
    namespace: NamespaceDetails | None
    """The namespace as the registry describes it; None where a registry has none."""

    @property
    def size(self) -> int:
        """The bytes to send."""
        return sum(size for _, size in self.missing)

    @property
    def remaining_quota(self) -> int | None:
        """The bytes that fit into the namespace; None when there is no limit."""
        if self.namespace is None or self.namespace.quota is None:
            return None
        return max(0, self.namespace.quota - self.namespace.used)


def examine_publish_package(
    path: Path, trust: TrustStore, *, progress: Progress = ignore_progress
) -> tuple[PublishPackage, list[ExpertError]]:
    """Read a package file as strictly as install; return it and every reason not to publish it.

    Raises:
        InvalidPackageError: when it is malformed.
    """
    contents = read_package(path, progress=progress)
    problems = list[ExpertError]()
    try:
        signer = verify_contents(contents, trust).signer or ""
    except TrustError as error:
        problems.append(error)
        signer = _read_claimed_signer(contents)
    found = [f"{name}: holds {what}" for name, what in _find_secrets(contents)]
    if found:
        hint = "take it out, consider it lost, and build the package again"
        what = f"{path.name}: must not be published"
        problems.append(InvalidPackageError(what, found, hint=hint))
    return PublishPackage(path, contents, signer), problems


def _read_claimed_signer(contents: PackageContents) -> str:
    """Return the key that a signature names, unverified; empty where that cannot be read."""
    with suppress(SignatureError):
        return read_bundle(contents.signature or b"").key_id
    return ""


def _find_secrets(contents: PackageContents) -> Iterator[tuple[str, str]]:
    for name, data in contents.small.items():
        if what := find_secret(data):
            yield name, what


def sort_by_requirements(items: Sequence[PublishPackage]) -> list[PublishPackage]:
    """Sort packages so that each comes after those it requires.

    Raises:
        UsageError: when two are the same version, or they require each other in a circle.
    """
    by_ref = {item.ref: item for item in items}
    if len(by_ref) < len(items):
        raise UsageError("two of the files are the same version of a package", hint="name one")
    graph = {item.ref: _list_required(item, items) for item in items}
    try:
        return [by_ref[ref] for ref in TopologicalSorter(graph).static_order()]
    except CycleError as error:
        circle = " → ".join(error.args[1])
        raise UsageError(f"these packages require each other: {circle}") from error


def _list_required(item: PublishPackage, among: Sequence[PublishPackage]) -> list[str]:
    wanted = [Reference.parse(text) for text in item.contents.manifest.composition.requires]
    return [
        other.ref
        for other in among
        for ref in wanted
        if ref.package == other.package and ref.constraint.allows(other.contents.manifest.semver)
    ]


def plan_upload(item: PublishPackage, to: PublishTarget) -> UploadPlan:
    """Ask a registry what it has; nothing is sent.

    Raises:
        NotFoundError: when there is no such namespace.
        TrustError: when the signer's key may not sign there.
        ConflictError: when the version is there with other content.
    """
    plan, problems = check_upload(item, to)
    for problem in problems:
        raise problem
    assert plan is not None, "there are problems without it"
    return plan


def check_upload(
    item: PublishPackage, to: PublishTarget
) -> tuple[UploadPlan | None, list[NotFoundError | TrustError | ConflictError]]:
    """Ask a registry what it has, and return every obstacle; nothing is sent.

    Raises:
        RegistryError: when it cannot be asked.
    """
    room, problems = _check_namespace(item, to.api) if to.api is not None else (None, [])
    try:
        state = _find_state(item, to.api) if to.api is not None else _find_oci_state(item, to.oci)
    except ConflictError as error:
        return None, [*problems, error]
    if problems:
        return None, problems
    missing = () if state == "published" else _find_missing_blobs(item, to.oci)
    return UploadPlan(item, state, missing, room), []


def publish_package(
    plan: UploadPlan, to: PublishTarget, *, progress: Progress = ignore_progress
) -> None:
    """Send what is missing, then the manifest; afterwards the package is published, or not at all.

    Raises:
        RegistryError: when the network or the registry fails; the same call resumes from there.
        ConflictError: when another content was published under this version meanwhile.
        BudgetError: when there is no room.
    """
    if plan.state == "published":
        return
    item = plan.source
    if plan.missing:
        with _spool_blobs(item, plan.missing, to.spool_folder) as blobs:
            _upload_blobs(str(item.package), plan.missing, blobs, to.oci, progress)
    version = item.contents.manifest.version
    to.oci.put_manifest(str(item.package), version, item.contents.layout.manifest)


def _check_namespace(
    item: PublishPackage, api: ApiClient
) -> tuple[NamespaceDetails | None, list[NotFoundError | TrustError | ConflictError]]:
    """Return the namespace, and why the signer's key may not sign there."""
    name, host = item.package.namespace, api.address.host
    unknown = TrustError(
        f"{host} does not know the key {item.signer} for {name}/*",
        hint=f"an owner adds it: `expertctl registry keys add KEY --namespace {name}`",
    )
    try:
        found = fetch_namespace(api, name)
    except NotFoundError:
        message = f"{host} has no namespace {name!r} that you may use"
        hint = f"an administrator makes it: `expertctl registry namespace add {name}`"
        absent = NotFoundError(message, hint=f"{hint}, with `--owner USER` for you")
        return None, [absent, *([unknown] if item.signer else [])]
    if not item.signer:
        return found, []
    key = found.find_key(item.signer)
    if key is None:
        return found, [unknown]
    if key.revoked:
        hint = "sign with another key: `expertctl sign FILE --key NAME`"
        revoked = RevokedError(f"the key {item.signer} was revoked for {name}/*", hint=hint)
        return found, [revoked]
    return found, []


def _find_state(item: PublishPackage, api: ApiClient) -> PublishState:
    manifest, contents = item.contents.manifest, item.contents
    try:
        there = fetch_version(api, manifest.package, manifest.semver).release
    except NotFoundError:
        return "new"
    if there.content_digest != str(contents.content_digest):
        message = f"{item.ref} is on {api.address.host} with other content"
        raise ConflictError(message, hint=IMMUTABLE_HINT)
    same = there.package_digest == str(contents.package_digest)
    return "published" if same else "signed anew"


def _find_oci_state(item: PublishPackage, oci: OciClient) -> PublishState:
    """Check the tag, which a registry without our rules would let anybody move."""
    version = item.contents.manifest.version
    there = oci.fetch_manifest_digest(str(item.package), version)
    if there is None:
        return "new"
    if there != item.contents.package_digest:
        message = f"{item.ref} is on {oci.address.host} with other bytes"
        raise ConflictError(message, hint=IMMUTABLE_HINT)
    return "published"


def _find_missing_blobs(item: PublishPackage, oci: OciClient) -> tuple[tuple[Digest, int], ...]:
    with ThreadPoolExecutor(WORKERS) as pool, oci.http.interrupt_on_ctrl_c():
        there = pool.map(lambda blob: oci.has_blob(str(item.package), blob[0]), item.blobs)
        return tuple(b for b, found in zip(item.blobs, there, strict=True) if not found)


@dataclass(frozen=True, slots=True)
class _SelectiveSink:
    """A sink that stores some blobs and discards the others."""

    spool: BlobSpool
    digests: frozenset[Digest]

    def open(
        self, digest: Digest, size: int
    ) -> AbstractContextManager[Callable[[memoryview], object]]:
        """Create a blob."""
        return (self.spool if digest in self.digests else DISCARD).open(digest, size)


@contextmanager
def _spool_blobs(
    item: PublishPackage, missing: Sequence[tuple[Digest, int]], spool_folder: Path
) -> Iterator[Blobs]:
    """Write the missing blobs to files: the package file yields them in one order only."""
    spool_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".publish-", dir=spool_folder) as name:
        spool = BlobSpool(Path(name))
        wanted = _SelectiveSink(spool, frozenset(digest for digest, _ in missing))
        again = read_package(item.path, sink=wanted)
        if again.package_digest != item.contents.package_digest:
            raise DigestError(f"{item.path} was changed while it was being published")
        yield add_document(spool.blob, CONFIG)


def _upload_blobs(
    repository: str,
    missing: Sequence[tuple[Digest, int]],
    blobs: Blobs,
    oci: OciClient,
    progress: Progress,
) -> None:
    """Send blobs, several at once; the first failure stops the others."""
    stop = Event()

    def report(count: int) -> None:
        if stop.is_set():
            raise RegistryError("stopped")
        progress(count)

    def upload(digest: Digest, size: int) -> None:
        oci.upload_blob(repository, digest, size, partial(blobs, digest), progress=report)

    with ThreadPoolExecutor(WORKERS, thread_name_prefix="upload") as pool:
        waiting: Iterable[object] = missing
        try:
            running = [pool.submit(upload, digest, size) for digest, size in missing]
            done, waiting = wait(running, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            if waiting:  # one failed, or the user pressed Ctrl-C
                oci.http.interrupt()
            pool.shutdown(cancel_futures=True)
    failures = [error for each in done if (error := each.exception())]
    for failure in failures:
        raise failure
