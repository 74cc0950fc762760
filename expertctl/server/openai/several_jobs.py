"""The jobs of one call, collected: the outcome of all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from expertctl.engine.prompt_scores import PromptScores
from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.job import Drawn, Finished, Job, Piece
from expertctl.server.generation import Jobs, events_of_all


@dataclass(frozen=True, slots=True)
class Collected:
    """The outcome of a job: its answers, and the tokens of each if they were asked for."""

    results: tuple[RunResult, ...]
    drawn: tuple[tuple[Drawn, ...], ...]
    prompt: PromptScores | None = None
    """The log-probabilities of its prompt, if they were asked for and it was read."""


async def collected(jobs: Jobs, asked: Sequence[Job]) -> tuple[Collected, ...]:
    """Begin jobs and wait for the end of all.

    Raises:
        ExpertError: when one is refused or fails; the others are cancelled then.
    """
    drawn = [[list[Drawn]() for _ in range(job.texts)] for job in asked]
    results: dict[int, tuple[RunResult, ...]] = {}
    prompts: dict[int, PromptScores] = {}
    async with events_of_all(jobs, asked) as events:
        async for number, event in events:
            if isinstance(event, Piece):
                drawn[number][event.number] += event.drawn
                if event.prompt is not None:
                    prompts[number] = event.prompt
            elif isinstance(event, Finished):
                results[number] = event.results
    return tuple(
        Collected(results[n], tuple(map(tuple, drawn[n])), prompts.get(n))
        for n in range(len(asked))
    )
