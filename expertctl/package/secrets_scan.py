"""A last look for secrets in what is about to be published."""

import re
from pathlib import Path

_PRIVATE_KEY = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----")
_LONGEST = 64
_CHUNK = 1 << 20


def holds_private_key(path: Path) -> bool:
    """Tell whether a file holds a private key in PEM, of whatever kind."""
    tail = b""
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            if _PRIVATE_KEY.search(tail + chunk):
                return True
            tail = chunk[-_LONGEST:]
    return False
