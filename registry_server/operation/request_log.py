"""Around every request: an id, one line in the log, and the counters.

It is the outermost layer, so it also answers what nothing inside expected: with 500 and no detail,
the traceback goes to the log under the same id.
"""

import secrets
import time
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertctl.errors import ExpertError
from registry_server.access.identity import ANONYMOUS, Identity
from registry_server.errors import error_response
from registry_server.operation.log import REQUESTS
from registry_server.registry import Registry
from registry_server.web.pages import error_page, wants_page


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


class RequestLog:
    """ASGI middleware that watches and never changes a request."""

    def __init__(self, app: ASGIApp, registry: Registry) -> None:
        """Watch ``app``."""
        self.app = app
        self.registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {})
        exchange = Exchange(id=secrets.token_hex(8), began=time.perf_counter())
        self.registry.metrics.running.inc()
        try:
            await self._watched(scope, receive, send, exchange)
        finally:
            self.registry.metrics.running.dec()
            self._note(scope, exchange)

    async def _watched(
        self, scope: Scope, receive: Receive, send: Send, exchange: Exchange
    ) -> None:
        async def counted_receive() -> Message:
            message = await receive()
            exchange.received += len(message.get("body") or b"")
            return message

        async def counted_send(message: Message) -> None:
            _count(message, exchange)
            await send(message)

        try:
            await self.app(scope, counted_receive, counted_send)
        except Exception:  # the last resort of the server: whatever it is, it is told and answered
            REQUESTS.exception("unexpected", extra={"fields": {"id": exchange.id}})
            if exchange.status:
                raise
            await self._apologise(scope, counted_receive, counted_send, exchange)

    async def _apologise(
        self, scope: Scope, receive: Receive, send: Send, exchange: Exchange
    ) -> None:
        hint = f"tell whoever runs this registry the request {exchange.id}"
        error = ExpertError("the registry failed to answer this", hint=hint)
        if wants_page(scope):
            response = error_page(self.registry, ANONYMOUS, error)
        else:
            response = error_response(error, scope, self.registry.settings)
        await response(scope, receive, send)

    def _note(self, scope: Scope, exchange: Exchange) -> None:
        seconds = time.perf_counter() - exchange.began
        identity = scope["state"].get("identity")
        method, route = scope["method"], _template(scope)
        self.registry.metrics.answered(
            method=method,
            route=route,
            status=exchange.status,
            seconds=seconds,
            received=exchange.received,
            sent=exchange.sent,
        )
        fields = {
            "id": exchange.id,
            "method": method,
            "path": scope["path"],
            "route": route,
            "status": exchange.status,
            "received": exchange.received,
            "sent": exchange.sent,
            "ms": round(seconds * 1000, 2),
            "user": identity.name if isinstance(identity, Identity) else None,
            "address": _address(scope, identity),
        }
        REQUESTS.info("request", extra={"fields": fields})


def _count(message: Message, exchange: Exchange) -> None:
    if message["type"] == "http.response.start":
        exchange.status = message["status"]
        headers = MutableHeaders(raw=list(message.get("headers", [])))
        exchange.promised = int(headers.get("content-length", "0"))
        headers["X-Request-Id"] = exchange.id
        message["headers"] = headers.raw
    elif message["type"] == "http.response.pathsend":
        exchange.sent += exchange.promised
    else:
        exchange.sent += len(message.get("body", b""))


def _template(scope: Scope) -> str:
    """Return the path of the route that answered, which is one of a few."""
    route = scope.get("route")
    return str(getattr(route, "path", "")) if isinstance(route, BaseRoute) else "none"


def _address(scope: Scope, identity: object) -> str | None:
    if isinstance(identity, Identity) and identity.address:
        return identity.address
    client = scope.get("client")
    return str(client[0]) if client else None
