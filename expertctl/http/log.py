"""The log of both HTTP servers on stderr, and its middleware.

On a terminal, lines are for people; elsewhere each is a JSON object. ``EXPERT_LOG_FORMAT`` decides
otherwise: ``text`` or ``json``.

Nothing that a client sends can begin a new line, colour a terminal, or leak a secret: text is
ASCII with escapes, bounded, and tokens are removed. Queries and headers are not logged at all.

`RequestLogMiddleware` gives each request an id, a log line and counters. It is the outermost layer,
so it also answers unexpected errors: with 500 and no detail; the traceback is logged with the id.
"""

import json
import logging
import logging.config
import os
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertctl.errors import hide_secrets, replace_unsafe

MAX_TEXT = 500


class JsonFormatter(logging.Formatter):
    """Formats a record and its ``fields`` as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of one record."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": redact(record.getMessage()),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line |= {k: redact(v) if isinstance(v, str) else v for k, v in fields.items()}
        if record.exc_info:
            line["traceback"] = hide_secrets(self.formatException(record.exc_info))
        return json.dumps(line, default=str).replace("\x7f", "\\u007f")


_FIELDS_FOR_PEOPLE = {
    "request": ("ms", "caller", "user"),
    "job": (
        *("experts_used", "input_tokens", "output_tokens", "tokens_per_second"),
        *("total_latency_ms", "finish_reasons", "error"),
    ),
}
"""Message of a record → its fields that matter to a person at a terminal."""


class TextFormatter(logging.Formatter):
    """Formats a record and its ``fields`` as a line for people, with local time."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of one record, and below it the traceback, if any."""
        fields: dict[str, object] = dict(getattr(record, "fields", None) or {})
        text = record.getMessage()
        if text == "request":
            text = "{method} {path} {status}".format_map(fields)
        wanted = _FIELDS_FOR_PEOPLE.get(record.getMessage(), fields)
        fields = {name: fields[name] for name in wanted if name in fields}
        shown = (f"{k}={_format_field(v)}" for k, v in fields.items() if v not in (None, "", []))
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        at = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        line = ascii(redact(" ".join([f"{level}{text}", *shown])))[1:-1]
        if record.exc_info:
            line += "\n" + replace_unsafe(hide_secrets(self.formatException(record.exc_info)))
        return f"{at} {line}"


def _format_field(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if value < 1000 else f"{value:.0f}"
    if isinstance(value, list | tuple):
        return ",".join(map(_format_field, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


def redact(text: str) -> str:
    """Return a text with tokens masked, truncated to `MAX_TEXT` characters."""
    shown = hide_secrets(text)
    return shown if len(shown) <= MAX_TEXT else f"{shown[:MAX_TEXT]}…"


def build_log_config(*names: str) -> dict[str, Any]:
    """Return the settings that send these loggers, and warnings of granian, to stderr."""
    is_text = os.environ.get("EXPERT_LOG_FORMAT", "text" if sys.stderr.isatty() else "") == "text"
    formatter = TextFormatter if is_text else JsonFormatter
    levels = {**dict.fromkeys(names, "INFO"), "_granian": "WARNING"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter}},
        "handlers": {
            "stderr": {
                "class": "logging.StreamHandler",
                "formatter": "line",
                "stream": "ext://sys.stderr",
            }
        },
        "loggers": {
            name: {"handlers": ["stderr"], "level": level, "propagate": False}
            for name, level in levels.items()
        },
    }


def configure_log(config: dict[str, Any]) -> None:
    """Apply log settings to this process."""
    logging.config.dictConfig(config)


@dataclass(slots=True)
class RequestRecord:
    """One request and what was counted of it so far."""

    id: str
    started_at: float
    received: int = 0
    sent: int = 0
    status: int = 0
    promised: int = 0
    """The response's ``Content-Length``, counted for a file that is sent by its path."""

    @property
    def seconds(self) -> float:
        """Seconds since it started."""
        return time.perf_counter() - self.started_at

    def fields(self, scope: Scope) -> dict[str, object]:
        """Return what is logged of any request: no query, no header, no body."""
        return {
            "id": self.id,
            "method": scope["method"],
            "path": scope["path"],
            "route": get_route_path(scope),
            "status": self.status,
            "received": self.received,
            "sent": self.sent,
            "ms": round(self.seconds * 1000, 2),
        }


class RequestObserver(Protocol):
    """Counts and logs the requests of one server, and answers unexpected errors."""

    log: logging.Logger
    id_headers: tuple[str, ...]
    """The response headers that carry the request id."""

    def new_id(self) -> str:
        """Return the id of a request."""

    def request_started(self) -> None:
        """Count a request that starts."""

    def request_finished(self, scope: Scope, exchange: RequestRecord) -> None:
        """Count and log a request that ended."""

    def build_error_response(self, scope: Scope, exchange: RequestRecord) -> Response:
        """Return the response to an unexpected error."""


class RequestLogMiddleware:
    """ASGI middleware that observes requests and changes nothing but the response's id headers."""

    def __init__(self, app: ASGIApp, observer: RequestObserver) -> None:
        """Observe ``app``."""
        self.app = app
        self.observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = RequestRecord(id=self.observer.new_id(), started_at=time.perf_counter())
        scope["state"] = {**scope.get("state", {}), "request_id": exchange.id}
        self.observer.request_started()
        try:
            await self._run(scope, receive, send, exchange)
        finally:
            self.observer.request_finished(scope, exchange)

    async def _run(
        self, scope: Scope, receive: Receive, send: Send, exchange: RequestRecord
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
        except Exception:  # last resort: log it and answer with 500
            self.observer.log.exception("unexpected", extra={"fields": {"id": exchange.id}})
            if exchange.status:
                raise
            response = self.observer.build_error_response(scope, exchange)
            await response(scope, counted_receive, counted_send)

    def _count(self, message: Message, exchange: RequestRecord) -> None:
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            headers = MutableHeaders(raw=list(message.get("headers", [])))
            exchange.promised = int(headers.get("content-length", "0"))
            for name in self.observer.id_headers:
                headers[name] = exchange.id
            message["headers"] = headers.raw
        elif message["type"] == "http.response.pathsend":
            exchange.sent += exchange.promised
        else:
            exchange.sent += len(message.get("body", b""))


def get_route_path(scope: Scope) -> str:
    """Return the path pattern of the route that answered, one of a small set."""
    route = scope.get("route")
    return str(getattr(route, "path", "")) if isinstance(route, BaseRoute) else "none"
