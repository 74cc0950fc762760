"""A last look at documents for what must not be published, or be taken from anybody."""

import codecs
import re
from pathlib import Path
from typing import BinaryIO

_PRIVATE_KEY = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----")
_TOKEN = re.compile(rb"(?<![A-Za-z0-9_-])xpt_[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])")
_LONGEST = 64
README = "README.md"
_CHUNK = 1 << 20


def secret_in_file(path: Path) -> str | None:
    """Return what secret a file of any size holds; see `secret_in`."""
    with path.open("rb") as stream:
        return secret_in_stream(stream)


def document_problem(stream: BinaryIO, *, name: str) -> str | None:
    """Return why a file of a package other than weights is refused, or None.

    The stream is read from its position to its end. Secrets are those of `secret_in`.
    """
    if secret := secret_in_stream(stream):
        return f"{name}: holds {secret}, which must never be published"
    stream.seek(0)
    if name == README and (at := _first_invalid_byte(stream)) is not None:
        return f"{name}: not UTF-8 at byte {at}"
    return None


def secret_in_stream(stream: BinaryIO) -> str | None:
    """Return what secret a stream of any length holds; see `secret_in`."""
    tail = b""
    while chunk := stream.read(_CHUNK):
        if found := secret_in(tail + chunk):
            return found
        tail = chunk[-_LONGEST:]
    return None


def _first_invalid_byte(stream: BinaryIO) -> int | None:
    """Return where a stream of any length stops being UTF-8, or None."""
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        chunk = stream.read(_CHUNK)
        kept = len(decoder.getstate()[0])
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            return read - kept + error.start
        if not chunk:
            return None
        read += len(chunk)


def secret_in(data: bytes) -> str | None:
    """Return what secret bytes hold: a private key in PEM of any kind, a token of a registry."""
    if _PRIVATE_KEY.search(data):
        return "a private key"
    return "an access token" if _TOKEN.search(data) else None
