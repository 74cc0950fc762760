"""A collector: it takes OTLP over HTTP on a socket and reads it with the published messages."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span


class TraceCollector:
    """What came, in order; `may_respond` is cleared by a test in which it hangs."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.status = 200
        self.asked, self.may_respond = threading.Event(), threading.Event()
        self.may_respond.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def address(self) -> str:
        return f"{self.url}/v1/traces"

    @property
    def resources(self) -> list[ResourceSpans]:
        read = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [resource for request in read for resource in request.resource_spans]

    @property
    def spans(self) -> list[Span]:
        return [s for r in self.resources for scope in r.scope_spans for s in scope.spans]

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.may_respond.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.bodies.append(body)
                collector.paths.append(self.path)
                collector.asked.set()
                collector.may_respond.wait()
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(collector.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@contextmanager
def run_collector() -> Iterator[TraceCollector]:
    """Collect on a free port until the block is left."""
    collector = TraceCollector()
    collector.open()
    try:
        yield collector
    finally:
        collector.close()


def read_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource as values of Python."""
    return {pair.key: _read_value(pair.value) for pair in owner.attributes}


def _read_value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_read_value(each) for each in value.array_value.values]
    assert kind is not None
    return getattr(value, kind)
