"""An installed expert as the package that it came in: read again, or written out again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from expertctl.digest import Digest, Progress, no_progress
from expertctl.errors import DigestError
from expertctl.package.layout import Blobs, Layout, layout_of
from expertctl.package.read import PackageContents, read_blobs
from expertctl.package.write import export_archive
from expertctl.store.ref import StoredExpert
from expertctl.store.store import Store


def read_stored(
    store: Store, expert: StoredExpert, *, progress: Progress = no_progress
) -> PackageContents:
    """Read every file of an expert as strictly as when it was installed.

    Raises:
        DigestError: when a file was changed in the store.
        StoreError: when one is missing.
    """
    with store.lease([expert]):
        return read_blobs(_layout(expert), _blobs(store), what=expert.ref, progress=progress)


def export_stored(
    store: Store, expert: StoredExpert, output: Path, *, progress: Progress = no_progress
) -> None:
    """Write an expert as an OCI archive.

    Raises:
        DigestError: when a file was changed in the store.
        StoreError: when one is missing.
    """
    with store.lease([expert]):
        export_archive(output, _layout(expert), _blobs(store), progress=progress)


def _layout(expert: StoredExpert) -> Layout:
    layout = layout_of(expert.files, expert.signature)
    if layout.package_digest != expert.package_digest:
        raise DigestError(f"{expert.ref}: its files do not make the package that was installed")
    return layout


def _blobs(store: Store) -> Blobs:
    @contextmanager
    def blob(digest: Digest) -> Iterator[BinaryIO]:
        with store.blob_path(digest).open("rb") as stream:
            yield stream

    return blob
