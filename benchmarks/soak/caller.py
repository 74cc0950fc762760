"""Callers of a server: they ask, read on or go away, and keep what became of it."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import httpx2

from benchmarks.soak.answer import ENDS, Document, error_of, piece_of, problem_of, text_of
from benchmarks.soak.mistake import Mistake
from benchmarks.soak.request import Request

POLL_SECONDS = 0.15
PATIENCE = 120.0
"""No answer takes so long on a server that keeps up; what does is stuck."""
_RUNNING = {"queued", "processing"}


@dataclass(slots=True, kw_only=True)
class Told:
    """What one caller asked for and was told; times of `time.monotonic`."""

    asked: Request | Mistake
    begun: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    first: float | None = None
    """Seconds to the first text of a stream."""
    status: int | None = None
    error: str | None = None
    """What the body, the last event or the job says went wrong."""
    is_left: bool = False
    """The caller went away before the end."""
    problem: str | None = None
    """Why there is no whole answer: half a stream, a broken connection, a missing field."""

    @property
    def seconds(self) -> float:
        """How long it took, or the caller stayed."""
        return self.ended - self.begun

    @property
    def kind(self) -> str:
        """The API, or that it was wrong."""
        return "wrong" if isinstance(self.asked, Mistake) else self.asked.api


class Caller:
    """Asks one server, as often as is wanted, over connections of one pool."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        """Ask through this client."""
        self._client = client

    async def ask(self, asked: Request | Mistake) -> Told:
        """Ask once; whatever happens is told, nothing is raised."""
        told = Told(asked=asked)
        try:
            await self._asked(told)
        except httpx2.HTTPError as error:
            told.problem = f"{type(error).__name__}: {error}"
        except ValueError as error:
            told.problem = f"the body is no JSON: {error}"
        told.ended = time.monotonic()
        return told

    async def _asked(self, told: Told) -> None:
        match told.asked:
            case Mistake() as mistake:
                await self._wrong(mistake, told)
            case Request(api="jobs") as request:
                await self._job(request, told)
            case Request() as request:
                await self._stayed(request, told)

    async def _wrong(self, mistake: Mistake, told: Told) -> None:
        answer = await self._client.request(
            mistake.method, mistake.path, content=mistake.content, headers=dict(mistake.headers)
        )
        told.status = answer.status_code
        told.error = error_of(answer.json())

    async def _stayed(self, request: Request, told: Told) -> None:
        """Wait for the answer, as long as this caller does."""
        try:
            async with asyncio.timeout(request.leaves_after):
                if request.streams:
                    await self._stream(request, told)
                else:
                    await self._document(request, told)
        except TimeoutError:
            told.is_left = True

    async def _document(self, request: Request, told: Told) -> None:
        answer = await self._client.post(request.path, json=request.body)
        told.status, document = answer.status_code, answer.json()
        told.error = error_of(document)
        if told.status == httpx2.codes.OK:
            told.problem = problem_of(request, document)
            _go_on(request, text_of(request, document))

    async def _stream(self, request: Request, told: Told) -> None:
        async with self._client.stream("POST", request.path, json=request.body) as answer:
            told.status = answer.status_code
            if told.status != httpx2.codes.OK:
                told.error = error_of(json.loads(await answer.aread()))
                return
            await self._read(request, answer, told)

    async def _read(self, request: Request, answer: httpx2.Response, told: Told) -> None:
        pieces, last, number = list[str](), "", 0
        async with contextlib.aclosing(_events(answer)) as events:
            async for end, event in events:
                last = end
                told.error = told.error or error_of(event)
                if piece := piece_of(request, event):
                    pieces.append(piece)
                    told.first = told.first or time.monotonic() - told.begun
                number += 1
                if number == request.hangs_up_after:
                    told.is_left = True
                    return
        if last != ENDS[request.api] and told.error is None:
            told.problem = f"the stream ended behind {last!r}"
        _go_on(request, "".join(pieces))

    async def _job(self, request: Request, told: Told) -> None:
        answer = await self._client.post(request.path, json=request.body)
        told.status, document = answer.status_code, answer.json()
        if told.status != httpx2.codes.ACCEPTED:
            told.error = error_of(document)
            return
        place = answer.headers["location"]
        if request.leaves_after is not None:
            await asyncio.sleep(request.leaves_after)
            document = (await self._client.delete(place)).json()
            told.is_left = True
        while document["status"] in _RUNNING:
            await asyncio.sleep(POLL_SECONDS)
            document = (await self._client.get(place)).json()
        _judge_job(request, document, told)


def _judge_job(request: Request, document: Document, told: Told) -> None:
    told.error = error_of(document)
    result = document.get("result")
    match document.get("status"):
        case "finished" if isinstance(result, dict):
            told.problem = problem_of(request, result)
        case "cancelled" if told.is_left:
            return
        case "failed" if told.error is not None:
            return
        case other:
            told.problem = f"the job is {other!r}"


def _go_on(request: Request, text: str) -> None:
    """Let the next turn of a conversation follow the answer."""
    talk, turns = request.conversation, request.body.get("messages")
    if talk is not None and isinstance(turns, list):
        talk.answered(turns, text)


async def _events(answer: httpx2.Response) -> AsyncGenerator[tuple[str, Document]]:
    """Yield each event: its name, or its data where that is no object, and the object."""
    name = ""
    async for line in answer.aiter_lines():
        field_name, _, value = line.partition(": ")
        if field_name == "event":
            name = value
        elif field_name == "data":
            is_object = value.startswith("{")
            yield (name if is_object else value), (json.loads(value) if is_object else {})
