"""Clients of a generation server: their requests, and the time of each token.

They use the OpenAI API with streaming, in one event loop. A client waits for its answer before it
sends the next request, or sends requests at given times (`run_open_loop`).
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
from benchmarks.served_home import BASE, make_expert_name

_NUMBERS = count()
"""No two prompts are equal, so nothing is found in a cache unless that is intended."""
TIMEOUT_SECONDS = 600.0
UNANSWERED = 0
"""The status of a request without an answer."""


@dataclass(frozen=True, slots=True)
class CompletionTask:
    """One completion: the model, and the numbers of tokens of prompt and answer."""

    model: str
    tokens: int
    prompt: str = ""
    key: str | None = None

    @property
    def path(self) -> str:
        """The path of the endpoint."""
        return "/v1/completions"

    @property
    def body(self) -> dict[str, object]:
        """The body of the request."""
        return {
            "model": self.model,
            "prompt": self.prompt,
            **_make_stream_options(self.tokens),
            **({} if self.key is None else {"user": self.key}),
        }


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """The next turn of a conversation: the messages so far; the first and last are the user's."""

    model: str
    tokens: int
    said: tuple[str, ...]
    session: str

    @property
    def path(self) -> str:
        """The path of the endpoint."""
        return "/v1/chat/completions"

    @property
    def body(self) -> dict[str, object]:
        """The body of the request."""
        roles = ("user", "assistant")
        messages = [
            {"role": roles[number % 2], "content": text} for number, text in enumerate(self.said)
        ]
        return {
            "model": self.model,
            "messages": messages,
            "session_id": self.session,
            **_make_stream_options(self.tokens),
        }


@dataclass(slots=True)
class StreamRecord:
    """The times of the text deltas of one answer, since the request."""

    started: float
    """By `time.perf_counter`."""
    times: list[Seconds] = field(default_factory=list)
    end: Seconds | None = None
    """When the answer was complete; None if it never was."""
    text: str = ""
    tokens: int = 0
    cached: int = 0
    status: int = UNANSWERED
    timings_ms: dict[str, float] = field(default_factory=dict)
    """The times of the stages that the server reports."""

    @property
    def first(self) -> Seconds:
        """The time to the first token."""
        return self.times[0]

    @property
    def last(self) -> Seconds:
        """The time to the last token."""
        return self.times[-1]


def make_requests(models: Sequence[str], *, prompt: int, answer: int) -> list[CompletionTask]:
    """Return a request to each model, with prompts of so many tokens, each of which is a byte."""
    return [CompletionTask(model, answer, make_prompt(prompt)) for model in models]


def make_prompt(tokens: int) -> str:
    """Return a prompt that was not used before."""
    return (f"{make_number():06d} " + "all that is asked for here is text. " * tokens)[:tokens]


def make_number() -> int:
    """Return a number that makes a prompt unique."""
    return next(_NUMBERS)


def list_expert_names(number: int) -> list[str]:
    """Return the names of so many models, one for each expert."""
    return [make_expert_name(n) for n in range(number)]


def list_base_names(number: int) -> list[str]:
    """Return the name of the base, so many times."""
    return [BASE] * number


def ask_together(
    url: str, wanted: Sequence[CompletionTask | ConversationTurn]
) -> tuple[Seconds, list[StreamRecord]]:
    """Send all requests at once; return the time until all were answered."""

    async def all_of_them(client: httpx2.AsyncClient) -> list[StreamRecord]:
        return list(await asyncio.gather(*(_ask(client, ask) for ask in wanted)))

    return _time_work(url, all_of_them)


def ask_one_by_one(
    url: str, wanted: Sequence[CompletionTask | ConversationTurn]
) -> tuple[Seconds, list[StreamRecord]]:
    """Send requests one after the other."""

    async def in_turn(client: httpx2.AsyncClient) -> list[StreamRecord]:
        return [await _ask(client, ask) for ask in wanted]

    return _time_work(url, in_turn)


