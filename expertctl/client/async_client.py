"""`AsyncExpertClient`: the API of a generation server, for an event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, Unpack

import httpx2

from expertctl.client.async_jobs import AsyncJobs
from expertctl.client.async_stream import AsyncInferStream
from expertctl.client.async_transport import AsyncTransport
from expertctl.client.client import TIMEOUT
from expertctl.client.options import InferOptions, MoeOptions, RouteOptions
from expertctl.client.result import (
    Expert,
    Experts,
    InferResult,
    Model,
    Models,
    MoeActivity,
    RouteResult,
)
from expertctl.client.retries import Retries
from expertctl.client.server import Call, body_of, changes_of, find_server


class AsyncExpertClient:
    """A client of one server, for one event loop; ``async with`` closes its connections.

    ::

        async with AsyncExpertClient("http://127.0.0.1:8000") as client:
            print((await client.infer("Sort these numbers: 41, 17, 23")).text)
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = TIMEOUT,
        retries: Retries | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Keep where to ask; nothing is sent yet.

        ``base_url`` is by default that of ``EXPERT_SERVER``, else of this machine; ``api_key`` that
        of ``EXPERT_API_KEY``, if any. ``transport`` is for proxies and certificates of one's own:
        ``httpx2.AsyncHTTPTransport(proxy=…, verify=…)``.

        Raises:
            UsageError: when the address or the key cannot be one.
        """
        server = find_server(base_url, api_key=api_key, timeout=timeout)
        self._transport = AsyncTransport(
            server, retries=retries or Retries(), transport=transport, sleep=sleep
        )
        self.jobs = AsyncJobs(self._transport)

    async def infer(self, prompt: str, **options: Unpack[InferOptions]) -> InferResult:
        """Answer a prompt.

        Raises:
            UsageError: when the request is wrong.
            RateLimitError: when the server has too much to do.
            UnreachableError: when no server answers.
            ExpertError: whatever else the server refuses it for.
        """
        return await self._transport.ask(
            Call("POST", "/v1/infer", body_of(prompt, options)), InferResult
        )

    def infer_stream(self, prompt: str, **options: Unpack[InferOptions]) -> AsyncInferStream:
        """Answer a prompt piece by piece; what goes wrong is raised where it is read."""
        call = Call("POST", "/v1/infer", body_of(prompt, options, stream=True))
        return AsyncInferStream(lambda: self._transport.open(call), self._transport.server)

    async def route(self, prompt: str, **options: Unpack[RouteOptions]) -> RouteResult:
        """Say which experts would answer a prompt, and why; nothing is loaded.

        Raises:
            ExpertError: as `infer`.
        """
        return await self._transport.ask(
            Call("POST", "/v1/route", body_of(prompt, options)), RouteResult
        )

    async def experts(self) -> tuple[Expert, ...]:
        """List the experts that are installed.

        Raises:
            ExpertError: when no answer comes.
        """
        return (await self._transport.ask(Call("GET", "/v1/experts"), Experts)).experts

    async def models(self) -> tuple[Model, ...]:
        """List what the ``model`` of the OpenAI and Anthropic calls can be.

        Raises:
            ExpertError: when no answer comes.
        """
        return (await self._transport.ask(Call("GET", "/v1/models"), Models)).data

    async def moe(self) -> MoeActivity:
        """Tell what was counted of the routed experts of the base; nothing changes by it.

        Raises:
            ExpertError: when no answer comes.
        """
        return await self._transport.ask(Call("GET", "/moe"), MoeActivity)

    async def change_moe(self, **options: Unpack[MoeOptions]) -> MoeActivity:
        """Count routed experts otherwise, or let a profile say which stay; tell what holds then.

        Raises:
            UsageError: when that would change nothing, or cannot be.
            IncompatibleError: when the base has none that could be missing, or does not fit.
            NotFoundError: when nothing was learnt of the base.
            ExpertError: when no answer comes.
        """
        return await self._transport.ask(Call("POST", "/moe", changes_of(options)), MoeActivity)

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        """Begin; connections are opened when they are needed."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close every connection."""
        await self.close()
