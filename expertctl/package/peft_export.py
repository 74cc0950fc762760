"""A package as the directories that PEFT loads: the publisher's bytes under the names PEFT wants.

One adapter fills the directory; of several, each gets a sub-directory named by its place and kind.
The model card and licences go along. Every byte is hashed while it is copied.
"""

from io import BytesIO
from pathlib import Path

from expertctl.digest import FileDigest, Progress, no_progress
from expertctl.package.adapter_files import CONFIG_PATH, WEIGHTS_PATH
from expertctl.package.layout import Blobs, Layout, is_document
from expertctl.package.write import Output, copy_verified, filling
from expertctl.schema.manifest import MANIFEST_PATH, Manifest, parse_manifest


def export_peft(
    directory: Path, layout: Layout, blobs: Blobs, *, progress: Progress = no_progress
) -> list[str]:
    """Write the adapters of a package into a new or empty directory; return their places in it.

    Raises:
        UsageError: when the directory holds something.
        NotFoundError: when no directory is above it.
        InvalidPackageError: when its manifest cannot be read.
        DigestError: when a blob's bytes are not those of its digest.
    """
    source = _Source(layout, blobs, progress)
    manifest = parse_manifest(source.read(MANIFEST_PATH))
    places = _places(manifest)
    with filling(directory) as made:
        for entry, place in zip(manifest.adapters, places, strict=True):
            (made / place).mkdir(exist_ok=True)
            source.copy(entry.config, made / place / CONFIG_PATH)
            source.copy(entry.path, made / place / WEIGHTS_PATH)
        for file in layout.files:
            if is_document(file.path):
                source.copy(file.path, made / file.path)
    return places


def _places(manifest: Manifest) -> list[str]:
    if len(manifest.adapters) == 1:
        return ["."]
    return [f"{number}-{entry.kind}" for number, entry in enumerate(manifest.adapters, start=1)]


class _Source:
    """The files of one package by their paths."""

    def __init__(self, layout: Layout, blobs: Blobs, progress: Progress) -> None:
        self._files = {file.path: file for file in layout.files}
        self._blobs = blobs
        self._progress = progress

    def read(self, path: str) -> bytes:
        """Return a small file."""
        data = BytesIO()
        self._send(self._files[path], data)
        return data.getvalue()

    def copy(self, path: str, target: Path) -> None:
        """Write a file."""
        with target.open("xb") as output:
            self._send(self._files[path], output)
        target.chmod(0o644)

    def _send(self, file: FileDigest, output: Output) -> None:
        with self._blobs(file.digest) as stream:
            copy_verified(
                stream, output, size=file.size, digest=file.digest, progress=self._progress
            )
