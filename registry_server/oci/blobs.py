"""``/v2/<name>/blobs/<digest>``: downloads of blobs, or parts of them, and their removal.

A blob can be read only through repositories to which it was uploaded or mounted. ``Range`` of
downloads and ``Content-Range`` of uploads are parsed strictly (RFC 9110, OCI).

granian sends whole files by their path (``http.response.pathsend``), without a copy in this
process. Parts of files, and responses of other servers, are read by a thread in pieces of a
megabyte.
"""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from anyio import to_thread
from sqlalchemy import Connection, delete, select
from sqlalchemy.dialects.sqlite import insert
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from expertctl.errors import StoreError
from expertctl.http.limits import wait_for_disconnect
from registry_server.access import rights
from registry_server.access.rights import (
    Action,
    RepositoryAccess,
    authorise_repository,
    current_identity,
    parse_digest,
    read_repository_name,
)
from registry_server.database.tables import BLOBS, REPOSITORIES, REPOSITORY_BLOBS
from registry_server.errors import OciCode, OciError
from registry_server.registry import BlobDigest, Registry

_RANGE_SPEC = re.compile(r"(\d{1,18})-(\d{0,18})|-(\d{1,18})", re.ASCII)
_CHUNK_RANGE = re.compile(r"(\d{1,18})-(\d{1,18})", re.ASCII)
_MAX_RANGE_HEADER = 200


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes from ``start`` up to, but not including, ``stop``."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of bytes."""
        return self.stop - self.start

    def content_range(self, size: int) -> str:
        """Return the ``Content-Range`` header of a 206 response."""
        return f"bytes {self.start}-{self.stop - 1}/{size}"


def parse_range(header: str | None, *, size: int) -> ByteRange | None:
    """Return the requested part of a file; None means all of it.

    Other units than bytes are ignored. Several ranges are answered with the whole file, as RFC 9110
    section 14.2 permits, so no request can cause more bytes than the file has.

    Raises:
        OciError: RANGE_INVALID when the range is outside the file.
    """
    if header is None or not header.lower().startswith("bytes="):
        return None
    value = header[len("bytes=") :].strip(" ")
    if "," in value or len(value) > _MAX_RANGE_HEADER:
        return None
    match = _RANGE_SPEC.fullmatch(value)
    found = _resolve_bounds(match, size) if match else None
    if found is None or found.length <= 0:
        fact = f"{value[:60]!r} is outside the {size} bytes of the blob"
        raise OciError(OciCode.RANGE_INVALID, fact, headers={"Content-Range": f"bytes */{size}"})
    return found


def parse_content_range(header: str) -> ByteRange:
    """Parse the ``Content-Range`` of an upload chunk, ``start-end``.

    Raises:
        OciError: BLOB_UPLOAD_INVALID when it is malformed.
    """
    match = _CHUNK_RANGE.fullmatch(header)
    found = ByteRange(int(match[1]), int(match[2]) + 1) if match else None
    if found is None or found.length <= 0:
        fact = f"Content-Range {header[:60]!r} is not of the form <start>-<end>"
        raise OciError(OciCode.BLOB_UPLOAD_INVALID, fact)
    return found


def _resolve_bounds(match: re.Match[str], size: int) -> ByteRange:
    first, last, suffix = match.groups()
    if suffix is not None:
        return ByteRange(max(0, size - int(suffix)), size)
    stop = min(int(last) + 1, size) if last else size
    return ByteRange(int(first), stop)


CHUNK_BYTES = 1 << 20


