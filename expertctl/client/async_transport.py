"""Asking a server from an event loop: as `expertctl.client.transport`, with ``await``."""

from collections.abc import Awaitable, Callable
from itertools import count
from typing import TypeVar

import httpx2

from expertctl.client.result import (
    Experts,
    InferResult,
    Job,
    Models,
    MoeActivity,
    RouteResult,
    Started,
)
from expertctl.client.retries import Retries
from expertctl.client.server import (
    Body,
    Call,
    Server,
    decoded,
    encoded,
    is_answer,
    refused,
    translated,
)
from expertctl.errors import RateLimitError, UnreachableError

_Kind = TypeVar("_Kind", InferResult, RouteResult, Job, Experts, Models, MoeActivity, Started)
_Result = TypeVar("_Result")


class AsyncTransport:
    """The owner of the connections to one server, in one event loop."""

    def __init__(
        self,
        server: Server,
        *,
        retries: Retries,
        sleep: Callable[[float], Awaitable[object]],
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """Open nothing yet."""
        self.server = server
        self.sleep = sleep
        self._retries = retries
        self._client = httpx2.AsyncClient(**server.connecting, transport=transport)

    async def ask(self, call: Call, kind: type[_Kind]) -> _Kind:
        """Send a request and read its answer.

        Raises:
            ExpertError: when it is refused, or no answer comes.
        """
        body = await self._again(call, lambda: self._answer(call))
        return decoded(body, kind, what=call.what)

    async def open(self, call: Call) -> httpx2.Response:
        """Send a request and return its answer unread; the caller closes it.

        Raises:
            ExpertError: as `ask`.
        """
        return await self._again(call, lambda: self._send(call))

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def _again(self, call: Call, attempt: Callable[[], Awaitable[_Result]]) -> _Result:
        for number in count(1):
            try:
                return await attempt()
            except (RateLimitError, UnreachableError) as error:
                again = call.is_repeatable
                pause = self._retries.pause_after(number, error, repeatable=again)
                if pause is None:
                    raise
            await self.sleep(pause)
        raise AssertionError("counting has no end")

    async def _answer(self, call: Call) -> bytes:
        response = await self._send(call)
        return await self._read(call, response)

    async def _send(self, call: Call) -> httpx2.Response:
        request = self._client.build_request(call.method, call.path, **encoded(call))
        with translated(call.what, self.server):
            response = await self._client.send(request, stream=True)
        if is_answer(response):
            return response
        raise refused(call, response, await self._read(call, response))

    async def _read(self, call: Call, response: httpx2.Response) -> bytes:
        body = Body(call.what)
        try:
            with translated(call.what, self.server):
                async for chunk in response.aiter_bytes():
                    body.add(chunk)
        finally:
            await response.aclose()
        return bytes(body.data)