def run_closed_loop(
    url: str, wanted: Callable[[int], CompletionTask | ConversationTurn], *, clients: int, each: int
) -> tuple[Seconds, list[StreamRecord]]:
    """Run so many clients in a loop; ``wanted`` gives the request of a number."""

    async def client_of(client: httpx2.AsyncClient, first: int) -> list[StreamRecord]:
        return [await _ask(client, wanted(first + n * clients)) for n in range(each)]

    async def all_of_them(client: httpx2.AsyncClient) -> list[StreamRecord]:
        found = await asyncio.gather(*(client_of(client, first) for first in range(clients)))
        return [told for one in found for told in one]

    return _time_work(url, all_of_them)


def run_open_loop(
    url: str,
    wanted: Callable[[int], CompletionTask | ConversationTurn],
    *,
    arrival_times: Sequence[Seconds],
    seconds: Seconds,
) -> tuple[float, list[StreamRecord]]:
    """Send requests at given times, whether or not answers have come, and disconnect at the end.

    Returns the start by `time.perf_counter`, and the records at the end.
    """
    told, begun = list[StreamRecord](), time.perf_counter()

    async def asked(client: httpx2.AsyncClient) -> list[StreamRecord]:
        tasks: list[asyncio.Task[None]] = []
        for number, at in enumerate(arrival_times):
            await asyncio.sleep(begun + at - time.perf_counter())
            told.append(StreamRecord(time.perf_counter()))
            tasks.append(asyncio.create_task(record_stream(client, wanted(number), told[-1])))
        await asyncio.sleep(begun + seconds - time.perf_counter())
        await _cancel_tasks(tasks)
        return told

    _time_work(url, asked)
    return begun, told


def draw_arrival_times(rate: float, *, seconds: Seconds, seed: int) -> list[Seconds]:
    """Return random times of arrival, ``rate`` a second: one somewhere in each ``1 / rate``.

    With as few requests as one point has, a Poisson process would measure its draw more than the
    server: bursts would be mistaken for a rate that is too high.
    """
    drawn = random.Random(seed)  # arrivals are no secret
    return [(number + drawn.random()) / rate for number in range(int(rate * seconds))]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that at least such a share of all does not exceed (nearest rank)."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


async def _cancel_tasks(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks that still run; raise the errors of those that failed."""
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended


def _make_stream_options(tokens: int) -> Mapping[str, object]:
    return {
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _time_work(
    url: str, work: Callable[[httpx2.AsyncClient], Awaitable[list[StreamRecord]]]
) -> tuple[Seconds, list[StreamRecord]]:
    async def run() -> tuple[Seconds, list[StreamRecord]]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(
            base_url=url, timeout=TIMEOUT_SECONDS, limits=limits
        ) as client:
            begun = time.perf_counter()
            told = await work(client)
            return time.perf_counter() - begun, told

    return asyncio.run(run())


async def _ask(client: httpx2.AsyncClient, ask: CompletionTask | ConversationTurn) -> StreamRecord:
    told = StreamRecord(time.perf_counter())
    await record_stream(client, ask, told)
    return told


async def record_stream(
    client: httpx2.AsyncClient, ask: CompletionTask | ConversationTurn, told: StreamRecord
) -> None:
    """Send a request, and record its text deltas as they arrive."""
    async with client.stream("POST", ask.path, json=ask.body) as answer:
        told.status = answer.status_code
        if answer.status_code != 200:
            await answer.aread()
            return
        async for chunk in _iterate_chunks(answer):
            _record_chunk(chunk, told)
        told.end = time.perf_counter() - told.started


def _record_chunk(chunk: Mapping[str, Any], told: StreamRecord) -> None:
    """Record one chunk; the first chunk of a chat has only the role, the last the finish reason."""
    if text := "".join(map(_read_text, chunk.get("choices") or ())):
        told.times.append(time.perf_counter() - told.started)
        told.text += text
    if usage := chunk.get("usage"):
        told.tokens = int(usage["completion_tokens"])
        told.cached = int(usage["prompt_tokens_details"]["cached_tokens"])
    if said := chunk.get("expertctl"):
        told.timings_ms = said["timings_ms"]


def _read_text(choice: Mapping[str, Any]) -> str:
    return str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")


async def _iterate_chunks(answer: httpx2.Response) -> AsyncIterator[Mapping[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))
