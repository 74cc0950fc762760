"""A last look at documents for what must not be published, or be taken from anybody."""

import re
from pathlib import Path

_PRIVATE_KEY = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----")
_TOKEN = re.compile(rb"(?<![A-Za-z0-9_-])xpt_[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])")
_LONGEST = 64
README = "README.md"
_CHUNK = 1 << 20


def secret_in_file(path: Path) -> str | None:
    """Return what secret a file of any size holds; see `secret_in`."""
    tail = b""
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            if found := secret_in(tail + chunk):
                return found
            tail = chunk[-_LONGEST:]
    return None


def document_problem(path: Path, *, name: str) -> str | None:
    """Return why a file of a package, its weights aside, is refused; None when it is not."""
    if secret := secret_in_file(path):
        return f"{name}: holds {secret}, which must never be published"
    if name == README:
        try:
            path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            return f"{name}: not UTF-8 at byte {error.start}"
    return None


def secret_in(data: bytes) -> str | None:
    """Return what secret bytes hold: a private key in PEM of any kind, a token of a registry."""
    if _PRIVATE_KEY.search(data):
        return "a private key"
    return "an access token" if _TOKEN.search(data) else None
