"""Fetching packages from registries: manifests by digest, then every blob that is missing.

A blob that the store has is not fetched, one that two packages share is fetched once. Complete
blobs lie in ``registries/arrived/`` until they are installed, so that a killed install can go on;
partial ones belong to `expertctl.registry.download`. Everything is hashed again when the packages
are read.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from expertctl.digest import Digest, FileDigest, Progress, hash_file
from expertctl.durable import make_folders
from expertctl.errors import DigestError, RegistryError
from expertctl.install.install import Staged
from expertctl.package.layout import Layout, content_digest, read_manifest
from expertctl.package.read import read_blobs
from expertctl.reference import PackageName, Reference
from expertctl.registry.download import Downloads, Wanted
from expertctl.registry.http import Http
from expertctl.registry.index_document import Release
from expertctl.registry.oci_client import OciClient
from expertctl.store.staging import Staging
from expertctl.store.store import Store

PARALLEL = 8
KEPT_SECONDS = 7 * 86400.0
_TRIES = 3
T = TypeVar("T")
R = TypeVar("R")

Lend = Callable[[int], AbstractContextManager[Progress]]
"""Lends a reporter of progress over a number of bytes."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One package to fetch: by which digest, from where, and what it must be."""

    wanted: Reference
    """Its name and exact version."""
    registry: str
    client: OciClient
    package_digest: Digest
    content_digest: Digest
    release: Release | None
    """What the index says of it; None when it does not come from an index."""
    named: Digest | None = None

    @property
    def package(self) -> PackageName:
        """Its name."""
        return self.wanted.package

    @property
    def what(self) -> str:
        """The package as messages name it."""
        return f"{self.wanted} from {self.registry}"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The folder of whole blobs that are not installed yet; their names are their digests."""

    folder: Path

    def path(self, digest: Digest) -> Path:
        """Return where a blob is, if it arrived."""
        return self.folder / digest.hex

    def forget(self, digests: Iterable[Digest]) -> None:
        """Remove blobs that are installed."""
        for digest in digests:
            self.path(digest).unlink(missing_ok=True)

    def sweep(self, *, age: float = KEPT_SECONDS) -> None:
        """Remove old blobs of installs that were not resumed."""
        now = time.time()
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            with suppress(FileNotFoundError):
                if abs(now - path.stat().st_mtime) >= age:
                    path.unlink()


def fetch(
    parcels: Sequence[Parcel], *, store: Store, staging: Staging, registries: Path, lend: Lend
) -> list[Staged]:
    """Bring packages into a staging folder, read as strictly as files.

    Raises:
        NotFoundError: when a registry lacks what its index promised.
        DigestError: when bytes are not those of their digest.
        TrustError: when a package is not what the index says of it.
        InvalidPackageError: when one is malformed.
        UnreachableError: when a registry does not answer; what came stays for the next time.
    """
    arrivals = Arrivals(registries / "arrived")
    http = parcels[0].client.http
    layouts = _in_parallel(_layout, parcels, http)
    pairs = list(zip(parcels, layouts, strict=True))
    _gather(
        pairs, store=store, staging=staging, arrivals=arrivals, registries=registries, lend=lend
    )
    parts = [
        (parcel, layout, staging.part(str(number), {file.digest for file in layout.layers}))
        for number, (parcel, layout) in enumerate(pairs)
    ]
    return _in_parallel(_read, parts, http)


def tidy(staged: Iterable[Staged], registries: Path) -> None:
    """Remove what arrived for packages that are installed now."""
    layers = {file.digest for item in staged for file in item.contents.layout.layers}
    Arrivals(registries / "arrived").forget(layers)


def _layout(parcel: Parcel) -> Layout:
    """Fetch a manifest by its digest and read it; its files must be the promised content."""
    remote = parcel.client.manifest(str(parcel.package), parcel.package_digest)
    layout = read_manifest(remote.data, what=parcel.what)
    if content_digest(layout.files) != parcel.content_digest:
        raise DigestError(
            f"{parcel.what}: the manifest names other content than the index",
            hint="tell whoever runs the registry; nothing was installed",
        )
    _check_sizes(parcel, layout)
    return layout


def _check_sizes(parcel: Parcel, layout: Layout) -> None:
    """Demand the sizes that the index states, before anything large is fetched."""
    if parcel.release is None:
        return
    form = parcel.release.form(parcel.package_digest)
    pairs = {
        "its files have": (sum(file.size for file in layout.files), parcel.release.size),
        "its manifest has": (len(layout.manifest), form.size if form else 0),
    }
    for what, (real, stated) in pairs.items():
        if real != stated:
            raise DigestError(
                f"{parcel.what}: {what} {real:,} bytes, the index says {stated:,}",
                hint="tell whoever runs the registry; nothing was installed",
            )


_Pairs = Sequence[tuple[Parcel, Layout]]


def _gather(
    pairs: _Pairs,
    *,
    store: Store,
    staging: Staging,
    arrivals: Arrivals,
    registries: Path,
    lend: Lend,
) -> None:
    """Bring every blob into staging: from the store, from what arrived, or from a registry."""
    arrivals.sweep()
    make_folders(arrivals.folder, mode=0o700)
    missing = _missing(pairs, staging, [store.paths.blob, arrivals.path])
    with lend(sum(file.size for _, files in missing for file in files)) as progress:
        for _ in range(_TRIES):
            if not missing:
                return
            _download(missing, Downloads(registries / "partial", PARALLEL), arrivals, progress)
            missing = [(parcel, left) for parcel, files in missing
                       if (left := _not_arrived(files, staging, arrivals))]  # fmt: skip
    raise RegistryError(f"{missing[0][0].what}: its files vanish as they arrive; try again")


def _missing(
    pairs: _Pairs, staging: Staging, places: Sequence[Callable[[Digest], Path]]
) -> list[tuple[Parcel, list[FileDigest]]]:
    """Adopt the blobs that are here; return each missing one once, with a package that has it."""
    seen: set[Digest] = set()
    missing: list[tuple[Parcel, list[FileDigest]]] = []
    for parcel, layout in pairs:
        files = [file for file in layout.layers if file.digest not in seen]
        seen.update(file.digest for file in files)
        absent = [f for f in files if not any(_adopt(f, staging, place) for place in places)]
        if absent:
            missing.append((parcel, absent))
    return missing


def _not_arrived(
    files: Sequence[FileDigest], staging: Staging, arrivals: Arrivals
) -> list[FileDigest]:
    """Adopt blobs that were hashed on arrival; return those that another process took meanwhile."""
    left = []
    for file in files:
        try:
            staging.adopt(file.digest, arrivals.path(file.digest))
        except FileNotFoundError:
            left.append(file)
    return left


def _adopt(file: FileDigest, staging: Staging, place: Callable[[Digest], Path]) -> bool:
    """Adopt a blob that is here already, if it is whole."""
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
    missing: Sequence[tuple[Parcel, list[FileDigest]]],
    downloads: Downloads,
    arrivals: Arrivals,
    progress: Progress,
) -> None:
    """Fetch from several repositories at once; the first failure ends the rest."""
    wanted = [
        Wanted(parcel.client, str(parcel.package), file)
        for parcel, files in missing
        for file in files
    ]
    try:
        downloads.fetch_all(wanted, arrivals, progress)
    except FileNotFoundError as error:  # another process cleaned up meanwhile
        what = missing[0][0].what
        raise RegistryError(f"{what}: {error.filename} vanished; try again") from error


def _read(part: tuple[Parcel, Layout, Staging]) -> Staged:
    parcel, layout, staging = part
    contents = read_blobs(layout, staging.blob, what=parcel.what)
    staged = Staged(contents, staging, parcel.registry, parcel.wanted, parcel.named)
    if parcel.release is not None:
        _check_claims(staged, parcel.release, parcel)
    return staged


def _check_claims(staged: Staged, release: Release, parcel: Parcel) -> None:
    """Demand that a package matches what its index says of it."""
    manifest = staged.contents.manifest
    pairs: Mapping[str, tuple[object, object]] = {
        "requires": (manifest.composition.requires, release.requires),
        "conflicts": (manifest.composition.conflicts, release.conflicts),
        "base": (manifest.base, release.base),
    }
    wrong = [field for field, (stated, claimed) in pairs.items() if stated != claimed]
    if wrong:
        raise DigestError(
            f"{parcel.what}: the index says something else of its {', '.join(wrong)} than the "
            f"package itself",
            hint="tell whoever runs the registry; nothing was installed",
        )


def _in_parallel(work: Callable[[T], R], items: Sequence[T], http: Http) -> list[R]:
    """Return the result of work on each, in order; raise the first failure, cancel the rest."""
    if len(items) == 1:
        return [work(items[0])]
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="fetch") as pool, http.ended_by_ctrl_c():
        jobs = [pool.submit(work, item) for item in items]
        try:
            return [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
