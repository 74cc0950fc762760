"""Around every request: an id, one line in the log, and the counters.

It is the outermost layer, so it also answers unexpected errors: with 500 and no detail; the
traceback goes to the log under the same id.
"""

import logging
import time
from dataclasses import dataclass
from typing import Protocol

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(slots=True)
class Exchange:
    """One request, as far as it has come."""

    id: str
    began: float
    received: int = 0
    sent: int = 0
    status: int = 0
    promised: int = 0
    """The ``Content-Length`` of the answer, which is what a file sent by its path counts as."""

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.perf_counter() - self.began

    def fields(self, scope: Scope) -> dict[str, object]:
        """Return what is logged of any request: no query, no header, no body."""
        return {
            "id": self.id,
            "method": scope["method"],
            "path": scope["path"],
            "route": route_of(scope),
            "status": self.status,
            "received": self.received,
            "sent": self.sent,
            "ms": round(self.seconds * 1000, 2),
        }


class Watch(Protocol):
    """What a server wants to know of its requests, and says of them."""

    log: logging.Logger
    id_headers: tuple[str, ...]
    """In which headers an answer has its id."""

    def new_id(self) -> str:
        """Return the id of a request."""

    def begun(self) -> None:
        """Count a request that is being answered."""

    def ended(self, scope: Scope, exchange: Exchange) -> None:
        """Count and log a request that was answered."""

    def apology(self, scope: Scope, exchange: Exchange) -> Response:
        """Return the answer to an unexpected error."""


class RequestLog:
    """ASGI middleware that watches and never changes a request."""

    def __init__(self, app: ASGIApp, watch: Watch) -> None:
        """Watch ``app``."""
        self.app = app
        self.watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = Exchange(id=self.watch.new_id(), began=time.perf_counter())
        scope["state"] = {**scope.get("state", {}), "request_id": exchange.id}
        self.watch.begun()
        try:
            await self._watched(scope, receive, send, exchange)
        finally:
            self.watch.ended(scope, exchange)

    async def _watched(
        self, scope: Scope, receive: Receive, send: Send, exchange: Exchange
    ) -> None:
        async def counted_receive() -> Message:
            message = await receive()
            exchange.received += len(message.get("body") or b"")
            return message

        async def counted_send(message: Message) -> None:
            self._count(message, exchange)
            await send(message)

        try:
            await self.app(scope, counted_receive, counted_send)
        except Exception:  # the last resort of the server: whatever it is, it is told and answered
            self.watch.log.exception("unexpected", extra={"fields": {"id": exchange.id}})
            if exchange.status:
                raise
            response = self.watch.apology(scope, exchange)
            await response(scope, counted_receive, counted_send)

    def _count(self, message: Message, exchange: Exchange) -> None:
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            headers = MutableHeaders(raw=list(message.get("headers", [])))
            exchange.promised = int(headers.get("content-length", "0"))
            for name in self.watch.id_headers:
                headers[name] = exchange.id
            message["headers"] = headers.raw
        elif message["type"] == "http.response.pathsend":
            exchange.sent += exchange.promised
        else:
            exchange.sent += len(message.get("body", b""))


def route_of(scope: Scope) -> str:
    """Return the path of the route that answered, which is one of a few."""
    route = scope.get("route")
    return str(getattr(route, "path", "")) if isinstance(route, BaseRoute) else "none"
