"""`CompletionStream`: the answers to a completion call, told in chunks as they are written.

A chunk looks like the whole answer. The last one, which is that of the usage where it is asked for,
holds what is told besides.
"""

from collections.abc import AsyncIterator, Iterator

import msgspec

from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.job import Event, Failed, Finished, Piece, Started
from expertctl.routing.plan import Plan
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.generation import Jobs
from expertctl.server.openai.chat_stream import DONE
from expertctl.server.openai.completion_answer import told
from expertctl.server.openai.completion_call import CompletionCall
from expertctl.server.openai.logprobs import completion_logprobs
from expertctl.server.openai.outcome import fingerprint_of, finish_reason_of, usage_of
from expertctl.server.openai.several_jobs import events_of_all
from expertctl.server.sse import event as line


async def completion_lines(jobs: Jobs, call: CompletionCall) -> AsyncIterator[bytes]:
    """Begin the jobs of a call and yield the lines of its stream.

    Raises:
        ExpertError: when one is refused, or fails on the way.
    """
    stream = CompletionStream(call)
    async with events_of_all(jobs, call.jobs) as events:
        async for number, event in events:
            for chunk in stream.chunks(number, event):
                yield line(msgspec.json.encode(chunk))
    yield DONE


class CompletionStream:
    """Turns the events of the jobs of a call into chunks."""

    def __init__(self, call: CompletionCall) -> None:
        """Begin before the first event."""
        self._call = call
        self._fingerprint: str | None = None
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._results: dict[int, tuple[RunResult, ...]] = {}

    def chunks(self, number: int, event: Event) -> Iterator[JsonObject]:
        """Yield what an event of a job adds to the answer."""
        match event:
            case Started(plan):
                yield from self._begin(number, plan)
            case Piece():
                yield self._said(number, event)
            case Finished(results):
                yield from self._begin(number, results[0].planned.result.plan)
                yield from self._ended(number, results)
            case Failed():
                return

    def _begin(self, number: int, plan: Plan) -> Iterator[JsonObject]:
        """Yield a prompt, once, where it is wanted."""
        if number in self._begun:
            return
        self._begun.add(number)
        self._fingerprint = self._fingerprint or fingerprint_of(plan)
        for index in range(self._call.jobs[number].texts):
            if head := self._call.head(number):
                yield self._chunk(self._call.index(number, index), head)

    def _said(self, number: int, piece: Piece) -> JsonObject:
        place = self._call.index(number, piece.number)
        scores = None
        if piece.drawn:
            start = self._offsets.get(place, 0)
            scores = completion_logprobs(piece.drawn, start=start)
            self._offsets[place] = start + sum(len(one.chosen.text) for one in piece.drawn)
        return self._chunk(place, piece.text, scores=scores)

    def _ended(self, number: int, results: tuple[RunResult, ...]) -> Iterator[JsonObject]:
        self._results[number] = results
        ends = [
            self._chunk(
                self._call.index(number, index),
                "",
                reason=finish_reason_of(result.generated.finish_reason),
            )
            for index, result in enumerate(results)
        ]
        late = range(len(results), self._call.jobs[number].texts)  # a deadline was before
        ends += [self._chunk(self._call.index(number, i), "", reason="length") for i in late]
        if len(self._results) == len(self._call.jobs):
            ends = self._with_rest(ends)
        yield from ends

    def _with_rest(self, ends: list[JsonObject]) -> list[JsonObject]:
        """Add what is told once, at the very end."""
        came = [self._results[number] for number in range(len(self._call.jobs))]
        if self._call.with_usage:
            ends.append({**self._head(), "choices": [], "usage": usage_of(came)})
        ends[-1]["expertctl"] = told(self._call, came)
        return ends

    def _chunk(
        self, place: int, text: str, *, scores: JsonObject | None = None, reason: str | None = None
    ) -> JsonObject:
        choice: JsonObject = {
            "index": place,
            "text": text,
            "logprobs": scores,
            "finish_reason": reason,
        }
        usage: JsonObject = {"usage": None} if self._call.with_usage else {}
        return {**self._head(), "choices": list[JsonValue]([choice]), **usage}

    def _head(self) -> JsonObject:
        return {
            "id": self._call.id,
            "object": "text_completion",
            "created": self._call.created,
            "model": self._call.model,
            "system_fingerprint": self._fingerprint,
        }
