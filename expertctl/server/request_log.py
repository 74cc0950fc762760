"""What the generation server counts and logs of its requests, and its answer to a bug."""

import logging

from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from expertctl.errors import ExpertError
from expertctl.http.request_log import Exchange, RequestLog, route_of
from expertctl.server.caller import Caller
from expertctl.server.error_bodies import error_response
from expertctl.server.metrics import Metrics
from expertctl.server.request_id import new_request_id

REQUESTS = logging.getLogger("expertctl.server.requests")


def request_log(app: ASGIApp, metrics: Metrics) -> RequestLog:
    """Wrap the application in the log of its requests."""
    return RequestLog(app, ServerWatch(metrics))


class ServerWatch:
    """Counts in the metrics of the server; no text of a prompt or an answer is logged."""

    log = REQUESTS
    id_headers: tuple[str, ...] = ("X-Request-Id", "request-id")
    """OpenAI's clients read the first, Anthropic's the second."""

    def __init__(self, metrics: Metrics) -> None:
        """Count in ``metrics``."""
        self._metrics = metrics

    def new_id(self) -> str:
        """Return the id of a request."""
        return new_request_id()

    def begun(self) -> None:
        """Count a request that is being answered."""
        self._metrics.running.inc()

    def ended(self, scope: Scope, exchange: Exchange) -> None:
        """Count and log a request that was answered."""
        self._metrics.running.dec()
        self._metrics.requested(
            method=scope["method"],
            route=route_of(scope),
            status=exchange.status,
            seconds=exchange.seconds,
        )
        caller, client = scope["state"].get("caller"), scope.get("client")
        fields = exchange.fields(scope) | {
            "caller": caller.id if isinstance(caller, Caller) else None,
            "address": str(client[0]) if client else None,
        }
        REQUESTS.info("request", extra={"fields": fields})

    def apology(self, scope: Scope, exchange: Exchange) -> Response:
        """Return the answer to a request that failed unexpectedly."""
        hint = f"tell whoever runs this server the request {exchange.id}"
        return error_response(ExpertError("the server failed to answer this", hint=hint), scope)
