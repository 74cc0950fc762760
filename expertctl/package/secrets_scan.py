"""A last look for secrets in what is about to be published."""

import re
from pathlib import Path

_PRIVATE_KEY = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----")
_TOKEN = re.compile(rb"(?<![A-Za-z0-9_-])xpt_[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])")
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


def secret_in(data: bytes) -> str | None:
    """Return what secret a small file holds: a private key, or a token of a registry."""
    if _PRIVATE_KEY.search(data):
        return "a private key"
    return "an access token" if _TOKEN.search(data) else None
