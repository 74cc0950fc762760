"""Garbage collection as an operator runs it, beside the server, with a trace in the audit log."""

from collections.abc import Iterator
from contextlib import contextmanager

from registry_server.access import audit
from registry_server.access.identity import ANONYMOUS
from registry_server.operation.gc import Garbage, collect, survey
from registry_server.operation.metrics import COLLECTION
from registry_server.registry import Registry, open_registry
from registry_server.settings import ServerSettings


def collect_garbage(settings: ServerSettings, *, now: float) -> Garbage:
    """Remove what nothing needs any more, and remember that it was done.

    Raises:
        StoreError: when the registry cannot be opened, or its disk fails.
    """
    with _opened(settings) as registry:
        removed = collect(registry, now=now)
        detail = f"{removed.blobs} blobs, {removed.bytes} bytes, {removed.uploads} uploads"
        with registry.database.write() as connection:
            audit.record(connection, ANONYMOUS, COLLECTION, "blobs", detail)
    return removed


def survey_garbage(settings: ServerSettings, *, now: float) -> Garbage:
    """Return what `collect_garbage` would remove, and change nothing."""
    with _opened(settings) as registry:
        return survey(registry, now=now)


@contextmanager
def _opened(settings: ServerSettings) -> Iterator[Registry]:
    registry = open_registry(settings)
    try:
        yield registry
    finally:
        registry.close()
