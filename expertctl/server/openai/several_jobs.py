"""The jobs of one call as one: their events as they come, each with the number of its job."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.job import Drawn, Event, Failed, Finished, Job, Piece
from expertctl.server.generation import Jobs

Numbered = tuple[int, Event]


@dataclass(frozen=True, slots=True)
class Collected:
    """All that came of a job: the answers, and the tokens of each, where they were asked for."""

    results: tuple[RunResult, ...]
    drawn: tuple[tuple[Drawn, ...], ...]


async def collected(jobs: Jobs, asked: Sequence[Job]) -> tuple[Collected, ...]:
    """Begin jobs and wait for the end of all.

    Raises:
        ExpertError: when one is refused or fails; the others are given up then.
    """
    drawn = [[list[Drawn]() for _ in range(job.texts)] for job in asked]
    results: dict[int, tuple[RunResult, ...]] = {}
    async with events_of_all(jobs, asked) as events:
        async for number, event in events:
            if isinstance(event, Piece):
                drawn[number][event.number] += event.drawn
            elif isinstance(event, Finished):
                results[number] = event.results
    return tuple(Collected(results[n], tuple(map(tuple, drawn[n]))) for n in range(len(asked)))


@asynccontextmanager
async def events_of_all(jobs: Jobs, asked: Sequence[Job]) -> AsyncIterator[AsyncIterator[Numbered]]:
    """Begin jobs and give their events; whoever leaves early cancels them all.

    Raises:
        ExpertError: when one is refused, or fails before or while events are read.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Numbered]()
    try:
        for number, job in enumerate(asked):
            jobs.submit(job, _into(queue, loop, number))
        yield _events(queue, len(asked))
    finally:
        for job in asked:
            jobs.cancel(job.id)


def _into(
    queue: asyncio.Queue[Numbered], loop: asyncio.AbstractEventLoop, number: int
) -> Callable[[Event], None]:
    def put(event: Event) -> None:
        try:
            loop.call_soon_threadsafe(queue.put_nowait, (number, event))
        except RuntimeError:  # the loop is closed: nobody reads any more
            return

    return put


async def _events(queue: asyncio.Queue[Numbered], running: int) -> AsyncIterator[Numbered]:
    while running:
        number, event = await queue.get()
        if isinstance(event, Failed):
            raise event.error
        yield number, event
        running -= isinstance(event, Finished)
