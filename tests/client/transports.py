"""Transports for clients: the real server in process, or answers that a test writes down."""

import json
from typing import Any

import httpx2

from expertctl.client import AsyncExpertClient, ExpertClient, Retries
from tests.server.harness import URL, ServerHarness

ScriptedAnswer = httpx2.Response | Exception
NO_JITTER = Retries(chance=lambda: 1.0)
"""Pauses that are as long as they can be."""


def make_client(served: ServerHarness, **options: Any) -> ExpertClient:
    """A client of a server in process."""
    return ExpertClient(URL, transport=served.client()._transport, **options)


def make_async_client(served: ServerHarness, **options: Any) -> AsyncExpertClient:
    """An asynchronous client of a server in process."""
    return AsyncExpertClient(URL, transport=httpx2.ASGITransport(app=served.app), **options)


class ScriptedTransport(httpx2.BaseTransport, httpx2.AsyncBaseTransport):
    """Gives the answers that were written down, one after the other, and keeps what was asked."""

    def __init__(self, *answers: ScriptedAnswer) -> None:
        self._answers = list(answers)
        self.asked: list[httpx2.Request] = []
        self.pauses: list[float] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return self.handle_request(request)

    def make_client(self, url: str = URL, **options: Any) -> ExpertClient:
        """A client that gets these answers and does not sleep between them."""
        retries = options.pop("retries", NO_JITTER)
        return ExpertClient(
            url, transport=self, retries=retries, sleep=self.pauses.append, **options
        )

    def make_async_client(self, **options: Any) -> AsyncExpertClient:
        """The same, asynchronous."""

        async def sleep(seconds: float) -> None:
            self.pauses.append(seconds)

        return AsyncExpertClient(URL, transport=self, retries=NO_JITTER, sleep=sleep, **options)


def make_experts_response(*, base: str = "tiny") -> httpx2.Response:
    """An answer to a question that may be asked twice."""
    return httpx2.Response(200, json={"base": base, "experts": []})


def make_error_response(
    status: int, code: str, message: str = "no", **headers: str
) -> httpx2.Response:
    """What the server says to a request that it does not answer."""
    body = {"error": {"code": code, "message": message, "hint": "go on"}}
    return httpx2.Response(status, headers=headers, content=json.dumps(body).encode())
