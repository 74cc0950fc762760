"""Fetching packages from registries: manifests by digest, then every blob that is missing.

A registry without an index (any OCI registry) does not say which versions are right, so the user
must: by naming exact bytes, or an exact version whose publisher's key the user trusts for that
namespace of that registry.

A blob in the store is not fetched, one that two packages share is fetched once. Complete blobs lie
in ``registries/arrived/`` until they are installed, so that a killed install can continue; partial
ones belong to `expertctl.registry.download`. Everything is hashed again when the packages are read.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from expertctl.digest import Digest, FileDigest, Progress, hash_file
from expertctl.errors import DigestError, InvalidPackageError, RegistryError, TrustError
from expertctl.files import make_folders
from expertctl.install.candidate import InstallCandidate, Requirement
from expertctl.install.installer import StagedPackage
from expertctl.install.sources import RegistrySources
from expertctl.package.layout import PackageLayout, compute_content_digest, parse_oci_manifest
from expertctl.package.read import REPLACED_HINT, read_blobs
from expertctl.reference import PackageName, Reference
from expertctl.registry.address import RegistryAddress
from expertctl.registry.client import OciClient
from expertctl.registry.download import ALTERED_HINT, BlobDownloader, BlobRequest
from expertctl.registry.http import RegistryHttp
from expertctl.registry.index_document import Release
from expertctl.registry.upload import remove_old_files
from expertctl.schema.manifest import MANIFEST_PATH, MAX_MANIFEST_BYTES, parse_manifest
from expertctl.store.store import Store
from expertctl.store.transaction import PackageStaging


@dataclass(frozen=True, slots=True)
class UnindexedPackage:
    """One package from a registry without an index."""

    candidate: InstallCandidate
    named_digest: Digest | None
    """Its exact bytes, where the user typed their digest."""


def find_unindexed(requirement: Requirement, sources: RegistrySources) -> UnindexedPackage | None:
    """Find what a reference names in a registry without an index; None where it has one.

    Raises:
        NotFoundError: when it does not exist there.
        TrustError: when it is another package than its name says, or may not come from there.
        InvalidPackageError: when it is no package.
    """
    wanted = requirement.wanted
    if wanted.registry is None:
        return None
    address = sources.resolve_address(wanted, by_hand=True)
    if sources.knows_host(address.host) or not _is_authorised(requirement, address, sources):
        return None
    if not requirement.by_hand:
        sources.require_authority(wanted, address)
    client = sources.open_client(address.host)
    tag = wanted.digest or str(wanted.constraint.pinned)
    remote = client.fetch_manifest(str(wanted.package), tag)
    what = f"{wanted} from {address.host}"
    candidate = _make_candidate(
        parse_oci_manifest(remote.data, what=what), client, wanted, remote.digest, what
    )
    sources.note_unindexed(address)
    return UnindexedPackage(
        candidate, remote.digest if wanted.digest and requirement.by_hand else None
    )


def _is_authorised(
    requirement: Requirement, address: RegistryAddress, sources: RegistrySources
) -> bool:
    """Tell whether the user vouches for the bytes, or a trusted key for the version."""
    wanted = requirement.wanted
    if wanted.digest is not None and requirement.by_hand:
        return True
    return requirement.names_one_version and sources.has_trusted_key(address, wanted.package)


def _make_candidate(
    layout: PackageLayout, client: OciClient, wanted: Reference, digest: Digest, what: str
) -> InstallCandidate:
    file = next(file for file in layout.files if file.path == MANIFEST_PATH)  # always there
    manifest = parse_manifest(
        _fetch_small_file(client, wanted, file, what), what=f"{what} {MANIFEST_PATH}"
    )
    content = compute_content_digest(layout.files)
    if manifest.package != wanted.package or not wanted.allows(manifest.semver, digest, content):
        message = f"asked for {wanted}, but the package is {manifest.ref}"
        raise TrustError(message, hint=REPLACED_HINT)
    return InstallCandidate(
        package=manifest.package,
        version=manifest.semver,
        registry=client.address.host,
        content_digest=content,
        package_digests=(digest,),
        requires=tuple(map(Reference.parse, manifest.composition.requires)),
        conflicts=tuple(map(Reference.parse, manifest.composition.conflicts)),
        base=manifest.base.name,
        size=sum(file.size for file in layout.layers),
    )


def _fetch_small_file(client: OciClient, wanted: Reference, file: FileDigest, what: str) -> bytes:
    """Fetch one small file into memory."""
    if file.size > MAX_MANIFEST_BYTES:
        raise InvalidPackageError(what, [f"{file.path} has more than {MAX_MANIFEST_BYTES} bytes"])
    data = bytearray()
    with client.open_blob(str(wanted.package), file.digest) as answer:
        if answer.status != 200:
            message = f"{what}: {file.path} was answered with {answer.status}"
            raise RegistryError(message, hint=ALTERED_HINT)
        for chunk in answer.chunks:
            data += chunk
            if len(data) > file.size:
                break
    if len(data) != file.size or Digest.compute(data) != file.digest:
        raise DigestError(f"{what}: {file.path} does not have its digest", hint=ALTERED_HINT)
    return bytes(data)


LOG = logging.getLogger("expertctl.install")
PARALLEL = 8
KEPT_SECONDS = 7 * 86400.0
_MAX_TRIES = 3
T = TypeVar("T")
R = TypeVar("R")

OpenProgress = Callable[[int], AbstractContextManager[Progress]]
"""Opens a reporter of progress over a number of bytes."""


@dataclass(frozen=True, slots=True)
class FetchItem:
    """One package to fetch, with the digests that it must have."""

    wanted: Reference
    """Its name and exact version."""
    registry: str
    client: OciClient
    package_digest: Digest
    content_digest: Digest
    release: Release | None
    """Its entry in the index; None when it does not come from an index."""
    named_digest: Digest | None = None

    @property
    def package(self) -> PackageName:
        """Its name."""
        return self.wanted.package

    @property
    def what(self) -> str:
        """The package as messages name it."""
        return f"{self.wanted} from {self.registry}"


@dataclass(frozen=True, slots=True)
class DownloadCache:
    """The folder of complete blobs that are not installed yet, named by their digests."""

    folder: Path

    def path(self, digest: Digest) -> Path:
        """Return the path of a blob."""
        return self.folder / digest.hex

    def remove(self, digests: Iterable[Digest]) -> None:
        """Remove blobs that were installed."""
        for digest in digests:
            self.path(digest).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove old blobs of installs that were not continued."""
        remove_old_files(self.folder, age=KEPT_SECONDS)


