"""Answers that come piece by piece, read in an event loop: as `expertctl.client.stream`."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from types import TracebackType
from typing import Self

import httpx2

from expertctl.client.result import InferResult, Started
from expertctl.client.server import MAX_ANSWER, Server, translated
from expertctl.client.stream import WHAT, Chunk, Story


class AsyncInferStream:
    """An answer as it is written: read its chunks by ``async for``, then its ``result``.

    Leaving early, by ``aclose`` or the end of an ``async with`` block, ends the work of the server,
    too.
    """

    def __init__(
        self, open_response: Callable[[], Awaitable[httpx2.Response]], server: Server
    ) -> None:
        """Send nothing before the first chunk is wanted."""
        self._story = Story()
        self._chunks = self._read(open_response, server)

    @property
    def started(self) -> Started | None:
        """The job and its plan, once the first chunk is here."""
        return self._story.started

    @property
    def result(self) -> InferResult:
        """The whole answer.

        Raises:
            NoAnswerError: when the stream was not read to its end.
        """
        return self._story.demand_result()

    def __aiter__(self) -> Self:
        """Read on from here."""
        return self

    async def __anext__(self) -> Chunk:
        """Wait for more text.

        Raises:
            ExpertError: when it is refused, or fails on the way.
        """
        return await anext(self._chunks)

    async def __aenter__(self) -> Self:
        """Begin; nothing is sent yet."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave, wherever it is."""
        await self.aclose()

    async def aclose(self) -> None:
        """End it where it is."""
        await self._chunks.aclose()

    async def _read(
        self, open_response: Callable[[], Awaitable[httpx2.Response]], server: Server
    ) -> AsyncGenerator[Chunk, None]:
        response = await open_response()
        try:
            with translated(WHAT, server):
                async for event in httpx2.EventSource(response, max_event_size=MAX_ANSWER):
                    if chunk := self._story.take(event):
                        yield chunk
            self._story.end()
        finally:
            await response.aclose()
