"""What the user calls the keys of ``trust.json``: for display only, nothing is decided here.

`expertctl.trust` reads that file strictly, with a cryptography library that `list` must not need.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Signers:
    """Names by key id, and the ids of revoked keys."""

    names: dict[str, str]
    revoked: frozenset[str]

    def shown(self, key_id: str | None) -> str:
        """Return what to call a signer: a name, the start of an id, or a dash."""
        if key_id is None:
            return "-"
        return self.names.get(key_id, key_id.removeprefix("sha256:")[:12])


def read_signers(path: Path) -> Signers:
    """Read the names; a file that is missing or damaged names nobody (`doctor` reports it)."""
    try:
        document: Any = json.loads(path.read_bytes())
        names = {str(key["key_id"]): str(key["name"]) for key in document["keys"]}
        revoked = frozenset(str(entry["key_id"]) for entry in document["revoked"])
    except (OSError, ValueError, KeyError, TypeError):
        return Signers({}, frozenset())
    return Signers(names, revoked)
