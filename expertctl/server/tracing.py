"""OpenTelemetry traces, if enabled: spans of requests, jobs and stages, and their export.

A request's span lasts from its first byte to the last byte of the response and follows the semantic
conventions for HTTP servers. A well-formed ``traceparent`` names its parent; ``tracestate`` is
ignored. It contains no query, header or body. All times of a trace come from one monotonic clock,
set by the wall clock when the request began.

The spans of a job and its stages are created when the job has ended, with its actual times. They
follow the semantic conventions for generative AI and contain neither prompt nor answer, nor other
texts of the request, such as stop strings.

Ended spans wait in a bounded queue (``OTEL_BSP_MAX_QUEUE_SIZE``) for a sender thread; when it is
full the oldest are dropped, so no request waits for a collector. If the collector does not answer,
the log says so once a minute.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    NoOpTracer,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expertctl import __version__
from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult, StageSpan
from expertctl.engine.result_builder import POST_STAGE
from expertctl.engine.running_sequence import OutputDelta
from expertctl.engine.serving.request import (
    GenerationJob,
    JobEvent,
    JobFailed,
    JobFinished,
    JobStarted,
    TokenSink,
)
from expertctl.errors import CancelledError, ExpertError, UsageError
from expertctl.http.log import get_route_path
from expertctl.routing.request import ForcedExpert
from expertctl.server.responses import Caller, get_request_id

LOG = logging.getLogger("expertctl.server")
DEFAULT_SERVICE_NAME = "expertctl"
"""The service name if the environment sets none."""
CLOSE_SECONDS = 3.0
"""Maximum time to send the last spans at shutdown."""
ERROR_INTERVAL_SECONDS = 60.0
_SENDER = logging.getLogger(OTLPSpanExporter.__module__)
_UNKNOWN_SERVICE = "unknown_service"


class Tracing:
    """Provides a tracer and exports its spans while open."""

    def __init__(self, address: str, *, server: str) -> None:
        """Send nothing yet; ``server`` is the public URL."""
        self.address, self.server = address, server
        self.tracer: Tracer = NoOpTracer()
        self._provider: TracerProvider | None = None
        self._throttle = _ErrorThrottle()

    def open(self) -> None:
        """Start recording spans, configured by the ``OTEL_*`` environment variables.

        Raises:
            UsageError: when a variable has an invalid value.
        """
        try:
            processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=self.address))
            provider = TracerProvider(resource=_build_resource(), shutdown_on_exit=False)
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            hint = "check the environment variables that begin with OTEL_"
            raise UsageError(f"traces cannot be sent: {error}", hint=hint) from error
        _SENDER.addFilter(self._throttle)
        provider.add_span_processor(processor)
        self._provider, self.tracer = (
            provider,
            provider.get_tracer(DEFAULT_SERVICE_NAME, __version__),
        )

    def close(self, *, seconds: float = CLOSE_SECONDS) -> None:
        """Stop recording, and send the remaining spans for at most ``seconds``."""
        provider, self._provider = self._provider, None
        self.tracer = NoOpTracer()
        if provider is None:
            return
        sending = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(seconds)
        if sending.is_alive():
            LOG.warning("the last traces are lost: the collector did not take them in time")
        _SENDER.removeFilter(self._throttle)


class _ErrorThrottle(logging.Filter):
    """Passes one error of the sender per interval, so that errors do not fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -ERROR_INTERVAL_SECONDS

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if record.levelno < logging.ERROR or now - self._last < ERROR_INTERVAL_SECONDS:
            return False
        self._last = now
        return True


def _build_resource() -> Resource:
    """Return the resource attributes of the server; the environment takes precedence."""
    found = Resource.create({SERVICE_VERSION: __version__})
    nameless = str(found.attributes[SERVICE_NAME]).startswith(_UNKNOWN_SERVICE)
    return found.merge(Resource({SERVICE_NAME: DEFAULT_SERVICE_NAME})) if nameless else found


MAX_PARENT = 256
"""Maximum length of a ``traceparent``; the known version has 55, later ones may have more."""
MAX_PATH = 256
UNROUTED = "none"
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"}
_PROPAGATOR = TraceContextTextMapPropagator()
_CURRENT: ContextVar["RequestSpan | None"] = ContextVar("request_span", default=None)
"""The request span that is the parent of jobs submitted by this task or thread."""


