"""Uploads that nobody continues are removed by time, while the server runs.

Their quota, their files and their places among the uploads of a user are free again, whether or not
anybody begins a new upload. The first time is before the first request, then every `SECONDS`.
"""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from anyio import to_thread

from expertctl.errors import ExpertError
from registry_server.operation.gc import collect_uploads
from registry_server.registry import Registry

SECONDS = 600.0
_LOG = logging.getLogger("registry")


def sweep(registry: Registry) -> None:
    """Remove the uploads that were not continued in time; what fails is logged, and goes later."""
    try:
        collect_uploads(registry, time.time() - registry.settings.limits.upload_seconds)
    except ExpertError as error:
        _LOG.warning("uploads that nobody continues were not removed: %s", error.message)


@asynccontextmanager
async def sweeping(
    registry: Registry, *, pause: Callable[[float], Awaitable[None]] = anyio.sleep
) -> AsyncIterator[None]:
    """Sweep at once, and again after each pause, until the block ends."""
    await to_thread.run_sync(sweep, registry)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_go_on, registry, pause)
        yield
        tasks.cancel_scope.cancel()


async def _go_on(registry: Registry, pause: Callable[[float], Awaitable[None]]) -> None:
    while True:
        await pause(SECONDS)
        await to_thread.run_sync(sweep, registry)
