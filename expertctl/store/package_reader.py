"""Reading packages from the store or from a file: their layouts and their bytes."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from expertctl.digest import Progress, ignore_progress
from expertctl.errors import DigestError
from expertctl.package.layout import Blobs, PackageLayout, build_layout
from expertctl.package.read import PackageContents, is_file_name, read_blobs
from expertctl.package.write import spool_package
from expertctl.reference import parse_target
from expertctl.store.refs import StoredExpert
from expertctl.store.store import Store


@dataclass(frozen=True, slots=True)
class OpenPackage:
    """A package whose bytes can be read; the reader has to hash them."""

    ref: str
    layout: PackageLayout
    blobs: Blobs
    signer: str | None = None
    """The key whose signature was verified, when the package is installed."""


def read_stored_expert(
    store: Store, expert: StoredExpert, *, progress: Progress = ignore_progress
) -> PackageContents:
    """Read every file of an expert with the same checks as an install.

    Raises:
        DigestError: when a file was changed in the store.
        StoreError: when one is missing.
    """
    with store.lease_experts([expert]):
        return read_blobs(
            make_stored_layout(expert), open_stored_blobs(store), what=expert.ref, progress=progress
        )


@contextmanager
def open_package(
    target: str,
    store: Store,
    *,
    unpack_folder: Path | None = None,
    progress: Progress = ignore_progress,
) -> Iterator[OpenPackage]:
    """Open a ``.expert`` file, unpacked beside ``unpack_folder`` meanwhile, or an installed expert.

    Raises:
        NotFoundError: when there is no such file or expert.
        InvalidPackageError: when the file is malformed.
        DigestError: when its bytes are not those of their digest.
    """
    if is_file_name(target):
        place = unpack_folder or Path(tempfile.gettempdir()) / "package"
        with spool_package(Path(target), target=place, progress=progress) as (contents, spool):
            yield OpenPackage(contents.manifest.ref, contents.layout, spool.blob)
        return
    expert = store.find(parse_target(target))
    with store.lease_experts([expert]):
        yield OpenPackage(
            expert.ref, make_stored_layout(expert), open_stored_blobs(store), expert.signer
        )


@contextmanager
def open_experts(
    store: Store, experts: Sequence[StoredExpert]
) -> Iterator[tuple[list[PackageLayout], Blobs]]:
    """Open several installed experts at once; raises as `open_package`."""
    with store.lease_experts(experts):
        yield [make_stored_layout(expert) for expert in experts], open_stored_blobs(store)


def make_stored_layout(expert: StoredExpert) -> PackageLayout:
    """Return the layout of an installed expert.

    Raises:
        DigestError: when its recorded files do not make its package digest.

    Raises:
        DigestError: when it does not.
    """
    layout = build_layout(expert.files, expert.signature)
    if layout.package_digest != expert.package_digest:
        raise DigestError(f"{expert.ref}: its files do not make the package that was installed")
    return layout


def open_stored_blobs(store: Store) -> Blobs:
    """Return a function that opens the files of a store."""
    return lambda digest: store.blob_path(digest).open("rb")
