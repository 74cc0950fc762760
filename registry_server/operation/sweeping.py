"""What is done by time while the server runs: before the first request, then every `SECONDS`.

Uploads that nobody continues are removed. Their quota, their files and their places among the
uploads of a user are free again, whether or not anybody begins a new upload.

Index documents that are older than half of the interval that they state are signed again, a few in
each transaction, so that no request waits long. That goes on beside the first requests.
"""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from anyio import to_thread

from expertctl.errors import ExpertError
from registry_server.operation.gc import collect_uploads
from registry_server.publishing.index import index_is_due, renew_indexes
from registry_server.registry import Registry

SECONDS = 600.0
RENEWED_AT_ONCE = 20
"""How many documents are signed again in one transaction."""
_LOG = logging.getLogger("registry")


def sweep(registry: Registry) -> None:
    """Remove the uploads that were not continued in time; what fails is logged, and goes later."""
    try:
        collect_uploads(registry, time.time() - registry.settings.limits.upload_seconds)
    except ExpertError as error:
        _LOG.warning("uploads that nobody continues were not removed: %s", error.message)


def renew(registry: Registry) -> bool:
    """Sign some old index documents again; return whether there may be more.

    What fails is logged, and tried again later. Several workers find the work done by one.
    """
    now = time.time()
    try:
        if not _is_due(registry, now):
            return False
        with registry.database.write() as connection:
            renewed = renew_indexes(
                connection, signer=registry.index_signer, now=now, at_most=RENEWED_AT_ONCE
            )
    except ExpertError as error:
        _LOG.warning("index documents that grow old were not signed again: %s", error.message)
        return False
    return renewed == RENEWED_AT_ONCE


def _is_due(registry: Registry, now: float) -> bool:
    with registry.database.read() as connection:
        return index_is_due(connection, signer=registry.index_signer, now=now)


@asynccontextmanager
async def sweeping(
    registry: Registry, *, pause: Callable[[float], Awaitable[None]] = anyio.sleep
) -> AsyncIterator[None]:
    """Sweep and renew at once, and again after each pause, until the block ends."""
    await to_thread.run_sync(sweep, registry)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_go_on, registry, pause)
        yield
        tasks.cancel_scope.cancel()


async def _go_on(registry: Registry, pause: Callable[[float], Awaitable[None]]) -> None:
    while True:
        while await to_thread.run_sync(renew, registry):
            pass
        await pause(SECONDS)
        await to_thread.run_sync(sweep, registry)
