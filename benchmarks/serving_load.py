"""Clients of a generation server: what they ask for, and when each token came.

They speak the OpenAI API and stream, in one event loop; a client waits for its answer before it
asks again, or asks when a clock says so (`open_loop`).
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import httpx2

from benchmarks.harness import Seconds
from benchmarks.served_home import BASE, expert_name

_NUMBERS = count()
"""No two prompts are the same, so nothing is found again that was not asked to be."""
LONG = 600.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion: who answers, and how many tokens of prompt and answer there are."""

    model: str
    tokens: int
    prompt: str = ""
    key: str | None = None

    @property
    def body(self) -> dict[str, object]:
        """The request."""
        return {
            "model": self.model,
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if self.key is None else {"user": self.key}),
        }


@dataclass(slots=True)
class Told:
    """When the pieces of one answer came, since it was asked for."""

    begun: float
    times: list[Seconds] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0
    status: int = 200
    timings_ms: dict[str, float] = field(default_factory=dict)
    """What the server says of its stages."""

    @property
    def first(self) -> Seconds:
        """The time to the first token."""
        return self.times[0]

    @property
    def last(self) -> Seconds:
        """The time to the end."""
        return self.times[-1]


def asks(models: Sequence[str], *, prompt: int, answer: int) -> list[Ask]:
    """Ask each model once, with prompts of so many tokens, of which each is a byte."""
    return [Ask(model, answer, new_prompt(prompt)) for model in models]


def new_prompt(tokens: int) -> str:
    """Return a prompt that nobody had before."""
    return (f"{next(_NUMBERS):06d} " + "all that is asked for here is text. " * tokens)[:tokens]


def experts(number: int) -> list[str]:
    """Return the names of so many models, one for each expert."""
    return [expert_name(n) for n in range(number)]


def base_alone(number: int) -> list[str]:
    """Return the name of the base, so many times."""
    return [BASE] * number


def together(url: str, wanted: Sequence[Ask]) -> tuple[Seconds, list[Told]]:
    """Ask all at once; return how long it took until all were answered."""

    async def all_of_them(client: httpx2.AsyncClient) -> list[Told]:
        return list(await asyncio.gather(*(_told(client, ask) for ask in wanted)))

    return _timed(url, all_of_them)


def one_by_one(url: str, wanted: Sequence[Ask]) -> tuple[Seconds, list[Told]]:
    """Ask one after the other."""

    async def in_turn(client: httpx2.AsyncClient) -> list[Told]:
        return [await _told(client, ask) for ask in wanted]

    return _timed(url, in_turn)


def closed_loop(
    url: str, wanted: Callable[[int], Ask], *, clients: int, each: int
) -> tuple[Seconds, list[Told]]:
    """Let so many clients ask again and again; ``wanted`` gives the question of a number."""

    async def client_of(client: httpx2.AsyncClient, first: int) -> list[Told]:
        return [await _told(client, wanted(first + n * clients)) for n in range(each)]

    async def all_of_them(client: httpx2.AsyncClient) -> list[Told]:
        found = await asyncio.gather(*(client_of(client, first) for first in range(clients)))
        return [told for one in found for told in one]

    return _timed(url, all_of_them)


def open_loop(
    url: str, wanted: Callable[[int], Ask], *, rate: float, seconds: float, seed: int = 0
) -> tuple[Seconds, list[Told]]:
    """Ask at random times, ``rate`` a second on average, whether or not answers have come."""
    drawn = random.Random(seed)  # arrivals are no secret

    async def arriving(client: httpx2.AsyncClient) -> list[Told]:
        tasks, at, begun = list[asyncio.Task[Told]](), 0.0, time.perf_counter()
        for number in count():
            at += drawn.expovariate(rate)
            if at > seconds:
                break
            await asyncio.sleep(max(begun + at - time.perf_counter(), 0))
            tasks.append(asyncio.create_task(_told(client, wanted(number))))
        return list(await asyncio.gather(*tasks))

    return _timed(url, arriving)


def _timed(
    url: str, work: Callable[[httpx2.AsyncClient], Awaitable[list[Told]]]
) -> tuple[Seconds, list[Told]]:
    async def run() -> tuple[Seconds, list[Told]]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(base_url=url, timeout=LONG, limits=limits) as client:
            begun = time.perf_counter()
            told = await work(client)
            return time.perf_counter() - begun, told

    return asyncio.run(run())


async def _told(client: httpx2.AsyncClient, ask: Ask) -> Told:
    told = Told(time.perf_counter())
    async with client.stream("POST", "/v1/completions", json=ask.body) as answer:
        told.status = answer.status_code
        if answer.status_code != 200:
            await answer.aread()
            return told
        async for chunk in _chunks(answer):
            if chunk.get("choices"):
                told.times.append(time.perf_counter() - told.begun)
            usage = chunk.get("usage")
            if isinstance(usage, dict):
                told.tokens = int(usage["completion_tokens"])
                told.cached = int(usage["prompt_tokens_details"]["cached_tokens"])
            if isinstance(said := chunk.get("expertctl"), dict):
                told.timings_ms = said["timings_ms"]
    return told


async def _chunks(answer: httpx2.Response) -> AsyncIterator[dict[str, object]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))