def fetch_packages(
    items: Sequence[FetchItem],
    *,
    store: Store,
    staging: PackageStaging,
    registries: Path,
    open_progress: OpenProgress,
) -> list[StagedPackage]:
    """Fetch packages into a staging folder and read them with the same checks as files.

    Raises:
        NotFoundError: when a registry lacks what its index promised.
        DigestError: when bytes are not those of their digest.
        TrustError: when a package is not what the index says of it.
        InvalidPackageError: when one is malformed.
        UnreachableError: when a registry does not answer; what came stays for the next time.
    """
    arrivals = DownloadCache(registries / "arrived")
    http = items[0].client.http
    layouts = _run_parallel(_fetch_layout, items, http)
    pairs = list(zip(items, layouts, strict=True))
    _stage_blobs(
        pairs,
        store=store,
        staging=staging,
        arrivals=arrivals,
        registries=registries,
        open_progress=open_progress,
    )
    parts = [
        (item, layout, staging.subset(str(number), {file.digest for file in layout.layers}))
        for number, (item, layout) in enumerate(pairs)
    ]
    return _run_parallel(_read_staged, parts, http)


def clear_downloads(staged: Iterable[StagedPackage], registries: Path) -> None:
    """Remove the downloaded blobs of packages that are installed now."""
    layers = {file.digest for item in staged for file in item.contents.layout.layers}
    DownloadCache(registries / "arrived").remove(layers)


def _fetch_layout(item: FetchItem) -> PackageLayout:
    """Fetch a manifest by its digest and parse it; its files must have the promised content."""
    remote = item.client.fetch_manifest(str(item.package), item.package_digest)
    layout = parse_oci_manifest(remote.data, what=item.what)
    if compute_content_digest(layout.files) != item.content_digest:
        raise DigestError(
            f"{item.what}: the manifest names other content than the index",
            hint="tell the operator of the registry; nothing was installed",
        )
    _check_sizes(item, layout)
    return layout


def _check_sizes(item: FetchItem, layout: PackageLayout) -> None:
    """Require the sizes that the index states, before anything large is fetched."""
    if item.release is None:
        return
    form = item.release.find_form(item.package_digest)
    pairs = {
        "its files have": (sum(file.size for file in layout.files), item.release.size),
        "its manifest has": (len(layout.manifest), form.size if form else 0),
    }
    for what, (real, stated) in pairs.items():
        if real != stated:
            raise DigestError(
                f"{item.what}: {what} {real:,} bytes, the index says {stated:,}",
                hint="tell the operator of the registry; nothing was installed",
            )


_Pairs = Sequence[tuple[FetchItem, PackageLayout]]


