"""The files of a package that people read: what must not be published to everybody.

`expertctl build` and `publish` look for the same, but any OCI client can push. Files of every size
are read whole, in pieces: a large one is not kept in memory by whoever reads the package.
"""

from collections.abc import Iterable
from pathlib import Path

from expertctl.digest import FileDigest
from expertctl.errors import InvalidPackageError
from expertctl.package.layout import WEIGHT_TYPE, media_type
from expertctl.package.secrets_scan import document_problem
from registry_server.storage.blobs import BlobStorage, disk_errors


def demand_publishable(storage: BlobStorage, files: Iterable[FileDigest], *, what: str) -> None:
    """Demand that no file but weights holds a secret, and that the README is UTF-8.

    Raises:
        InvalidPackageError: with every problem.
        StoreError: when the disk fails.
    """
    with disk_errors():
        problems = [
            problem
            for file in files
            if media_type(file.path) != WEIGHT_TYPE
            and (problem := _problem(file.path, storage.path(file.digest)))
        ]
    if problems:
        hint = "take it out, count a secret that was sent as lost, and build the package again"
        raise InvalidPackageError(f"{what}: must not be published", problems, hint=hint)


def _problem(name: str, path: Path) -> str | None:
    with path.open("rb") as stream:
        return document_problem(stream, name=name)
