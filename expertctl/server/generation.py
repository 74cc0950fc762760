"""The way between requests and the threads of the engine: events of a job, in an event loop.

A job lives as long as the ``async with`` that began it. Leaving the block early, because the client
left or for any other reason, cancels the job: its row is free within one step.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from expertctl.engine.serving.job import Event, Failed, Finished, Job, Sink

Numbered = tuple[int, Event]


class Jobs(Protocol):
    """What the server needs of the engine."""

    def submit(self, job: Job, sink: Sink) -> None:
        """Take a job into the queue.

        Raises:
            RateLimitError: when the queue is full.
        """

    def cancel(self, job_id: str) -> None:
        """Cancel a job; do nothing if it is unknown or has ended."""


@asynccontextmanager
async def events_of(jobs: Jobs, job: Job) -> AsyncIterator[AsyncIterator[Event]]:
    """Begin a job and give its events, the last one `Finished`.

    Raises:
        ExpertError: when it is refused, or fails before or while its events are read.
    """
    async with events_of_all(jobs, [job]) as events:
        yield (event async for _, event in events)


@asynccontextmanager
async def events_of_all(jobs: Jobs, asked: Sequence[Job]) -> AsyncIterator[AsyncIterator[Numbered]]:
    """Begin jobs and give the events of all as they come, each with the number of its job.

    Raises:
        ExpertError: when one is refused, or fails before or while events are read; the others are
            cancelled then.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Numbered]()
    begun = list[Job]()
    try:
        for number, job in enumerate(asked):
            jobs.submit(job, _into(queue, loop, number))
            begun.append(job)
        yield _events(queue, len(asked))
    finally:
        for job in begun:
            jobs.cancel(job.id)


async def finished(jobs: Jobs, job: Job) -> Finished:
    """Begin a job and return how it finished.

    Raises:
        ExpertError: when it is refused or fails.
    """
    async with events_of(jobs, job) as events:
        async for event in events:
            if isinstance(event, Finished):
                return event
    raise AssertionError("a job ends with Finished or Failed")


def _into(
    queue: asyncio.Queue[Numbered], loop: asyncio.AbstractEventLoop, number: int
) -> Callable[[Event], None]:
    def put(event: Event) -> None:
        try:
            loop.call_soon_threadsafe(queue.put_nowait, (number, event))
        except RuntimeError:  # the loop is closed: nothing reads any more
            return

    return put


async def _events(queue: asyncio.Queue[Numbered], running: int) -> AsyncIterator[Numbered]:
    while running:
        number, event = await queue.get()
        if isinstance(event, Failed):
            raise event.error
        yield number, event
        running -= isinstance(event, Finished)
