"""Receiving the body of a request into an upload, with bounded memory.

While a thread writes and hashes one piece, the next comes in. Announced lengths are not believed: a
body that turns out longer or shorter is no chunk, and is forgotten again.
"""

import asyncio
from collections.abc import AsyncIterator

from anyio import to_thread
from starlette.requests import ClientDisconnect, Request

from registry_server.oci.byte_range import read_chunk
from registry_server.oci.errors import OciCode, OciError
from registry_server.oci.uploads import OpenUpload, Uploads

PIECE = 1 << 20
SMALL = 1 << 20
"""A blob up to this size that comes in one request takes its room when it is whole."""


def declared_length(request: Request) -> int | None:
    """Return the length that a request gives for its body; None when it gives none.

    Raises:
        OciError: SIZE_INVALID when it is no number.
    """
    text = request.headers.get("content-length")
    if text is None:
        return None if "transfer-encoding" in request.headers else 0
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise OciError(OciCode.SIZE_INVALID, "Content-Length is not a number of bytes")
    return int(text)


def demand_next(upload: OpenUpload, request: Request) -> int | None:
    """Return how long the body must be, from its headers; None when they do not say.

    Raises:
        OciError: RANGE_INVALID when it is not what comes next, BLOB_UPLOAD_INVALID when its
            headers disagree.
    """
    length = declared_length(request)
    header = request.headers.get("content-range")
    if header is None:
        return length
    chunk = read_chunk(header)
    if chunk.start != upload.file.offset:
        fact = f"the upload goes on at byte {upload.file.offset}, not at {chunk.start}"
        raise OciError(OciCode.RANGE_INVALID, fact)
    if length is not None and length != chunk.length:
        raise OciError(OciCode.BLOB_UPLOAD_INVALID, "Content-Range and Content-Length disagree")
    return chunk.length


async def receive(
    uploads: Uploads, upload: OpenUpload, request: Request, *, unreserved: int = 0
) -> None:
    """Append the body of a request to an upload.

    Bytes that came before a connection broke stay: the client goes on behind them. A body up to
    ``unreserved`` bytes takes no room beforehand, since `finish` looks at the quota anyway.

    Raises:
        OciError: when the body is not what its headers say.
        ExpertError: when there is no room for it.
    """
    expected = demand_next(upload, request)
    if expected is not None:
        uploads.demand_size(upload.begun + expected)
        if expected > unreserved:
            await to_thread.run_sync(uploads.reserve, upload, upload.begun + expected)
    try:
        await _receive(uploads, upload, request.stream(), expected, unreserved)
    except ClientDisconnect as error:
        raise OciError(OciCode.BLOB_UPLOAD_INVALID, "the connection broke") from error
    if expected not in {None, upload.file.offset - upload.begun}:
        await to_thread.run_sync(upload.file.truncate, upload.begun)
        raise OciError(OciCode.SIZE_INVALID, "the body has another length than its headers say")


async def _receive(
    uploads: Uploads,
    upload: OpenUpload,
    body: AsyncIterator[bytes],
    expected: int | None,
    unreserved: int,
) -> None:
    loop = asyncio.get_running_loop()
    writing: asyncio.Future[None] | None = None
    coming = upload.begun
    try:
        async for piece in _pieces(body):
            coming += len(piece)
            if writing is not None:
                await writing
            if expected is None:
                uploads.demand_size(coming)
                if coming > max(upload.reserved, upload.begun + unreserved):
                    await to_thread.run_sync(uploads.reserve_ahead, upload, coming)
            elif coming > upload.begun + expected:
                break
            writing = loop.run_in_executor(None, upload.file.append, piece)
    finally:
        if writing is not None:
            await writing
    if expected is not None and coming > upload.begun + expected:
        await to_thread.run_sync(upload.file.truncate, upload.begun)
        raise OciError(OciCode.SIZE_INVALID, "the body is longer than its headers say")


async def _pieces(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Gather what comes into pieces that are worth handing to a thread."""
    gathered: list[bytes] = []
    size = 0
    try:
        async for data in body:
            gathered.append(data)
            size += len(data)
            if size >= PIECE:
                piece, gathered, size = b"".join(gathered), [], 0
                yield piece
    except ClientDisconnect:
        if size:
            yield b"".join(gathered)
        raise
    if size:
        yield b"".join(gathered)
