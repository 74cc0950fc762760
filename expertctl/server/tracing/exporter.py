"""`Tracing`: exports spans to a collector.

Ended spans wait in a bounded queue (``OTEL_BSP_MAX_QUEUE_SIZE``) for a sender thread; when it is
full the oldest are dropped, so no request waits for a collector. If the collector does not answer,
the log says so once a minute.
"""

import logging
import threading
import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NoOpTracer, Tracer

from expertctl import __version__
from expertctl.errors import UsageError

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
