"""``/v2/<name>/blobs/uploads/``: uploads of blobs, at once or in chunks, and mounts.

Bodies are received with bounded memory: while a thread writes and hashes one piece, the next one
arrives. A body that is longer or shorter than its headers say is discarded.

A mount links a blob of another repository without sending it again. Without the right to read the
source, the response does not depend on whether the blob exists.
"""

import asyncio
from collections.abc import AsyncIterator

from anyio import CancelScope, to_thread
from sqlalchemy import Connection
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from registry_server.access import namespaces, rights
from registry_server.access.rights import (
    Action,
    Identity,
    RepositoryName,
    authorise_repository,
    can_read,
    current_identity,
    parse_digest,
    read_repository_name,
)
from registry_server.errors import OciCode, OciError
from registry_server.oci import blobs
from registry_server.oci.blobs import parse_content_range
from registry_server.oci.uploads import OpenUpload, Uploads, UploadState
from registry_server.registry import DIGEST_LENGTHS, BlobDigest, Registry

MAX_MOUNT_SOURCES = 64
"""Maximum repositories that are tried if the request names none."""


def mount_blob(
    registry: Registry,
    identity: Identity,
    name: RepositoryName,
    digest: BlobDigest,
    source: str | None,
) -> bool:
    """Link a blob of ``source``, or of any readable repository; return whether it was found.

    Raises:
        ExpertError: when the user may not push to ``name``, or the quota is exceeded.
    """
    with registry.database.write() as connection:
        target = authorise_repository(connection, identity, Action.PUSH, name)
        size = _find_readable_size(connection, identity, digest, source)
        if size is None:
            return False
        namespace = target.namespace
        if not blobs.is_used_in_namespace(connection, namespace.id, digest):
            namespaces.require_quota(connection, namespace, size, registry.settings.limits)
        repository = rights.get_or_create_repository(
            connection, name=str(name), namespace_id=namespace.id
        )
        blobs.link_blob(connection, repository.id, digest)
        return True


def _find_readable_size(
    connection: Connection, identity: Identity, digest: BlobDigest, source: str | None
) -> int | None:
    names = (
        blobs.list_repositories_with(connection, digest, limit=MAX_MOUNT_SOURCES)
        if source is None
        else [source]
    )
    for text in names:
        name = _parse_name(text)
        if name and can_read(connection, identity, name):
            return blobs.find_linked_size(connection, str(name), digest)
    return None


def _parse_name(text: str) -> RepositoryName | None:
    try:
        return RepositoryName.parse(text)
    except OciError:
        return None


CHUNK_BYTES = 1 << 20
SMALL_BLOB_BYTES = 1 << 20
"""A blob up to this size, sent in one request, is checked against the quota when complete."""


def read_content_length(request: Request) -> int | None:
    """Return the ``Content-Length`` of a request; None if it has none.

    Raises:
        OciError: SIZE_INVALID when it is not a number.
    """
    text = request.headers.get("content-length")
    if text is None:
        return None if "transfer-encoding" in request.headers else 0
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise OciError(OciCode.SIZE_INVALID, "Content-Length is not a number of bytes")
    return int(text)


def check_next_chunk(upload: OpenUpload, request: Request) -> int | None:
    """Check the headers of a chunk; return its length, None if they do not state it.

    Raises:
        OciError: RANGE_INVALID when it is not the next chunk, BLOB_UPLOAD_INVALID when its headers
            disagree.
    """
    length = read_content_length(request)
    header = request.headers.get("content-range")
    if header is None:
        return length
    chunk = parse_content_range(header)
    if chunk.start != upload.file.offset:
        fact = f"the upload goes on at byte {upload.file.offset}, not at {chunk.start}"
        raise OciError(OciCode.RANGE_INVALID, fact)
    if length is not None and length != chunk.length:
        raise OciError(OciCode.BLOB_UPLOAD_INVALID, "Content-Range and Content-Length disagree")
    return chunk.length


