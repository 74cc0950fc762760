"""A blob as an answer: by its path where the server can send files, so no byte passes Python.

granian sends a whole file by its path (``http.response.pathsend``), without a copy in this process.
Parts of files, and servers without that, get pieces of a megabyte that a thread reads.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

from anyio import to_thread
from starlette.types import Receive, Scope, Send

from registry_server.oci.byte_range import ByteRange

PIECE = 1 << 20


class BlobResponse:
    """One file, or a part of it."""

    def __init__(
        self, path: Path, *, size: int, part: ByteRange | None, headers: dict[str, str]
    ) -> None:
        """Keep what to send; the file is opened when the answer begins."""
        self._path = path
        self._part = part or ByteRange(0, size)
        self._status = 200 if part is None else 206
        own = {"content-length": str(self._part.length)}
        if part is not None:
            own["content-range"] = part.content_range(size)
        self._headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in {**headers, **own}.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        start = {"type": "http.response.start", "status": self._status, "headers": self._headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body", "body": b""})
        elif self._status == 200 and "http.response.pathsend" in scope.get("extensions", {}):
            await send(start)
            await send({"type": "http.response.pathsend", "path": str(self._path)})
        else:
            await self._send_pieces(start, receive, send)

    async def _send_pieces(self, start: dict[str, object], receive: Receive, send: Send) -> None:
        handle = await to_thread.run_sync(os.open, self._path, os.O_RDONLY)
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await send(start)
            async for piece in self._pieces(handle):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                if gone.done():
                    return  # the client is gone: no end of the answer is needed
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            os.close(handle)

    async def _pieces(self, handle: int) -> AsyncIterator[bytes]:
        position = self._part.start
        while position < self._part.stop:
            length = min(PIECE, self._part.stop - position)
            piece = await to_thread.run_sync(os.pread, handle, length, position)
            if not piece:
                raise OSError(f"{self._path.name} is shorter than it was")
            yield piece
            position += len(piece)


async def _disconnected(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