def _stage_blobs(
    pairs: _Pairs,
    *,
    store: Store,
    staging: PackageStaging,
    arrivals: DownloadCache,
    registries: Path,
    open_progress: OpenProgress,
) -> None:
    """Stage every blob: from the store, from the download cache, or from a registry."""
    arrivals.sweep()
    make_folders(arrivals.folder, mode=0o700)
    missing = _find_missing(pairs, staging, [store.paths.blob, arrivals.path])
    wanted = {file.digest for _, layout in pairs for file in layout.layers}
    LOG.debug("%d of %d blobs are missing here", sum(len(f) for _, f in missing), len(wanted))
    with open_progress(sum(file.size for _, files in missing for file in files)) as progress:
        for _ in range(_MAX_TRIES):
            if not missing:
                return
            _download(missing, BlobDownloader(registries / "partial", PARALLEL), arrivals, progress)
            missing = [(item, left) for item, files in missing
                       if (left := _adopt_downloaded(files, staging, arrivals))]  # fmt: skip
    raise RegistryError(f"{missing[0][0].what}: its files vanish as they arrive; try again")


def _find_missing(
    pairs: _Pairs, staging: PackageStaging, places: Sequence[Callable[[Digest], Path]]
) -> list[tuple[FetchItem, list[FileDigest]]]:
    """Adopt the blobs that exist here; return each missing one once, with a package that has it."""
    seen: set[Digest] = set()
    missing: list[tuple[FetchItem, list[FileDigest]]] = []
    for item, layout in pairs:
        files = [file for file in layout.layers if file.digest not in seen]
        seen.update(file.digest for file in files)
        absent = [f for f in files if not any(_adopt(f, staging, place) for place in places)]
        if absent:
            missing.append((item, absent))
    return missing


def _adopt_downloaded(
    files: Sequence[FileDigest], staging: PackageStaging, arrivals: DownloadCache
) -> list[FileDigest]:
    """Adopt blobs hashed on arrival; return those that another process removed meanwhile."""
    left = []
    for file in files:
        try:
            staging.adopt(file.digest, arrivals.path(file.digest))
        except FileNotFoundError:
            left.append(file)
    return left


def _adopt(file: FileDigest, staging: PackageStaging, place: Callable[[Digest], Path]) -> bool:
    """Adopt a blob from a local folder, if it is there and whole."""
    if staging.path(file.digest).exists():
        return True
    source = place(file.digest)
    try:
        if source.stat().st_size != file.size or hash_file(source)[1] != file.digest:
            return False
        staging.adopt(file.digest, source)
    except FileNotFoundError:
        return False
    return True


def _download(
    missing: Sequence[tuple[FetchItem, list[FileDigest]]],
    downloads: BlobDownloader,
    arrivals: DownloadCache,
    progress: Progress,
) -> None:
    """Download from several repositories at once; the first failure ends the rest."""
    wanted = [
        BlobRequest(item.client, str(item.package), file)
        for item, files in missing
        for file in files
    ]
    try:
        downloads.fetch_all(wanted, arrivals, progress)
    except FileNotFoundError as error:  # another process cleaned up meanwhile
        what = missing[0][0].what
        raise RegistryError(f"{what}: {error.filename} vanished; try again") from error


def _read_staged(part: tuple[FetchItem, PackageLayout, PackageStaging]) -> StagedPackage:
    item, layout, staging = part
    contents = read_blobs(layout, staging.blob, what=item.what)
    staged = StagedPackage(contents, staging, item.registry, item.wanted, item.named_digest)
    if item.release is not None:
        _check_claims(staged, item.release, item)
    return staged


def _check_claims(staged: StagedPackage, release: Release, item: FetchItem) -> None:
    """Require that a package matches its entry in the index."""
    manifest = staged.contents.manifest
    pairs: Mapping[str, tuple[object, object]] = {
        "requires": (manifest.composition.requires, release.requires),
        "conflicts": (manifest.composition.conflicts, release.conflicts),
        "base": (manifest.base, release.base),
    }
    wrong = [field for field, (stated, claimed) in pairs.items() if stated != claimed]
    if wrong:
        raise DigestError(
            f"{item.what}: the index says something else of its {', '.join(wrong)} than the "
            f"package itself",
            hint="tell the operator of the registry; nothing was installed",
        )


def _run_parallel(work: Callable[[T], R], items: Sequence[T], http: RegistryHttp) -> list[R]:
    """Return the results of ``work``, in order; raise the first failure and cancel the rest."""
    if len(items) == 1:
        return [work(items[0])]
    with (
        ThreadPoolExecutor(PARALLEL, thread_name_prefix="fetch") as pool,
        http.interrupt_on_ctrl_c(),
    ):
        jobs = [pool.submit(work, item) for item in items]
        try:
            return [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