async def receive_body(
    uploads: Uploads, upload: OpenUpload, request: Request, *, unreserved: int = 0
) -> None:
    """Append the body of a request to an upload.

    Bytes received before a connection broke are kept, so the client can resume after them. A body
    of up to ``unreserved`` bytes reserves no quota, because `finish` checks the quota anyway.

    Raises:
        OciError: when the body differs from its headers.
        ExpertError: when the quota or the disk has no space for it.
    """
    expected = check_next_chunk(upload, request)
    if expected is not None:
        uploads.check_blob_size(upload.start_offset + expected)
        if expected > unreserved:
            await to_thread.run_sync(uploads.reserve, upload, upload.start_offset + expected)
    try:
        await _write_chunks(uploads, upload, request.stream(), expected, unreserved)
    except ClientDisconnect as error:
        raise OciError(OciCode.BLOB_UPLOAD_INVALID, "the connection broke") from error
    if expected not in {None, upload.file.offset - upload.start_offset}:
        await to_thread.run_sync(upload.file.truncate, upload.start_offset)
        raise OciError(OciCode.SIZE_INVALID, "the body has another length than its headers say")


async def _write_chunks(
    uploads: Uploads,
    upload: OpenUpload,
    body: AsyncIterator[bytes],
    expected: int | None,
    unreserved: int,
) -> None:
    loop = asyncio.get_running_loop()
    writing: asyncio.Future[None] | None = None
    coming = upload.start_offset
    try:
        async for piece in _gather_chunks(body):
            coming += len(piece)
            if writing is not None:
                await writing
            if expected is None:
                uploads.check_blob_size(coming)
                if coming > max(upload.reserved, upload.start_offset + unreserved):
                    await to_thread.run_sync(uploads.reserve_ahead, upload, coming)
            elif coming > upload.start_offset + expected:
                break
            writing = loop.run_in_executor(None, upload.file.append, piece)
    finally:
        if writing is not None:
            await writing
    if expected is not None and coming > upload.start_offset + expected:
        await to_thread.run_sync(upload.file.truncate, upload.start_offset)
        raise OciError(OciCode.SIZE_INVALID, "the body is longer than its headers say")


