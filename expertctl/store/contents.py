"""Packages as the store or a file has them, opened for reading: their layout and their bytes."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from expertctl.digest import Digest, Progress, no_progress
from expertctl.errors import DigestError
from expertctl.package.layout import Blobs, Layout, layout_of
from expertctl.package.read import PackageContents, names_file, read_blobs
from expertctl.package.spool import spooling
from expertctl.store.ref import StoredExpert
from expertctl.store.store import Store, parse_wanted


@dataclass(frozen=True, slots=True)
class Opened:
    """A package whose bytes can be read; the reader has to hash them."""

    ref: str
    layout: Layout
    blobs: Blobs
    signer: str | None = None
    """The key whose signature was verified, when the package is installed."""


def read_stored(
    store: Store, expert: StoredExpert, *, progress: Progress = no_progress
) -> PackageContents:
    """Read every file of an expert as strictly as when it was installed.

    Raises:
        DigestError: when a file was changed in the store.
        StoreError: when one is missing.
    """
    with store.lease([expert]):
        return read_blobs(
            stored_layout(expert), stored_blobs(store), what=expert.ref, progress=progress
        )


@contextmanager
def opened(
    target: str, store: Store, *, beside: Path | None = None, progress: Progress = no_progress
) -> Iterator[Opened]:
    """Open a ``.expert`` file, unpacked for the while beside a place, or an installed expert.

    Raises:
        NotFoundError: when there is no such file or expert.
        InvalidPackageError: when the file is malformed.
        DigestError: when its bytes are not those of their digest.
    """
    if names_file(target):
        place = beside or Path(tempfile.gettempdir()) / "package"
        with spooling(Path(target), beside=place, progress=progress) as (contents, spool):
            yield Opened(contents.manifest.ref, contents.layout, spool.blob)
        return
    expert = store.find(parse_wanted(target))
    with store.lease([expert]):
        yield Opened(expert.ref, stored_layout(expert), stored_blobs(store), expert.signer)


@contextmanager
def opened_all(
    store: Store, experts: Sequence[StoredExpert]
) -> Iterator[tuple[list[Layout], Blobs]]:
    """Open several installed experts at once.

    Raises:
        NotFoundError: when one was removed meanwhile.
        DigestError: when a record in the store is not that of a package.
    """
    with store.lease(experts):
        yield [stored_layout(expert) for expert in experts], stored_blobs(store)


def stored_layout(expert: StoredExpert) -> Layout:
    """Return the layout of an installed expert, which its record must make.

    Raises:
        DigestError: when it does not.
    """
    layout = layout_of(expert.files, expert.signature)
    if layout.package_digest != expert.package_digest:
        raise DigestError(f"{expert.ref}: its files do not make the package that was installed")
    return layout


def stored_blobs(store: Store) -> Blobs:
    """Return a function that opens the files of a store."""

    @contextmanager
    def blob(digest: Digest) -> Iterator[BinaryIO]:
        with store.blob_path(digest).open("rb") as stream:
            yield stream

    return blob
