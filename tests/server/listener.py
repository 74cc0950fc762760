"""Somebody who reads an answer piece by piece and may go away, which a test client cannot."""

import asyncio
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from starlette.types import ASGIApp, Message


class Listener:
    """One request to an application: ``async with Listener(app, "/v1/infer", {...}) as listener``.

    It is at its end when the block is left: the client went away, unless all had come.
    """

    def __init__(
        self, app: ASGIApp, path: str, body: object, *, headers: Mapping[str, str] | None = None
    ) -> None:
        self._app, self._path = app, path
        self._content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._headers = {
            "host": "127.0.0.1:8000",
            "content-type": "application/json",
            "content-length": str(len(self._content)),
            **(headers or {}),
        }
        self._left, self._asked = asyncio.Event(), False
        self._messages = asyncio.Queue[Message]()
        self.may_read = asyncio.Event()
        """Cleared by a test that reads slowly."""
        self.may_read.set()

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()
        self.may_read.set()
        await self._task

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    async def done(self) -> None:
        """Wait until the application is done with the request."""
        await self._task

    async def head(self) -> tuple[int, dict[str, str]]:
        """Return status and headers, once they come."""
        message = await self._messages.get()
        assert message["type"] == "http.response.start"
        headers = {name.decode(): value.decode() for name, value in message["headers"]}
        return message["status"], headers

    async def piece(self) -> bytes:
        """Return the next piece of the body; empty at its end."""
        message = await self._messages.get()
        assert message["type"] == "http.response.body"
        return bytes(message.get("body", b""))

    async def _run(self) -> None:
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.encode(), v.encode()) for k, v in self._headers.items()],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._content, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.may_read.wait()
        self._messages.put_nowait(message)
