"""``backup.json``: what one backup consists of. Written last, it is what makes it a backup.

::

    TARGET/backup.json
    TARGET/state/<sha256>                the database, the settings and the index key
    TARGET/blobs/<algorithm>/ab/<hex>    the blobs that the database knows
"""

import json
from dataclasses import dataclass
from pathlib import Path

from expertctl.digest import Digest
from expertctl.durable import write_atomic
from expertctl.errors import ExpertError, InvalidPackageError, NotFoundError
from expertctl.regular_file import open_regular
from expertctl.schema.strict_json import JsonObject, load_object

DOCUMENT_NAME = "backup.json"
STATE = "state"
BLOBS = "blobs"
STATE_FILES = ("registry.db", "registry.toml", "keys/index.pem")
"""Paths in the data folder; a link or another name has no place in a backup."""

FORMAT = 1
_MAX_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class BackupDocument:
    """One backup; ``state`` maps `STATE_FILES` to digests."""

    created: str
    state: dict[str, Digest]
    blobs: int
    bytes: int

    def write(self, target: Path) -> None:
        """Make the files that lie in ``target`` this backup, at once."""
        document = {
            "format": FORMAT,
            "created": self.created,
            "state": {name: str(digest) for name, digest in self.state.items()},
            "blobs": self.blobs,
            "bytes": self.bytes,
        }
        text = json.dumps(document, indent=2) + "\n"
        write_atomic(target / DOCUMENT_NAME, text.encode("utf-8"), mode=0o600)

    @classmethod
    def read(cls, target: Path) -> "BackupDocument":
        """Read the document of a backup.

        Raises:
            NotFoundError: when there is no finished backup.
            InvalidPackageError: when the document is damaged, or of a newer version.
        """
        path = target / DOCUMENT_NAME
        if not path.exists():
            hint = "name the folder that `expertctl registry backup` wrote"
            raise NotFoundError(f"{target}: there is no finished backup here", hint=hint)
        with open_regular(path) as stream:
            data = stream.read(_MAX_BYTES + 1)
        return cls._of(load_object(data, what=str(path), max_bytes=_MAX_BYTES), path)

    @classmethod
    def _of(cls, document: JsonObject, path: Path) -> "BackupDocument":
        state, created = document.get("state"), document.get("created")
        counts = [document.get("blobs"), document.get("bytes")]
        known = document.get("format") == FORMAT and isinstance(created, str)
        if not known or not isinstance(state, dict) or set(state) != set(STATE_FILES):
            raise InvalidPackageError(str(path), ["not a backup that this version can read"])
        blobs, size = (c if isinstance(c, int) else -1 for c in counts)
        try:
            digests = {name: Digest.parse(str(state[name])) for name in STATE_FILES}
        except ExpertError as error:
            raise InvalidPackageError(str(path), [error.message]) from error
        return cls(str(created), digests, blobs, size)
