"""The span of a request, from its first byte to the last of its answer.

It follows the semantic conventions for HTTP servers. The caller's ``traceparent`` is its parent if
well-formed; a ``tracestate`` is ignored. The span contains no query, header or body. All times of a
trace are those of one steady clock, set by the wall clock when the request began.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertctl.errors import ExpertError
from expertctl.http.request_log import route_of
from expertctl.server.caller import Caller
from expertctl.server.request_id import request_id_of
from expertctl.server.tracing.tracing import Tracing

MAX_PARENT = 256
"""Most characters of a ``traceparent``; the known version has 55, later ones may have more."""
MAX_PATH = 256
UNROUTED = "none"
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"}
_PARENTS = TraceContextTextMapPropagator()
_CURRENT: ContextVar["RequestSpan | None"] = ContextVar("request_span", default=None)
"""The request whose span is the parent of jobs that this task or thread submits now."""


class RequestSpan:
    """A span that has begun, and the clock of its trace."""

    def __init__(self, tracer: Tracer, scope: Scope, *, server: str) -> None:
        """Begin now."""
        self._tracer, self._scope = tracer, scope
        self._began = time.perf_counter()
        self._offset = time.time_ns() - _nanoseconds(self._began)
        self._is_received, self._status = False, 0
        self._span = tracer.start_span(
            _name(scope),
            context=_parent(Headers(scope=scope)),
            kind=SpanKind.SERVER,
            attributes=_attributes(scope, server),
            start_time=self._at(self._began),
        )

    @property
    def is_recording(self) -> bool:
        """Whether the span is sampled."""
        return self._span.get_span_context().trace_flags.sampled

    def receive(self, tick: float) -> None:
        """Record that the request was read and became a job; of several jobs the first counts."""
        if not self._is_received:
            self._is_received = True
            self.part("reception", began=self._began, ended=tick)

    def part(
        self,
        name: str,
        *,
        began: float,
        ended: float,
        within: Span | None = None,
        attributes: dict[str, AttributeValue] | None = None,
        failed: bool = False,
    ) -> Span:
        """Add an ended span below this one or ``within`` another; times are of `perf_counter`."""
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(within or self._span, Context()),
            attributes=attributes,
            start_time=self._at(began),
        )
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._at(ended))
        return span

    def note(self, message: Message) -> None:
        """Take the status from a message of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]

    def broke(self) -> None:
        """Record that a fault of the server broke off the answer, whatever its status."""
        self._scope.setdefault("state", {}).setdefault("error_code", ExpertError.code)

    def end(self) -> None:
        """End the span, with what is known of the request now."""
        span, scope = self._span, self._scope
        span.update_name(_name(scope))
        span.set_attributes(_ending(scope, self._status))
        error = scope.get("state", {}).get("error_code")
        if error is not None or self._status >= 500:
            span.set_attribute("error.type", str(error or self._status))
        if self._status >= 500 or (error is not None and self._status < 400):
            span.set_status(Status(StatusCode.ERROR))  # by the conventions, 4xx is no failure here
        span.end(self._at(time.perf_counter()))

    def _at(self, tick: float) -> int:
        return self._offset + _nanoseconds(tick)


class TracedRequests:
    """ASGI middleware, the outermost, that gives each request its span."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        """Trace the requests of ``app``."""
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with _traced(RequestSpan(self._tracing.tracer, scope, server=self._tracing.server)) as span:

            async def noted_send(message: Message) -> None:
                span.note(message)
                await send(message)

            await self._app(scope, receive, noted_send)


def current_request() -> RequestSpan | None:
    """Return the span of the current request; None if it is not recorded."""
    current = _CURRENT.get()
    return current if current is not None and current.is_recording else None


@contextmanager
def _traced(span: RequestSpan) -> Iterator[RequestSpan]:
    token = _CURRENT.set(span)
    try:
        yield span
    except Exception:
        span.broke()
        raise
    finally:
        _CURRENT.reset(token)
        span.end()


def _parent(headers: Headers) -> Context:
    """Return the parent span that a caller names; none unless there is one well-formed name."""
    given = headers.getlist("traceparent")
    if len(given) != 1 or len(given[0]) > MAX_PARENT:
        return Context()
    return _PARENTS.extract({"traceparent": given[0]}, Context())


def _name(scope: Scope) -> str:
    method, route = _method(scope), route_of(scope)
    verb = "HTTP" if method == "_OTHER" else method
    return verb if route == UNROUTED else f"{verb} {route}"


def _method(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "_OTHER"


def _attributes(scope: Scope, server: str) -> dict[str, AttributeValue]:
    """Return the attributes that are known at the beginning, which samplers see."""
    parts, client = urlsplit(server), scope.get("client")
    found: dict[str, AttributeValue] = {
        "http.request.method": _method(scope),
        "url.path": scope["path"][:MAX_PATH],
        "url.scheme": scope.get("scheme", parts.scheme),
        "network.protocol.version": scope.get("http_version", "1.1"),
        "server.address": parts.hostname or "",
    }
    if parts.port is not None:
        found["server.port"] = parts.port
    if client:
        found["client.address"] = str(client[0])
    return found


def _ending(scope: Scope, status: int) -> dict[str, AttributeValue]:
    caller = scope.get("state", {}).get("caller")
    found: dict[str, AttributeValue] = {"expertctl.request.id": request_id_of(scope)}
    if status:
        found["http.response.status_code"] = status
    if (route := route_of(scope)) != UNROUTED:
        found["http.route"] = route
    if isinstance(caller, Caller):
        found["expertctl.api_key.name"] = caller.name
    return found


def _nanoseconds(tick: float) -> int:
    return round(tick * 1e9)
