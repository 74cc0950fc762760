"""Clients of a generation server: what they ask for, and when each token came.

They speak the OpenAI API and stream, in one event loop; a client waits for its answer before it
asks again, or asks when a clock says so (`open_loop`).
"""

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx2

from benchmarks.harness import Seconds
from benchmarks.served_home import BASE, expert_name

_NUMBERS = count()
"""No two prompts are the same, so nothing is found again that was not asked to be."""
LONG = 600.0
UNANSWERED = 0
"""The status of an answer that has none yet."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion: the model, and how many tokens of prompt and answer there are."""

    model: str
    tokens: int
    prompt: str = ""
    key: str | None = None

    @property
    def path(self) -> str:
        """Where it is asked."""
        return "/v1/completions"

    @property
    def body(self) -> dict[str, object]:
        """The request."""
        return {
            "model": self.model,
            "prompt": self.prompt,
            **_streamed(self.tokens),
            **({} if self.key is None else {"user": self.key}),
        }


@dataclass(frozen=True, slots=True)
class Turn:
    """The next turn of a conversation: what was said so far, by the user first and last."""

    model: str
    tokens: int
    said: tuple[str, ...]
    session: str

    @property
    def path(self) -> str:
        """Where it is asked."""
        return "/v1/chat/completions"

    @property
    def body(self) -> dict[str, object]:
        """The request."""
        roles = ("user", "assistant")
        messages = [
            {"role": roles[number % 2], "content": text} for number, text in enumerate(self.said)
        ]
        return {
            "model": self.model,
            "messages": messages,
            "session_id": self.session,
            **_streamed(self.tokens),
        }


@dataclass(slots=True)
class Told:
    """When the pieces of one answer came, since it was asked for."""

    begun: float
    """By `time.perf_counter`."""
    times: list[Seconds] = field(default_factory=list)
    end: Seconds | None = None
    """When all of it was there, if ever."""
    text: str = ""
    tokens: int = 0
    cached: int = 0
    status: int = UNANSWERED
    timings_ms: dict[str, float] = field(default_factory=dict)
    """What the server says of its stages."""

    @property
    def first(self) -> Seconds:
        """The time to the first token."""
        return self.times[0]

    @property
    def last(self) -> Seconds:
        """The time to the last token."""
        return self.times[-1]


def asks(models: Sequence[str], *, prompt: int, answer: int) -> list[Ask]:
    """Ask each model once, with prompts of so many tokens, of which each is a byte."""
    return [Ask(model, answer, new_prompt(prompt)) for model in models]


def new_prompt(tokens: int) -> str:
    """Return a prompt that was not used before."""
    return (f"{new_number():06d} " + "all that is asked for here is text. " * tokens)[:tokens]


def new_number() -> int:
    """Return a number that makes a prompt a new one."""
    return next(_NUMBERS)


def experts(number: int) -> list[str]:
    """Return the names of so many models, one for each expert."""
    return [expert_name(n) for n in range(number)]


def base_alone(number: int) -> list[str]:
    """Return the name of the base, so many times."""
    return [BASE] * number


def together(url: str, wanted: Sequence[Ask | Turn]) -> tuple[Seconds, list[Told]]:
    """Ask all at once; return how long it took until all were answered."""

    async def all_of_them(client: httpx2.AsyncClient) -> list[Told]:
        return list(await asyncio.gather(*(_told(client, ask) for ask in wanted)))

    return _timed(url, all_of_them)


def one_by_one(url: str, wanted: Sequence[Ask | Turn]) -> tuple[Seconds, list[Told]]:
    """Ask one after the other."""

    async def in_turn(client: httpx2.AsyncClient) -> list[Told]:
        return [await _told(client, ask) for ask in wanted]

    return _timed(url, in_turn)


def closed_loop(
    url: str, wanted: Callable[[int], Ask | Turn], *, clients: int, each: int
) -> tuple[Seconds, list[Told]]:
    """Let so many clients ask again and again; ``wanted`` gives the question of a number."""

    async def client_of(client: httpx2.AsyncClient, first: int) -> list[Told]:
        return [await _told(client, wanted(first + n * clients)) for n in range(each)]

    async def all_of_them(client: httpx2.AsyncClient) -> list[Told]:
        found = await asyncio.gather(*(client_of(client, first) for first in range(clients)))
        return [told for one in found for told in one]

    return _timed(url, all_of_them)


def open_loop(
    url: str, wanted: Callable[[int], Ask | Turn], *, arrivals: Sequence[Seconds], seconds: Seconds
) -> tuple[float, list[Told]]:
    """Ask at given times, whether or not answers have come, and hang up on all after a while.

    Returns when it began, by `time.perf_counter`, and what was told by the end.
    """
    told, begun = list[Told](), time.perf_counter()

    async def asked(client: httpx2.AsyncClient) -> list[Told]:
        tasks: list[asyncio.Task[None]] = []
        for number, at in enumerate(arrivals):
            await asyncio.sleep(begun + at - time.perf_counter())
            told.append(Told(time.perf_counter()))
            tasks.append(asyncio.create_task(hear(client, wanted(number), told[-1])))
        await asyncio.sleep(begun + seconds - time.perf_counter())
        await _hang_up(tasks)
        return told

    _timed(url, asked)
    return begun, told


def arrivals_at(rate: float, *, seconds: Seconds, seed: int) -> list[Seconds]:
    """Return random times of arrival, ``rate`` a second: one somewhere in each ``1 / rate``.

    With so few as a point can have, a Poisson process would say more of its draw than of the
    server: bursts would be taken for a rate that is too high.
    """
    drawn = random.Random(seed)  # arrivals are no secret
    return [(number + drawn.random()) / rate for number in range(int(rate * seconds))]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that at least such a share of all does not exceed (nearest rank)."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


async def _hang_up(tasks: Sequence[asyncio.Task[None]]) -> None:
    """End what still runs; what failed by itself is raised."""
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended


def _streamed(tokens: int) -> Mapping[str, object]:
    return {
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


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


async def _told(client: httpx2.AsyncClient, ask: Ask | Turn) -> Told:
    told = Told(time.perf_counter())
    await hear(client, ask, told)
    return told


async def hear(client: httpx2.AsyncClient, ask: Ask | Turn, told: Told) -> None:
    """Ask, and note what comes as it comes."""
    async with client.stream("POST", ask.path, json=ask.body) as answer:
        told.status = answer.status_code
        if answer.status_code != 200:
            await answer.aread()
            return
        async for chunk in _chunks(answer):
            _note(chunk, told)
        told.end = time.perf_counter() - told.begun


def _note(chunk: Mapping[str, Any], told: Told) -> None:
    """Note one chunk; the first of a chat says only who speaks, the last only why it ended."""
    if text := "".join(map(_text, chunk.get("choices") or ())):
        told.times.append(time.perf_counter() - told.begun)
        told.text += text
    if usage := chunk.get("usage"):
        told.tokens = int(usage["completion_tokens"])
        told.cached = int(usage["prompt_tokens_details"]["cached_tokens"])
    if said := chunk.get("expertctl"):
        told.timings_ms = said["timings_ms"]


def _text(choice: Mapping[str, Any]) -> str:
    return str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")


async def _chunks(answer: httpx2.Response) -> AsyncIterator[Mapping[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))
