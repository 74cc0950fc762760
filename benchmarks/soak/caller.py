"""Clients of a server: they send requests, read on or disconnect, and record the outcome.

This module defines a complete answer of each API, and the text in it.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import httpx2

from benchmarks.soak.requests import InvalidRequest, SoakRequest

Document = dict[str, object]
FINAL_EVENTS = {
    "chat": "[DONE]",
    "completions": "[DONE]",
    "messages": "message_stop",
    "infer": "finished",
}
"""The last data, or the name of the last event, of a stream."""
_REASONS = {
    "chat": {"stop", "length", "tool_calls"},
    "completions": {"stop", "length"},
    "messages": {"end_turn", "max_tokens", "stop_sequence", "tool_use"},
    "infer": {"stop", "length", "timeout"},
}


def find_problem(request: SoakRequest, answer: Document) -> str | None:
    """Return what is missing in an answer with status 200; None for nothing."""
    match request.api:
        case "chat" | "completions":
            return _check_choices(request, answer)
        case "messages":
            reason = answer.get("stop_reason")
        case "infer" | "jobs":
            reason = answer.get("finish_reason")
        case "route":
            return None if isinstance(answer.get("plan"), dict) else "no plan"
    known = _REASONS["messages" if request.api == "messages" else "infer"]
    return None if reason in known else f"it ended with {reason!r}"


def read_text(request: SoakRequest, answer: Document) -> str:
    """Return the text of an answer, the first one if there are several."""
    match request.api:
        case "chat":
            return _check_text(_get_nested(answer, "choices", 0, "message", "content"))
        case "completions":
            return _check_text(_get_nested(answer, "choices", 0, "text"))
        case "messages":
            return _check_text(_get_nested(answer, "content", 0, "text"))
        case _:
            return _check_text(answer.get("text"))


def read_delta(request: SoakRequest, event: Document) -> str:
    """Return the text that one event of a stream adds to the first answer."""
    match request.api:
        case "chat":
            own = _get_nested(event, "choices", 0, "index") == 0
            return _check_text(_get_nested(event, "choices", 0, "delta", "content")) if own else ""
        case "completions":
            return _check_text(_get_nested(event, "choices", 0, "text"))
        case "messages":
            return _check_text(_get_nested(event, "delta", "text"))
        case _:
            return "" if "job_id" in event else _check_text(event.get("text"))


def read_error(document: Document) -> str | None:
    """Return code and message of an error, in any of the formats; None for no error."""
    error = document.get("error")
    if not isinstance(error, dict):
        return None
    return f"{error.get('code') or error.get('type')}: {error.get('message')}"


def _check_choices(request: SoakRequest, answer: Document) -> str | None:
    choices, usage = answer.get("choices"), answer.get("usage")
    if not isinstance(choices, list) or not isinstance(usage, dict):
        return "no choices, or no usage"
    if len(choices) != request.texts and not request.is_timed:
        return f"{len(choices)} choices of {request.texts}"
    reasons = {choice.get("finish_reason") for choice in choices}
    unknown = reasons - _REASONS[request.api]
    return f"it ended with {unknown}" if unknown else None


def _get_nested(document: object, *path: str | int) -> object:
    for step in path:
        match document, step:
            case dict(), str():
                document = document.get(step)
            case list(), int() if step < len(document):
                document = document[step]
            case _:
                return None
    return document


def _check_text(value: object) -> str:
    return value if isinstance(value, str) else ""


POLL_SECONDS = 0.15
MAX_WAIT_SECONDS = 120.0
"""No answer takes this long on a server that keeps up; one that does is stuck."""
_RUNNING = {"queued", "processing"}


@dataclass(slots=True, kw_only=True)
class CallRecord:
    """The request of one client and its outcome; times of `time.monotonic`."""

    asked: SoakRequest | InvalidRequest
    begun: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    first: float | None = None
    """Seconds to the first text of a stream."""
    status: int | None = None
    error: str | None = None
    """The error in the body, the last event or the job."""
    is_left: bool = False
    """The client disconnected before the end."""
    problem: str | None = None
    """Why there is no complete answer: half a stream, a broken connection, a missing field."""

    @property
    def seconds(self) -> float:
        """The time until the answer was complete, or the client disconnected."""
        return self.ended - self.begun

    @property
    def kind(self) -> str:
        """The API, or that the request was invalid."""
        return "wrong" if isinstance(self.asked, InvalidRequest) else self.asked.api


class SoakCaller:
    """A client of one server, with any number of requests over one connection pool."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        """Use this HTTP client."""
        self._client = client

    async def ask(self, asked: SoakRequest | InvalidRequest) -> CallRecord:
        """Send one request; every outcome is recorded, nothing is raised."""
        told = CallRecord(asked=asked)
        try:
            await self._send(told)
        except httpx2.HTTPError as error:
            told.problem = f"{type(error).__name__}: {error}"
        except ValueError as error:
            told.problem = f"the body is no JSON: {error}"
        told.ended = time.monotonic()
        return told

    async def _send(self, told: CallRecord) -> None:
        match told.asked:
            case InvalidRequest() as mistake:
                await self._send_invalid(mistake, told)
            case SoakRequest(api="jobs") as request:
                await self._poll_job(request, told)
            case SoakRequest() as request:
                await self._wait_for_answer(request, told)

    async def _send_invalid(self, mistake: InvalidRequest, told: CallRecord) -> None:
        answer = await self._client.request(
            mistake.method, mistake.path, content=mistake.content, headers=dict(mistake.headers)
        )
        told.status = answer.status_code
        told.error = read_error(answer.json())

    async def _wait_for_answer(self, request: SoakRequest, told: CallRecord) -> None:
        """Wait for the answer, for as long as this client does."""
        try:
            async with asyncio.timeout(request.leaves_after):
                if request.streams:
                    await self._open_stream(request, told)
                else:
                    await self._read_document(request, told)
        except TimeoutError:
            told.is_left = True

    async def _read_document(self, request: SoakRequest, told: CallRecord) -> None:
        answer = await self._client.post(request.path, json=request.body)
        told.status, document = answer.status_code, answer.json()
        told.error = read_error(document)
        if told.status == httpx2.codes.OK:
            told.problem = find_problem(request, document)
            _continue_conversation(request, read_text(request, document))

    async def _open_stream(self, request: SoakRequest, told: CallRecord) -> None:
        async with self._client.stream("POST", request.path, json=request.body) as answer:
            told.status = answer.status_code
            if told.status != httpx2.codes.OK:
                told.error = read_error(json.loads(await answer.aread()))
                return
            await self._read_stream(request, answer, told)

    async def _read_stream(
        self, request: SoakRequest, answer: httpx2.Response, told: CallRecord
    ) -> None:
        pieces, last, number = list[str](), "", 0
        async with contextlib.aclosing(_iterate_events(answer)) as events:
            async for end, event in events:
                last = end
                told.error = told.error or read_error(event)
                if piece := read_delta(request, event):
                    pieces.append(piece)
                    told.first = told.first or time.monotonic() - told.begun
                number += 1
                if number == request.hangs_up_after:
                    told.is_left = True
                    return
        if last != FINAL_EVENTS[request.api] and told.error is None:
            told.problem = f"the stream ended after {last!r}"
        _continue_conversation(request, "".join(pieces))

    async def _poll_job(self, request: SoakRequest, told: CallRecord) -> None:
        answer = await self._client.post(request.path, json=request.body)
        told.status, document = answer.status_code, answer.json()
        if told.status != httpx2.codes.ACCEPTED:
            told.error = read_error(document)
            return
        place = answer.headers["location"]
        if request.leaves_after is not None:
            await asyncio.sleep(request.leaves_after)
            document = (await self._client.delete(place)).json()
            told.is_left = True
        while document["status"] in _RUNNING:
            await asyncio.sleep(POLL_SECONDS)
            document = (await self._client.get(place)).json()
        _check_job(request, document, told)


def _check_job(request: SoakRequest, document: Document, told: CallRecord) -> None:
    told.error = read_error(document)
    result = document.get("result")
    match document.get("status"):
        case "finished" if isinstance(result, dict):
            told.problem = find_problem(request, result)
        case "cancelled" if told.is_left:
            return
        case "failed" if told.error is not None:
            return
        case other:
            told.problem = f"the job is {other!r}"


def _continue_conversation(request: SoakRequest, text: str) -> None:
    """Append the answer to the conversation, for its next turn."""
    talk, turns = request.conversation, request.body.get("messages")
    if talk is not None and isinstance(turns, list):
        talk.add_answer(turns, text)


async def _iterate_events(answer: httpx2.Response) -> AsyncGenerator[tuple[str, Document]]:
    """Yield each event: its name, or its data if that is not an object, and the object."""
    name = ""
    async for line in answer.aiter_lines():
        field_name, _, value = line.partition(": ")
        if field_name == "event":
            name = value
        elif field_name == "data":
            is_object = value.startswith("{")
            yield (name if is_object else value), (json.loads(value) if is_object else {})
