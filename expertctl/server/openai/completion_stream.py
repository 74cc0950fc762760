"""`CompletionStream`: the answers to a completion call, told in chunks as they are written.

A chunk looks like the whole answer. The last one, which holds the usage if that is asked for, also
holds the ``expertctl`` object.
"""

from collections.abc import AsyncIterator, Iterator
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from expertctl.engine.prompt_scores import PromptScores
from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.job import Event, Failed, Finished, Piece, Started
from expertctl.routing.plan import Plan
from expertctl.server.body import in_turn
from expertctl.server.generation import Jobs, events_of_all
from expertctl.server.openai.chat_stream import DONE
from expertctl.server.openai.completion_answer import told
from expertctl.server.openai.completion_call import CompletionCall
from expertctl.server.openai.completion_document import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
)
from expertctl.server.openai.logprobs import TextPlaces, completion_logprobs, prompt_logprobs
from expertctl.server.openai.outcome import (
    EndReason,
    RunningUsage,
    Usage,
    fingerprint_of,
    finish_reason_of,
    usage_of,
)
from expertctl.server.sse import event as line


async def completion_lines(jobs: Jobs, call: CompletionCall) -> AsyncIterator[bytes]:
    """Begin the jobs of a call and yield the lines of its stream.

    Raises:
        ExpertError: when one is refused, or fails on the way.
    """
    stream = CompletionStream(call)
    async with events_of_all(jobs, call.jobs) as events:
        async for number, event in events:
            encode = partial(_encoded, stream, number, event)
            is_large = isinstance(event, Piece) and event.prompt is not None
            for chunk in await in_turn(encode) if is_large else encode():
                yield chunk
    yield DONE


def _encoded(stream: "CompletionStream", number: int, event: Event) -> list[bytes]:
    """Return the lines of an event; those of a scored prompt take a while."""
    return [line(msgspec.json.encode(chunk)) for chunk in stream.chunks(number, event)]


class CompletionStream:
    """Turns the events of the jobs of a call into chunks."""

    def __init__(self, call: CompletionCall) -> None:
        """Begin before the first event."""
        self._call = call
        self._fingerprint: str | None = None
        self._begun: set[int] = set()
        self._held: dict[int, list[Piece]] = {}
        """Pieces of jobs whose prompts have no log-probabilities yet, which come first."""
        self._places: dict[int, TextPlaces] = {}
        """Index of an answer → where its next token begins."""
        self._results: dict[int, tuple[RunResult, ...]] = {}
        self._running = RunningUsage() if call.with_running_usage else None

    def chunks(self, number: int, event: Event) -> Iterator[Completion]:
        """Yield the chunks that an event of a job adds to the answer."""
        match event:
            case Started(plan, prompt, reused):
                if self._running is not None:
                    self._running.read(prompt=prompt, cached=reused)
                yield from self._begin(number, plan)
            case Piece():
                yield from self._grow(number, event)
            case Finished(results):
                yield from self._begin(number, results[0].planned.result.plan)
                yield from self._go_on(number, None)
                yield from self._ended(number, results)
            case Failed():
                return

    def _begin(self, number: int, plan: Plan) -> Iterator[Completion]:
        """Yield the prompt of each answer, once, with ``echo``; if it is scored, then later."""
        if number in self._begun:
            return
        self._begun.add(number)
        self._fingerprint = self._fingerprint or fingerprint_of(plan)
        if self._call.scores_prompt:
            self._held[number] = []
        else:
            yield from self._heads(number, None)

    def _heads(self, number: int, scores: PromptScores | None) -> Iterator[Completion]:
        if not (head := self._call.head(number)):
            return
        told = None if scores is None else prompt_logprobs(scores, head, self._call.tokenizer)
        for index in range(self._call.jobs[number].texts):
            place = self._call.index(number, index)
            self._places[place] = TextPlaces(self._call.tokenizer, start=len(head))
            yield self._grown(place, head, scores=told)

    def _grow(self, number: int, piece: Piece) -> Iterator[Completion]:
        if number not in self._held:
            yield from self._said(number, piece)
            return
        self._held[number].append(piece)
        if piece.prompt is not None:
            yield from self._go_on(number, piece.prompt)

    def _go_on(self, number: int, scores: PromptScores | None) -> Iterator[Completion]:
        """Yield the prompt of each answer, then what was held back."""
        if number in self._held:
            yield from self._heads(number, scores)
            for piece in self._held.pop(number):
                yield from self._said(number, piece)

    def _said(self, number: int, piece: Piece) -> Iterator[Completion]:
        if not (piece.text or piece.drawn):
            return
        place = self._call.index(number, piece.number)
        if self._running is not None:
            self._running.written[place] = piece.written
        scores = None
        if piece.drawn:
            places = self._places.setdefault(place, TextPlaces(self._call.tokenizer))
            scores = completion_logprobs(piece.drawn, self._call.tokenizer.spell, places)
        yield self._grown(place, piece.text, scores=scores)

    def _ended(self, number: int, results: tuple[RunResult, ...]) -> Iterator[Completion]:
        self._results[number] = results
        if self._running is not None:
            for index, result in enumerate(results):
                written = len(result.generated.tokens)
                self._running.written[self._call.index(number, index)] = written
        ends = [
            self._grown(
                self._call.index(number, index),
                "",
                reason=finish_reason_of(result.generated.finish_reason),
            )
            for index, result in enumerate(results)
        ]
        late = range(len(results), self._call.jobs[number].texts)  # they missed a deadline
        ends += [self._grown(self._call.index(number, i), "", reason="length") for i in late]
        if len(self._results) == len(self._call.jobs):
            ends = self._with_rest(ends)
        yield from ends

    def _with_rest(self, ends: list[Completion]) -> list[Completion]:
        """Add the usage and the ``expertctl`` object, at the very end."""
        came = [self._results[number] for number in range(len(self._call.jobs))]
        if self._call.with_usage:
            ends = [*ends, self._chunk([], usage=usage_of(came))]
        *others, last = ends
        return [*others, replace(last, expertctl=told(self._call, came))]

    def _grown(
        self,
        place: int,
        text: str,
        *,
        scores: CompletionLogprobs | None = None,
        reason: EndReason | None = None,
    ) -> Completion:
        choice = CompletionChoice(index=place, text=text, logprobs=scores, finish_reason=reason)
        return self._chunk([choice], usage=self._usage_so_far())

    def _usage_so_far(self) -> Usage | UnsetType | None:
        if self._running is not None:
            return self._running.usage()
        return None if self._call.with_usage else UNSET

    def _chunk(
        self, choices: list[CompletionChoice], *, usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self._call.id,
            created=self._call.created,
            model=self._call.model,
            choices=choices,
            system_fingerprint=self._fingerprint,
            usage=usage,
        )