async def _gather_chunks(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Combine chunks into pieces that are large enough for a thread."""
    gathered: list[bytes] = []
    size = 0
    try:
        async for data in body:
            gathered.append(data)
            size += len(data)
            if size >= CHUNK_BYTES:
                piece, gathered, size = b"".join(gathered), [], 0
                yield piece
    except ClientDisconnect:
        if size:
            yield b"".join(gathered)
        raise
    if size:
        yield b"".join(gathered)


_UPLOADS = "/v2/{name:path}/blobs/uploads"


def make_upload_routes(registry: Registry) -> list[BaseRoute]:
    """Return the routes of uploads."""
    requests = _UploadEndpoints(registry)
    return [
        Route(f"{_UPLOADS}/", requests.start, methods=["POST"]),
        Route(_UPLOADS, requests.start, methods=["POST"]),
        Route(f"{_UPLOADS}/{{id}}", requests.state, methods=["GET"]),
        Route(f"{_UPLOADS}/{{id}}", requests.append, methods=["PATCH"]),
        Route(f"{_UPLOADS}/{{id}}", requests.finish, methods=["PUT"]),
        Route(f"{_UPLOADS}/{{id}}", requests.cancel, methods=["DELETE"]),
    ]


class _UploadEndpoints:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._uploads = Uploads(registry)

    async def start(self, request: Request) -> Response:
        """Handle POST: mount a blob, receive a whole one, or start an upload."""
        name, identity = read_repository_name(request), current_identity(request)
        query = request.query_params
        if "mount" in query:
            digest = parse_digest(query["mount"])
            source = query.get("from")
            if await to_thread.run_sync(mount_blob, self._registry, identity, name, digest, source):
                return created_response(name, digest)
        if "digest" in query and "mount" not in query:
            return await self._upload_monolithic(
                request, identity, name, parse_digest(query["digest"])
            )
        algorithm = _check_algorithm(query.get("digest-algorithm", "sha256"))
        upload = await to_thread.run_sync(self._uploads.start, identity, name, algorithm)
        await to_thread.run_sync(self._uploads.pause, upload)
        return _accepted_response(upload.state)

    async def state(self, request: Request) -> Response:
        """Handle GET: return the state of an upload."""
        name, identity = read_repository_name(request), current_identity(request)
        found = await to_thread.run_sync(
            self._uploads.state, identity, name, _read_upload_id(request)
        )
        return Response(status_code=204, headers=_upload_headers(found))

    async def append(self, request: Request) -> Response:
        """Handle PATCH: append the next bytes."""
        upload = await self._open(request)
        try:
            await _receive_chunk(self._uploads, upload, request, unreserved=0)
        finally:
            await self._pause(upload)
        return _accepted_response(upload.state)

    async def finish(self, request: Request) -> Response:
        """Handle PUT: append the last bytes, if any, and complete the upload."""
        digest = parse_digest(request.query_params.get("digest", ""))
        upload = await self._open(request)
        return await self._finish(request, upload, digest)

    async def cancel(self, request: Request) -> Response:
        """Handle DELETE: cancel an upload."""
        upload = await self._open(request)
        await to_thread.run_sync(self._uploads.remove, upload)
        return Response(status_code=204)

    async def _upload_monolithic(
        self, request: Request, identity: Identity, name: RepositoryName, digest: BlobDigest
    ) -> Response:
        length = read_content_length(request)
        small = length is not None and length <= SMALL_BLOB_BYTES
        begin = self._uploads.start_draft if small else self._uploads.start
        upload = await to_thread.run_sync(begin, identity, name, digest.algorithm)
        return await self._finish(request, upload, digest)

    async def _finish(self, request: Request, upload: OpenUpload, digest: BlobDigest) -> Response:
        try:
            await _receive_chunk(self._uploads, upload, request, unreserved=SMALL_BLOB_BYTES)
            await to_thread.run_sync(
                self._uploads.finish, current_identity(request), upload, digest
            )
        finally:
            await self._pause(upload)
        return created_response(upload.name, digest)

    async def _open(self, request: Request) -> OpenUpload:
        name, identity = read_repository_name(request), current_identity(request)
        return await to_thread.run_sync(
            self._uploads.open, identity, name, _read_upload_id(request)
        )

    async def _pause(self, upload: OpenUpload) -> None:
        with CancelScope(shield=True):
            await to_thread.run_sync(self._uploads.pause, upload)


def created_response(name: RepositoryName, digest: BlobDigest) -> Response:
    """Return the response for a blob that exists now."""
    location = f"/v2/{name}/blobs/{digest}"
    headers = {"Location": location, "Docker-Content-Digest": str(digest)}
    return Response(status_code=201, headers=headers)


async def _receive_chunk(
    uploads: Uploads, upload: OpenUpload, request: Request, *, unreserved: int
) -> None:
    """Receive a body; a chunk out of order is answered with the state of the upload."""
    try:
        await receive_body(uploads, upload, request, unreserved=unreserved)
    except OciError as error:
        if error.oci_code is OciCode.RANGE_INVALID:
            error.headers.update(_upload_headers(upload.state))
        raise


def _read_upload_id(request: Request) -> str:
    text: str = request.path_params["id"]
    if len(text) != 32 or not set(text) <= set("0123456789abcdef"):
        raise OciError(OciCode.BLOB_UPLOAD_UNKNOWN, "there is no such upload")
    return text


def _check_algorithm(text: str) -> str:
    if text not in DIGEST_LENGTHS:
        known = " and ".join(DIGEST_LENGTHS)
        raise OciError(OciCode.DIGEST_INVALID, f"digests here are {known}, not {text[:40]!r}")
    return text


def _accepted_response(state: UploadState) -> Response:
    return Response(status_code=202, headers=_upload_headers(state))


def _upload_headers(state: UploadState) -> dict[str, str]:
    """Return the headers of an upload; ``0-0`` also means no bytes, as in other registries."""
    return {
        "Location": f"/v2/{state.name}/blobs/uploads/{state.id}",
        "Range": f"0-{max(0, state.offset - 1)}",
        "Docker-Upload-UUID": state.id,
        "Cache-Control": "no-store",
    }
