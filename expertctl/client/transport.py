"""Asking a server from a thread: one request at a time, again where that may help."""

from collections.abc import Callable
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


class Transport:
    """The owner of the connections to one server; any thread may ask."""

    def __init__(
        self,
        server: Server,
        *,
        retries: Retries,
        sleep: Callable[[float], object],
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        """Open nothing yet."""
        self.server = server
        self.sleep = sleep
        self._retries = retries
        self._client = httpx2.Client(**server.connecting, transport=transport)

    def ask(self, call: Call, kind: type[_Kind]) -> _Kind:
        """Send a request and read its answer.

        Raises:
            ExpertError: when it is refused, or no answer comes.
        """
        body = self._again(call, lambda: self._answer(call))
        return decoded(body, kind, what=call.what)

    def open(self, call: Call) -> httpx2.Response:
        """Send a request and return its answer unread; the caller closes it.

        Raises:
            ExpertError: as `ask`.
        """
        return self._again(call, lambda: self._send(call))

    def close(self) -> None:
        """Close every connection."""
        self._client.close()

    def _again(self, call: Call, attempt: Callable[[], _Result]) -> _Result:
        for number in count(1):
            try:
                return attempt()
            except (RateLimitError, UnreachableError) as error:
                again = call.is_repeatable
                pause = self._retries.pause_after(number, error, repeatable=again)
                if pause is None:
                    raise
            self.sleep(pause)
        raise AssertionError("counting has no end")

    def _answer(self, call: Call) -> bytes:
        response = self._send(call)
        return self._read(call, response)

    def _send(self, call: Call) -> httpx2.Response:
        request = self._client.build_request(call.method, call.path, **encoded(call))
        with translated(call.what, self.server):
            response = self._client.send(request, stream=True)
        if is_answer(response):
            return response
        raise refused(call, response, self._read(call, response))

    def _read(self, call: Call, response: httpx2.Response) -> bytes:
        body = Body(call.what)
        try:
            with translated(call.what, self.server):
                for chunk in response.iter_bytes():
                    body.add(chunk)
        finally:
            response.close()
        return bytes(body.data)
