"""A last look for secrets in what is about to be published."""

import re
from pathlib import Path
from typing import BinaryIO

_PRIVATE_KEY = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----")
_TOKEN = re.compile(rb"(?<![A-Za-z0-9_-])xpt_[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])")
_LONGEST = 64
_CHUNK = 1 << 20


def secret_in_file(path: Path) -> str | None:
    """Return what secret a file of any size holds; see `secret_in`."""
    with path.open("rb") as stream:
        return secret_in_stream(stream)


def secret_in_stream(stream: BinaryIO) -> str | None:
    """Return what secret a stream of any length holds; see `secret_in`."""
    tail = b""
    while chunk := stream.read(_CHUNK):
        if found := secret_in(tail + chunk):
            return found
        tail = chunk[-_LONGEST:]
    return None


def secret_in(data: bytes) -> str | None:
    """Return what secret bytes hold: a private key in PEM of any kind, a token of a registry."""
    if _PRIVATE_KEY.search(data):
        return "a private key"
    return "an access token" if _TOKEN.search(data) else None