class RequestSpan:
    """The open span of a request, and the clock of its trace."""

    def __init__(self, tracer: Tracer, scope: Scope, *, server: str) -> None:
        """Start the span now."""
        self._tracer, self._scope = tracer, scope
        self._began = time.perf_counter()
        self._offset = time.time_ns() - _nanoseconds(self._began)
        self._is_received, self._status = False, 0
        self._span = tracer.start_span(
            _request_span_name(scope),
            context=_extract_parent(Headers(scope=scope)),
            kind=SpanKind.SERVER,
            attributes=_initial_attributes(scope, server),
            start_time=self._to_wall_time(self._began),
        )

    @property
    def is_recording(self) -> bool:
        """Whether the span is sampled."""
        return self._span.get_span_context().trace_flags.sampled

    def mark_received(self, tick: float) -> None:
        """Record at ``tick`` that the request became a job; only the first of several counts."""
        if not self._is_received:
            self._is_received = True
            self.add_child("reception", started=self._began, ended=tick)

    def add_child(
        self,
        name: str,
        *,
        started: float,
        ended: float,
        within: Span | None = None,
        attributes: dict[str, AttributeValue] | None = None,
        failed: bool = False,
    ) -> Span:
        """Add an ended child of this span or of ``within``; times are those of `perf_counter`."""
        span = self._tracer.start_span(
            name,
            context=set_span_in_context(within or self._span, Context()),
            attributes=attributes,
            start_time=self._to_wall_time(started),
        )
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._to_wall_time(ended))
        return span

    def record_status(self, message: Message) -> None:
        """Record the status from an ASGI message of the response."""
        if message["type"] == "http.response.start":
            self._status = message["status"]

    def mark_failed(self) -> None:
        """Record that a server bug broke off the response, whatever its status."""
        self._scope.setdefault("state", {}).setdefault("error_code", ExpertError.code)

    def end(self) -> None:
        """End the span with the final attributes of the request."""
        span, scope = self._span, self._scope
        span.update_name(_request_span_name(scope))
        span.set_attributes(_final_attributes(scope, self._status))
        error = scope.get("state", {}).get("error_code")
        if error is not None or self._status >= 500:
            span.set_attribute("error.type", str(error or self._status))
        if self._status >= 500 or (error is not None and self._status < 400):
            span.set_status(Status(StatusCode.ERROR))  # by the conventions, 4xx is no failure here
        span.end(self._to_wall_time(time.perf_counter()))

    def _to_wall_time(self, tick: float) -> int:
        return self._offset + _nanoseconds(tick)


