"""Jobs, asked about from an event loop: as `expertctl.client.jobs`, with ``await``."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Unpack

from expertctl.client.async_transport import AsyncTransport
from expertctl.client.jobs import FIRST_LOOK, PATH, SLOWEST_LOOK, demand_time
from expertctl.client.options import InferOptions
from expertctl.client.result import Job
from expertctl.client.server import Call, body_of, job_path


class AsyncJobs:
    """The jobs of whoever has this key."""

    def __init__(self, transport: AsyncTransport) -> None:
        """Keep how to ask."""
        self._transport = transport

    async def submit(self, prompt: str, **options: Unpack[InferOptions]) -> Job:
        """Put a prompt into the queue; it is answered whether or not anybody asks.

        Raises:
            RateLimitError: when the queue is full.
            ExpertError: when it is refused, or no answer comes.
        """
        return await self._transport.ask(Call("POST", PATH, body_of(prompt, options)), Job)

    async def get(self, job_id: str) -> Job:
        """Look at a job.

        Raises:
            NotFoundError: when there is none, it is somebody else's, or ended long ago.
            ExpertError: when no answer comes.
        """
        return await self._transport.ask(Call("GET", job_path(job_id)), Job)

    async def wait(self, job_id: str, *, timeout: float | None = None) -> Job:
        """Look at a job until it is over, for so many seconds at most.

        Raises:
            TimedOutError: when it is not over by then; it goes on.
            ExpertError: as `get`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_LOOK
        while not (job := await self.get(job_id)).is_over:
            demand_time(job, end)
            await self._transport.sleep(pause)
            pause = min(2 * pause, SLOWEST_LOOK)
        return job

    async def cancel(self, job_id: str) -> Job:
        """End a job where it is; one that is over stays as it is.

        Raises:
            ExpertError: as `get`.
        """
        return await self._transport.ask(Call("DELETE", job_path(job_id)), Job)

    @asynccontextmanager
    async def running(self, prompt: str, **options: Unpack[InferOptions]) -> AsyncIterator[Job]:
        """Begin a job for the length of a ``async with`` block, and cancel it at its end.

        Raises:
            ExpertError: as `submit`.
        """
        job = await self.submit(prompt, **options)
        try:
            yield job
        finally:
            await self.cancel(job.job_id)