class BlobResponse:
    """Sends a file, or a part of it."""

    def __init__(
        self, path: Path, *, size: int, part: ByteRange | None, headers: dict[str, str]
    ) -> None:
        """Store what to send; the file is opened when the response starts."""
        self._path = path
        self._range = part or ByteRange(0, size)
        self._status = 200 if part is None else 206
        own = {"content-length": str(self._range.length)}
        if part is not None:
            own["content-range"] = part.content_range(size)
        self._headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in {**headers, **own}.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        start = {"type": "http.response.start", "status": self._status, "headers": self._headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body", "body": b""})
        elif self._status == 200 and "http.response.pathsend" in scope.get("extensions", {}):
            await send(start)
            await send({"type": "http.response.pathsend", "path": str(self._path)})
        else:
            await self._send_chunks(start, receive, send)

    async def _send_chunks(self, start: dict[str, object], receive: Receive, send: Send) -> None:
        handle = await to_thread.run_sync(os.open, self._path, os.O_RDONLY)
        gone = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await send(start)
            async for piece in self._read_chunks(handle):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                if gone.done():
                    return  # the client disconnected
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            os.close(handle)

    async def _read_chunks(self, handle: int) -> AsyncIterator[bytes]:
        position = self._range.start
        while position < self._range.stop:
            length = min(CHUNK_BYTES, self._range.stop - position)
            piece = await to_thread.run_sync(os.pread, handle, length, position)
            if not piece:
                raise OSError(f"{self._path.name} is shorter than it was")
            yield piece
            position += len(piece)


def find_linked_size(connection: Connection, repository: str, digest: BlobDigest) -> int | None:
    """Return the size of a blob of a repository; None if it is not linked there."""
    query = (
        select(BLOBS.c.size)
        .join(REPOSITORY_BLOBS, REPOSITORY_BLOBS.c.digest == BLOBS.c.digest)
        .join(REPOSITORIES, REPOSITORIES.c.id == REPOSITORY_BLOBS.c.repository_id)
        .where(REPOSITORIES.c.name == repository, BLOBS.c.digest == str(digest))
    )
    size: int | None = connection.execute(query).scalar()
    return size


def list_repositories_with(connection: Connection, digest: BlobDigest, *, limit: int) -> list[str]:
    """Return the names of the repositories that link a blob, sorted."""
    query = (
        select(REPOSITORIES.c.name)
        .join(REPOSITORY_BLOBS, REPOSITORY_BLOBS.c.repository_id == REPOSITORIES.c.id)
        .where(REPOSITORY_BLOBS.c.digest == str(digest))
        .order_by(REPOSITORIES.c.name)
        .limit(limit)
    )
    return list(connection.execute(query).scalars())


def is_used_in_namespace(connection: Connection, namespace_id: int, digest: BlobDigest) -> bool:
    """Return whether a repository of the namespace links a blob, so that the quota has it."""
    query = (
        select(REPOSITORY_BLOBS.c.digest)
        .join(REPOSITORIES, REPOSITORIES.c.id == REPOSITORY_BLOBS.c.repository_id)
        .where(
            REPOSITORIES.c.namespace_id == namespace_id, REPOSITORY_BLOBS.c.digest == str(digest)
        )
        .limit(1)
    )
    return connection.execute(query).first() is not None


def insert_blob(connection: Connection, digest: BlobDigest, size: int) -> None:
    """Insert the row of a stored blob, unless it exists."""
    values = {"digest": str(digest), "size": size, "created": time.time()}
    connection.execute(insert(BLOBS).values(values).on_conflict_do_nothing())


def link_blob(connection: Connection, repository_id: int, digest: BlobDigest) -> None:
    """Link a blob to a repository; linking it again restarts its grace period."""
    values = {"repository_id": repository_id, "digest": str(digest), "added": time.time()}
    keys = [REPOSITORY_BLOBS.c.repository_id, REPOSITORY_BLOBS.c.digest]
    again = {"added": values["added"]}
    query = insert(REPOSITORY_BLOBS).values(values).on_conflict_do_update(keys, set_=again)
    connection.execute(query)


def unlink_blob(connection: Connection, repository_id: int, digest: BlobDigest) -> bool:
    """Remove a blob from a repository; return whether it was linked. GC removes the bytes."""
    own = (
        REPOSITORY_BLOBS.c.repository_id == repository_id,
        REPOSITORY_BLOBS.c.digest == str(digest),
    )
    return connection.execute(delete(REPOSITORY_BLOBS).where(*own)).rowcount > 0


_BLOB_HEADERS = {
    "Content-Type": "application/octet-stream",
    "Content-Disposition": "attachment",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
    "Accept-Ranges": "bytes",
}
"""Headers that keep browsers from showing a blob as a page."""


def make_blob_routes(registry: Registry) -> list[BaseRoute]:
    """Return the route of blobs."""
    requests = _BlobEndpoints(registry)
    return [
        Route("/v2/{name:path}/blobs/{digest}", requests.get, methods=["GET"]),
        Route("/v2/{name:path}/blobs/{digest}", requests.remove, methods=["DELETE"]),
    ]


def immutable_cache_control(target: RepositoryAccess) -> str:
    """Return the ``Cache-Control`` of immutable content."""
    shared = "public" if target.namespace.read == "public" else "private"
    return f"{shared}, max-age=31536000, immutable"


def matches_etag(headers: Mapping[str, str], etag: str) -> bool:
    """Return whether the client has these bytes already, by the headers of its request."""
    known = headers.get("if-none-match", "")
    return known == "*" or etag in {tag.strip().removeprefix("W/") for tag in known.split(",")}


class _BlobEndpoints:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def get(self, request: Request) -> Response | BlobResponse:
        """Handle GET or HEAD: two short reads, cheaper here than a thread switch."""
        name, digest = read_repository_name(request), parse_digest(request.path_params["digest"])
        with self._registry.database.read() as connection:
            target = authorise_repository(connection, current_identity(request), Action.READ, name)
            size = find_linked_size(connection, str(name), digest)
        if size is None:
            raise _blob_unknown(digest)
        etag = f'"{digest}"'
        headers = {
            "ETag": etag,
            "Cache-Control": immutable_cache_control(target),
            "Vary": "Authorization",
        }
        headers["Docker-Content-Digest"] = str(digest)
        if matches_etag(request.headers, etag):
            return Response(status_code=304, headers=headers)
        return self._blob_response(request, digest, size, headers)

    async def remove(self, request: Request) -> Response:
        """Handle DELETE: remove a blob from the repository; its bytes are collected later."""
        await to_thread.run_sync(self._remove, request)
        return Response(status_code=202)

    def _blob_response(
        self, request: Request, digest: BlobDigest, size: int, headers: dict[str, str]
    ) -> BlobResponse:
        if self._registry.storage.size(digest) != size:
            raise StoreError(f"blob {digest} is missing from the storage, or damaged")
        path = self._registry.storage.path(digest)
        return BlobResponse(
            path,
            size=size,
            part=_requested_range(request, size),
            headers={**_BLOB_HEADERS, **headers},
        )

    def _remove(self, request: Request) -> None:
        name, digest = read_repository_name(request), parse_digest(request.path_params["digest"])
        with self._registry.database.write() as connection:
            target = authorise_repository(
                connection, current_identity(request), Action.DELETE, name
            )
            target.require_plain_oci("removing blobs")
            repository = rights.find_repository(connection, str(name))
            if repository is None or not unlink_blob(connection, repository.id, digest):
                raise _blob_unknown(digest)
            rights.write_audit_row(
                connection, current_identity(request), "blob.remove", f"{name}@{digest}"
            )


def _requested_range(request: Request, size: int) -> ByteRange | None:
    condition = request.headers.get("if-range")
    etag = f'"{request.path_params["digest"]}"'
    if condition is not None and condition != etag:
        return None
    return parse_range(request.headers.get("range"), size=size)


def _blob_unknown(digest: BlobDigest) -> OciError:
    return OciError(OciCode.BLOB_UNKNOWN, f"blob {digest} is not in this repository")