class TracingMiddleware:
    """The outermost ASGI middleware; it creates the span of each request."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        """Trace the requests of ``app``."""
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with _activate_span(
            RequestSpan(self._tracing.tracer, scope, server=self._tracing.server)
        ) as span:

            async def noted_send(message: Message) -> None:
                span.record_status(message)
                await send(message)

            await self._app(scope, receive, noted_send)


def current_request() -> RequestSpan | None:
    """Return the span of the current request; None if it is not recorded."""
    current = _CURRENT.get()
    return current if current is not None and current.is_recording else None


@contextmanager
def _activate_span(span: RequestSpan) -> Iterator[RequestSpan]:
    token = _CURRENT.set(span)
    try:
        yield span
    except Exception:
        span.mark_failed()
        raise
    finally:
        _CURRENT.reset(token)
        span.end()


def _extract_parent(headers: Headers) -> Context:
    """Return the parent context from a single well-formed ``traceparent``, else an empty one."""
    given = headers.getlist("traceparent")
    if len(given) != 1 or len(given[0]) > MAX_PARENT:
        return Context()
    return _PROPAGATOR.extract({"traceparent": given[0]}, Context())


def _request_span_name(scope: Scope) -> str:
    method, route = _method_name(scope), get_route_path(scope)
    verb = "HTTP" if method == "_OTHER" else method
    return verb if route == UNROUTED else f"{verb} {route}"


def _method_name(scope: Scope) -> str:
    return scope["method"] if scope["method"] in _METHODS else "_OTHER"


def _initial_attributes(scope: Scope, server: str) -> dict[str, AttributeValue]:
    """Return the attributes known at the start, which samplers see."""
    parts, client = urlsplit(server), scope.get("client")
    found: dict[str, AttributeValue] = {
        "http.request.method": _method_name(scope),
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


def _final_attributes(scope: Scope, status: int) -> dict[str, AttributeValue]:
    caller = scope.get("state", {}).get("caller")
    found: dict[str, AttributeValue] = {"expertctl.request.id": get_request_id(scope)}
    if status:
        found["http.response.status_code"] = status
    if (route := get_route_path(scope)) != UNROUTED:
        found["http.route"] = route
    if isinstance(caller, Caller):
        found["expertctl.api_key.name"] = caller.name
    return found


def _nanoseconds(tick: float) -> int:
    return round(tick * 1e9)


PROVIDER = "expertctl"
MIN_SPAN_MS = 1.0
"""Shorter stages get no span, except the longest of each step."""
MAX_STAGE_SPANS = 32
Attributes = dict[str, AttributeValue]


def trace_job(job: GenerationJob, sink: TokenSink) -> TokenSink:
    """Return a sink that records the spans of a job; ``sink`` itself without a recorded request."""
    request = current_request()
    return sink if request is None else _JobTracer(request, job, sink)


class _JobTracer:
    """Records the spans of one job before it passes on the last event."""

    def __init__(self, request: RequestSpan, job: GenerationJob, sink: TokenSink) -> None:
        self._request, self._job, self._sink = request, job, sink
        self._submitted = time.perf_counter()
        self._started: float | None = None
        self._base: str | None = None
        request.mark_received(self._submitted)

    def __call__(self, event: JobEvent) -> None:
        try:
            self._observe(event)
        finally:  # deliver the event even if tracing fails
            self._sink(event)

    def _observe(self, event: JobEvent) -> None:
        match event:
            case JobStarted():
                self._started, self._base = time.perf_counter(), event.plan.base
            case JobFinished():
                self._finish(event.results)
            case JobFailed():
                self._fail(event.error)
            case OutputDelta():
                pass

    def _finish(self, results: tuple[RunResult, ...]) -> None:
        ended, first = time.perf_counter(), results[0]
        known = _request_attributes(
            self._job, first.planned.result.plan.base
        ) | _response_attributes(results)
        span = self._request.add_child(
            _job_span_name(known), started=self._submitted, ended=ended, attributes=known
        )
        for lap in (*_select_stages(first.stage_spans), *_inference_stages(first, self._started)):
            self._request.add_child(
                lap.step,
                started=max(lap.began, self._submitted),
                ended=min(lap.ended, ended),
                within=span,
            )

    def _fail(self, error: ExpertError) -> None:
        known = _request_attributes(self._job, self._base) | {"error.type": error.code}
        self._request.add_child(
            _job_span_name(known),
            started=self._submitted,
            ended=time.perf_counter(),
            attributes=known,
            failed=not isinstance(error, CancelledError),  # the caller asked for it
        )


def _job_span_name(known: Attributes) -> str:
    parts = (known.get(name) for name in ("gen_ai.operation.name", "gen_ai.request.model"))
    return " ".join(part for part in parts if isinstance(part, str))


def _request_attributes(job: GenerationJob, base: str | None) -> Attributes:
    """Return the attributes of the request; ``base`` is None before the plan is made."""
    request, wishes = job.request, job.request.route.sampling
    found: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": "chat" if request.raw is None else "text_completion",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": _find_model(request, base),
        "gen_ai.request.max_tokens": wishes.max_tokens,
        "gen_ai.request.temperature": wishes.temperature,
        "gen_ai.request.top_p": wishes.top_p,
        "gen_ai.request.top_k": wishes.top_k,
        "gen_ai.request.seed": request.route.seed,
        "gen_ai.request.choice.count": job.answers if job.answers != 1 else None,
        "gen_ai.response.id": job.id,
        "gen_ai.response.model": base,
        "expertctl.job.priority": job.priority,
    }
    return {name: value for name, value in found.items() if value is not None}


def _find_model(request: RunRequest, base: str | None) -> str | None:
    """Return the ``model`` of a request, in the notation of `expertctl.server.settings`."""
    if request.route.base_alone:
        return base
    forced = [expert for expert in request.experts if isinstance(expert, ForcedExpert)]
    return "+".join(_format_weighted(expert) for expert in forced) or "auto"


def _format_weighted(expert: ForcedExpert) -> str:
    return str(expert.target) if expert.weight == 1.0 else f"{expert.target}:{expert.weight:g}"


def _response_attributes(results: tuple[RunResult, ...]) -> Attributes:
    first, generated = results[0], [result.generated for result in results]
    return {
        "gen_ai.response.finish_reasons": [one.finish_reason for one in generated],
        "gen_ai.usage.input_tokens": first.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": first.kv_reused_tokens,
        "gen_ai.usage.output_tokens": sum(len(one.tokens) for one in generated),
        "expertctl.experts": [expert.ref for expert in first.planned.result.plan.experts],
        "expertctl.experts_loaded": first.experts_loaded,
    }


def _select_stages(laps: tuple[StageSpan, ...]) -> list[StageSpan]:
    """Return the stages of at least `MIN_SPAN_MS`, and the longest of each step."""
    longest = {lap.step: lap for lap in sorted(laps, key=lambda lap: lap.ms)}
    selected = [lap for lap in laps if lap.ms >= MIN_SPAN_MS or lap is longest[lap.step]]
    return selected if len(selected) <= MAX_STAGE_SPANS else list(longest.values())


def _inference_stages(first: RunResult, started: float | None) -> Iterator[StageSpan]:
    """Yield the prefill stage and the decode stage, which ends with the last answer."""
    if started is None:
        return
    generated = first.generated
    read = started + generated.first_token_ms / 1e3
    yield StageSpan("prefill", started, read)
    after = next((lap for lap in first.stage_spans if lap.step == POST_STAGE), None)
    if generated.decode_steps and after is not None:
        yield StageSpan("decode", read, after.began)
