"""Jobs: requests that go on by themselves, and are asked about."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Unpack

from expertctl.client.options import InferOptions
from expertctl.client.result import Job
from expertctl.client.server import Call, body_of, job_path
from expertctl.client.transport import Transport
from expertctl.errors import TimedOutError

FIRST_LOOK = 0.05
"""Seconds until a job is looked at again; then twice as long each time."""
SLOWEST_LOOK = 2.0
PATH = "/v1/jobs"


class Jobs:
    """The jobs of whoever has this key."""

    def __init__(self, transport: Transport) -> None:
        """Keep how to ask."""
        self._transport = transport

    def submit(self, prompt: str, **options: Unpack[InferOptions]) -> Job:
        """Put a prompt into the queue; it is answered whether or not anybody asks.

        Raises:
            RateLimitError: when the queue is full.
            ExpertError: when it is refused, or no answer comes.
        """
        return self._transport.ask(Call("POST", PATH, body_of(prompt, options)), Job)

    def get(self, job_id: str) -> Job:
        """Look at a job.

        Raises:
            NotFoundError: when there is none, it is somebody else's, or ended long ago.
            ExpertError: when no answer comes.
        """
        return self._transport.ask(Call("GET", job_path(job_id)), Job)

    def wait(self, job_id: str, *, timeout: float | None = None) -> Job:
        """Look at a job until it is over, for so many seconds at most.

        Raises:
            TimedOutError: when it is not over by then; it goes on.
            ExpertError: as `get`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_LOOK
        while not (job := self.get(job_id)).is_over:
            demand_time(job, end)
            self._transport.sleep(pause)
            pause = min(2 * pause, SLOWEST_LOOK)
        return job

    def cancel(self, job_id: str) -> Job:
        """End a job where it is; one that is over stays as it is.

        Raises:
            ExpertError: as `get`.
        """
        return self._transport.ask(Call("DELETE", job_path(job_id)), Job)

    @contextmanager
    def running(self, prompt: str, **options: Unpack[InferOptions]) -> Iterator[Job]:
        """Begin a job for the length of a ``with`` block, and cancel it at its end.

        Raises:
            ExpertError: as `submit`.
        """
        job = self.submit(prompt, **options)
        try:
            yield job
        finally:
            self.cancel(job.job_id)


def demand_time(job: Job, end: float | None) -> None:
    """Go on waiting only until then.

    Raises:
        TimedOutError: when that is over.
    """
    if end is not None and time.monotonic() >= end:
        raise TimedOutError(f"the job {job.job_id} is still {job.status}", hint="wait for longer")
