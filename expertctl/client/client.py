"""`ExpertClient`: the API of a generation server, for threads."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, Unpack

import httpx2

from expertctl.client.jobs import Jobs
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
from expertctl.client.stream import InferStream
from expertctl.client.transport import Transport

TIMEOUT = 600.0
"""Seconds that a server may be silent."""


class ExpertClient:
    """A client of one server, for any number of threads; ``with`` closes its connections.

    ::

        with ExpertClient("http://127.0.0.1:8000") as client:
            print(client.infer("Sort these numbers: 41, 17, 23").text)
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = TIMEOUT,
        retries: Retries | None = None,
        transport: httpx2.BaseTransport | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Keep where to ask; nothing is sent yet.

        ``base_url`` is by default that of ``EXPERT_SERVER``, else of this machine; ``api_key`` that
        of ``EXPERT_API_KEY``, if any. ``transport`` is for proxies and certificates of one's own:
        ``httpx2.HTTPTransport(proxy=…, verify=…)``.

        Raises:
            UsageError: when the address or the key cannot be one.
        """
        server = find_server(base_url, api_key=api_key, timeout=timeout)
        self._transport = Transport(
            server, retries=retries or Retries(), transport=transport, sleep=sleep
        )
        self.jobs = Jobs(self._transport)

    def infer(self, prompt: str, **options: Unpack[InferOptions]) -> InferResult:
        """Answer a prompt.

        Raises:
            UsageError: when the request is wrong.
            RateLimitError: when the server has too much to do.
            UnreachableError: when no server answers.
            ExpertError: whatever else the server refuses it for.
        """
        return self._transport.ask(Call("POST", "/v1/infer", body_of(prompt, options)), InferResult)

    def infer_stream(self, prompt: str, **options: Unpack[InferOptions]) -> InferStream:
        """Answer a prompt piece by piece; what goes wrong is raised where it is read."""
        call = Call("POST", "/v1/infer", body_of(prompt, options, stream=True))
        return InferStream(lambda: self._transport.open(call), self._transport.server)

    def route(self, prompt: str, **options: Unpack[RouteOptions]) -> RouteResult:
        """Say which experts would answer a prompt, and why; nothing is loaded.

        Raises:
            ExpertError: as `infer`.
        """
        return self._transport.ask(Call("POST", "/v1/route", body_of(prompt, options)), RouteResult)

    def experts(self) -> tuple[Expert, ...]:
        """List the experts that are installed.

        Raises:
            ExpertError: when no answer comes.
        """
        return self._transport.ask(Call("GET", "/v1/experts"), Experts).experts

    def models(self) -> tuple[Model, ...]:
        """List what the ``model`` of the OpenAI and Anthropic calls can be.

        Raises:
            ExpertError: when no answer comes.
        """
        return self._transport.ask(Call("GET", "/v1/models"), Models).data

    def moe(self) -> MoeActivity:
        """Tell what was counted of the routed experts of the base; nothing changes by it.

        Raises:
            ExpertError: when no answer comes.
        """
        return self._transport.ask(Call("GET", "/moe"), MoeActivity)

    def change_moe(self, **options: Unpack[MoeOptions]) -> MoeActivity:
        """Count routed experts otherwise, or let a profile say which stay; tell what holds then.

        Raises:
            UsageError: when that would change nothing, or cannot be.
            IncompatibleError: when the base has none that could be missing, or does not fit.
            NotFoundError: when nothing was learnt of the base.
            ExpertError: when no answer comes.
        """
        return self._transport.ask(Call("POST", "/moe", changes_of(options)), MoeActivity)

    def close(self) -> None:
        """Close every connection."""
        self._transport.close()

    def __enter__(self) -> Self:
        """Begin; connections are opened when they are needed."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close every connection."""
        self.close()
