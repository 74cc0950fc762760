"""Metrics of a running registry, for Prometheus.

Requests are counted as they end. The contents of the registry are read from the database at each
scrape, so they are correct after a restart and with several workers. Routes are templates and
methods a closed set, so clients cannot create time series.
"""

import os
from collections.abc import Iterator

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from sqlalchemy import Table, func, select

from registry_server.database.connection import Database
from registry_server.database.tables import (
    AUDIT,
    BLOBS,
    NAMESPACES,
    PACKAGES,
    RELEASES,
    UPLOADS,
    USERS,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Must be set before this module is imported if several workers share their counts."""

GC_ACTION = "registry.gc"
"""The action of a garbage collection in the audit log."""

_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120)
_COUNTED_TABLES: tuple[tuple[str, str, Table], ...] = (
    ("users", "Users, removed ones included.", USERS),
    ("namespaces", "Namespaces.", NAMESPACES),
    ("packages", "Packages in the index.", PACKAGES),
    ("releases", "Published versions.", RELEASES),
    ("blobs", "Blobs in the storage.", BLOBS),
    ("uploads_open", "Blob uploads in progress.", UPLOADS),
)


class RegistryMetrics:
    """Counters of one process, or of all workers that share a folder."""

    def __init__(self) -> None:
        """Create all time series, at zero."""
        self._collectors = CollectorRegistry()
        self.requests = Counter(
            "expertctl_registry_requests",
            "Requests that were answered.",
            ["method", "route", "status"],
            registry=self._collectors,
        )
        self.seconds = Histogram(
            "expertctl_registry_request_seconds",
            "Time from the request line to the end of the answer.",
            ["method", "route"],
            buckets=_LATENCY_BUCKETS,
            registry=self._collectors,
        )
        self.received = Counter(
            "expertctl_registry_received_bytes",
            "Bytes of request bodies.",
            registry=self._collectors,
        )
        self.sent = Counter(
            "expertctl_registry_sent_bytes", "Bytes of answers.", registry=self._collectors
        )
        self.running = Gauge(
            "expertctl_registry_requests_running",
            "Requests that are being answered.",
            registry=self._collectors,
            multiprocess_mode="livesum",
        )
        self.publishes = Counter(
            "expertctl_registry_publishes",
            "Versions that were published.",
            registry=self._collectors,
        )
        self.uploads = Counter(
            "expertctl_registry_uploads",
            "Blobs that were received completely.",
            registry=self._collectors,
        )

    def count_request(  # independent values, all by name
        self, *, method: str, route: str, status: int, seconds: float, received: int, sent: int
    ) -> None:
        """Count a request that has ended."""
        known = method if method in _METHODS else "other"
        self.requests.labels(known, route, str(status)).inc()
        self.seconds.labels(known, route).observe(seconds)
        self.received.inc(received)
        self.sent.inc(sent)

    def render_exposition(self, database: Database) -> bytes:
        """Return all metrics in the text format, with the current contents of the database."""
        shown = CollectorRegistry()
        if os.environ.get(SHARED_FOLDER):
            MultiProcessCollector(shown)  # type: ignore[no-untyped-call]  # untyped in the library
        else:
            shown.register(self._collectors)
        shown.register(_DatabaseCollector(database))
        return generate_latest(shown)


class _DatabaseCollector(Collector):
    """Collects the contents of the registry from the database at each scrape."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def describe(self) -> list[GaugeMetricFamily]:
        """Describe no series, so that registering this reads nothing."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        with self._database.read() as connection:
            counts = {
                name: connection.scalar(select(func.count()).select_from(table)) or 0
                for name, _, table in _COUNTED_TABLES
            }
            stored = connection.scalar(select(func.sum(BLOBS.c.size))) or 0
            done = AUDIT.c.action == GC_ACTION
            collected = connection.scalar(select(func.max(AUDIT.c.time)).where(done)) or 0
        for name, text, _ in _COUNTED_TABLES:
            yield GaugeMetricFamily(f"expertctl_registry_{name}", text, value=counts[name])
        text = "Bytes of all blobs."
        yield GaugeMetricFamily("expertctl_registry_stored_bytes", text, value=stored)
        text = "When garbage was collected last, in seconds since the epoch; 0: never."
        name = "expertctl_registry_last_collection_timestamp_seconds"
        yield GaugeMetricFamily(name, text, value=collected)
