"""`ChatStream`: the answers to a chat call, told in chunks as they are written.

For each answer the role comes first, then text, thoughts and calls, then why it ended. The last
chunk of all, which holds the usage if that is asked for, also holds the ``expertctl`` object.
"""

from collections.abc import AsyncIterator, Iterable, Iterator

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.job import Drawn, Event, Failed, Finished, Piece, Started
from expertctl.routing.plan import Plan
from expertctl.server.answer_reader import AnswerReader, Read
from expertctl.server.generation import Jobs, events_of
from expertctl.server.openai.chat_answer import tool_call_of
from expertctl.server.openai.chat_call import ChatCall
from expertctl.server.openai.chat_document import (
    ChatChunk,
    ChatDelta,
    ChatLogprobs,
    ChunkCall,
    ChunkChoice,
)
from expertctl.server.openai.logprobs import chat_logprobs
from expertctl.server.openai.outcome import (
    Answered,
    EndReason,
    RunningUsage,
    Usage,
    extension_of,
    fingerprint_of,
    finish_reason_of,
    usage_of,
)
from expertctl.server.sse import event as line
from expertctl.server.thinking import Thought
from expertctl.server.tool_calls.call import Call
from expertctl.server.tool_calls.scanner import Text

DONE = line(b"[DONE]")


async def chat_lines(jobs: Jobs, call: ChatCall) -> AsyncIterator[bytes]:
    """Begin the job of a call and yield the lines of its stream.

    Raises:
        ExpertError: when it is refused, or fails on the way.
    """
    stream = ChatStream(call)
    async with events_of(jobs, call.job) as events:
        async for event in events:
            if isinstance(event, Finished):
                stream.thought = await call.thought_tokens(event.results)
            for chunk in stream.chunks(event):
                yield line(msgspec.json.encode(chunk))
    yield DONE


class ChatStream:
    """Turns the events of one job into chunks."""

    def __init__(self, call: ChatCall) -> None:
        """Begin before the first event."""
        self.thought = 0
        """How many tokens are thought; set before the last event."""
        self._call = call
        self._readers = [AnswerReader(call.reading) for _ in range(call.job.texts)]
        self._calls = [0] * call.job.texts
        self._fingerprint: str | None = None
        self._running = RunningUsage() if call.with_running_usage else None

    def chunks(self, event: Event) -> Iterator[ChatChunk]:
        """Yield the chunks that an event adds to the answer."""
        match event:
            case Started(plan, prompt, reused):
                if self._running is not None:
                    self._running.read(prompt=prompt, cached=reused)
                yield from self._begin(plan)
            case Piece(index, text, drawn, written):
                if self._running is not None:
                    self._running.written[index] = written
                yield from self._said(index, self._readers[index].push(text), drawn)
            case Finished(results):
                if self._running is not None:
                    counts = (len(result.generated.tokens) for result in results)
                    self._running.written = dict(enumerate(counts))
                yield from self._begin(results[0].planned.result.plan)
                yield from self._ended(results)
            case Failed():
                return

    def _begin(self, plan: Plan) -> Iterator[ChatChunk]:
        """Begin each answer, once: a job can be over before its prompt was read."""
        if self._fingerprint is not None:
            return
        self._fingerprint = fingerprint_of(plan)
        for index in range(self._call.job.texts):
            yield self._grown(index, ChatDelta(role="assistant", content=""))

    def _said(
        self, index: int, read: Iterable[Read], drawn: Iterable[Drawn] = ()
    ) -> Iterator[ChatChunk]:
        """Yield a chunk per part; logprobs go with the first, or in a chunk of their own."""
        scores = chat_logprobs(drawn, self._call.bytes_of) if drawn else None
        deltas = [self._delta(index, part) for part in read]
        for delta in deltas or ([ChatDelta()] if scores else []):
            yield self._grown(index, delta, scores=scores)
            scores = None

    def _delta(self, index: int, part: Read) -> ChatDelta:
        match part:
            case Text(text):
                return ChatDelta(content=text)
            case Thought(text):
                return ChatDelta(reasoning_content=text)
            case Call():
                number = self._calls[index]
                self._calls[index] += 1
                found = tool_call_of(self._call, part, index=index, number=number)
                return ChatDelta(
                    tool_calls=[ChunkCall(id=found.id, function=found.function, index=number)]
                )

    def _ended(self, results: tuple[RunResult, ...]) -> Iterator[ChatChunk]:
        for index in range(len(results)):
            yield from self._said(index, self._readers[index].finish())
        ends = [self._end(index, result) for index, result in enumerate(results)]
        late = range(len(results), self._call.job.texts)  # the deadline passed before they began
        ends += [self._grown(index, ChatDelta(), reason="length") for index in late]
        if self._call.with_usage:
            ends.append(self._chunk([], usage=usage_of([results], thought=self.thought)))
        *others, last = ends
        yield from others
        answered = [Answered(i, r, self._readers[i].warnings) for i, r in enumerate(results)]
        call = self._call
        extension = extension_of(answered, ignored=call.ignored, warnings=call.warnings)
        yield replace(last, expertctl=extension)

    def _end(self, index: int, result: RunResult) -> ChatChunk:
        calls = self._readers[index].calls
        reason = finish_reason_of(result.generated.finish_reason, calls=calls)
        return self._grown(index, ChatDelta(), reason=reason)

    def _grown(
        self,
        index: int,
        delta: ChatDelta,
        *,
        scores: ChatLogprobs | None = None,
        reason: EndReason | None = None,
    ) -> ChatChunk:
        choice = ChunkChoice(index=index, delta=delta, logprobs=scores, finish_reason=reason)
        return self._chunk([choice], usage=self._usage_so_far())

    def _usage_so_far(self) -> Usage | UnsetType | None:
        if self._running is not None:
            return self._running.usage()
        return None if self._call.with_usage else UNSET

    def _chunk(self, choices: list[ChunkChoice], *, usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            id=self._call.id,
            created=self._call.created,
            model=self._call.model,
            choices=choices,
            system_fingerprint=self._fingerprint,
            usage=usage,
        )
