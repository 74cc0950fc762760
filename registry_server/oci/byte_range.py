"""``Range`` of a download and ``Content-Range`` of an upload, read strictly (RFC 9110, OCI)."""

import re
from dataclasses import dataclass

from registry_server.oci.errors import OciCode, OciError

_SPEC = re.compile(r"(\d{1,18})-(\d{0,18})|-(\d{1,18})", re.ASCII)
_CHUNK = re.compile(r"(\d{1,18})-(\d{1,18})", re.ASCII)
_MAX_HEADER = 200


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``start`` up to ``stop``, which is not one of them."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of bytes."""
        return self.stop - self.start

    def content_range(self, size: int) -> str:
        """Return the header of a 206 answer."""
        return f"bytes {self.start}-{self.stop - 1}/{size}"


def read_range(header: str | None, *, size: int) -> ByteRange | None:
    """Return the part of a file that is asked for; None: all of it.

    Other units than bytes are no concern of ours, and several ranges at once are answered with the
    whole file, as RFC 9110 14.2 lets a server do: no request can ask for more than the file.

    Raises:
        OciError: RANGE_INVALID when nothing of it is in the file.
    """
    if header is None or not header.lower().startswith("bytes="):
        return None
    value = header[len("bytes=") :].strip(" ")
    if "," in value or len(value) > _MAX_HEADER:
        return None
    match = _SPEC.fullmatch(value)
    found = _bounds(match, size) if match else None
    if found is None or found.length <= 0:
        fact = f"{value[:60]!r} is no part of {size} bytes"
        raise OciError(OciCode.RANGE_INVALID, fact, headers={"Content-Range": f"bytes */{size}"})
    return found


def read_chunk(header: str) -> ByteRange:
    """Return what a chunk of an upload says that it is, ``start-end``.

    Raises:
        OciError: BLOB_UPLOAD_INVALID when it is malformed.
    """
    match = _CHUNK.fullmatch(header)
    found = ByteRange(int(match[1]), int(match[2]) + 1) if match else None
    if found is None or found.length <= 0:
        fact = f"Content-Range {header[:60]!r} is not of the form <start>-<end>"
        raise OciError(OciCode.BLOB_UPLOAD_INVALID, fact)
    return found


def _bounds(match: re.Match[str], size: int) -> ByteRange:
    first, last, suffix = match.groups()
    if suffix is not None:
        return ByteRange(max(0, size - int(suffix)), size)
    stop = min(int(last) + 1, size) if last else size
    return ByteRange(int(first), stop)
