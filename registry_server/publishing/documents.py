"""The files of a package that people read: what must not be published to everybody.

`expertctl build` and `publish` look for the same, but any OCI client can push. Files of every size
are read whole, in pieces: a large one is not kept in memory by whoever reads the package.
"""

import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path

from expertctl.digest import CHUNK, FileDigest
from expertctl.errors import InvalidPackageError
from expertctl.package.layout import WEIGHT_TYPE, media_type
from expertctl.package.secrets_scan import secret_in_file
from registry_server.storage.blobs import BlobStorage, disk_errors

README = "README.md"


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
            for problem in _problems(file.path, storage.path(file.digest))
        ]
    if problems:
        hint = "take it out, count a secret that was sent as lost, and build the package again"
        raise InvalidPackageError(f"{what}: must not be published", problems, hint=hint)


def _problems(name: str, path: Path) -> Iterator[str]:
    if secret := secret_in_file(path):
        yield f"{name}: holds {secret}"
    if name == README and not _is_utf8(path):
        yield f"{name}: is not UTF-8; save it as UTF-8"


def _is_utf8(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as stream:
        try:
            while chunk := stream.read(CHUNK):
                decoder.decode(chunk)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True
