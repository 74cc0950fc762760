"""`MessageStream`: the answer to a request for a message, told in events as it is written.

The message begins when its prompt is being read, with the usage so far; then come its blocks, one
after the other, then why it ended and the usage in all. What the published API has no place for
stands beside the usage.
"""

from collections.abc import AsyncIterator, Iterator

import msgspec

from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.job import Event, Failed, Finished, Piece, Started
from expertctl.server.anthropic.block_writer import BlockWriter
from expertctl.server.anthropic.message_call import MessageCall
from expertctl.server.anthropic.message_document import (
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    StreamEvent,
)
from expertctl.server.anthropic.outcome import extension_of, stop_of, usage_of, usage_of_result
from expertctl.server.generation import Jobs, events_of
from expertctl.server.sse import named_event


async def message_lines(jobs: Jobs, call: MessageCall) -> AsyncIterator[bytes]:
    """Begin the job of a request and yield the lines of its stream.

    Raises:
        ExpertError: when it is refused, or fails on the way.
    """
    stream = MessageStream(call)
    async with events_of(jobs, call.job) as events:
        async for event in events:
            if isinstance(event, Finished):
                stream.thought = await call.thought_tokens(event.results)
            for told in stream.told(event):
                yield named_event(name_of(told), msgspec.json.encode(told))


class MessageStream:
    """Turns the events of one job into those of the published API."""

    def __init__(self, call: MessageCall) -> None:
        """Begin before the first event."""
        self.thought = 0
        """How many tokens are thought; set before the last event."""
        self._call = call
        self._blocks = BlockWriter(call)
        self._has_begun = False

    def told(self, event: Event) -> Iterator[StreamEvent]:
        """Yield what an event adds to the message."""
        match event:
            case Started(_, prompt, reused):
                yield from self._begin(prompt=prompt, reused=reused)
            case Piece(_, text):
                yield from self._blocks.push(text)
            case Finished(results):
                yield from self._begin(prompt=results[0].prompt_tokens, reused=0)
                yield from self._blocks.finish()
                yield self._ended(results[0])
                yield MessageStop()
            case Failed():
                return

    def _begin(self, *, prompt: int, reused: int) -> Iterator[StreamEvent]:
        """Begin the message, once: a job can be over before its prompt was read."""
        if self._has_begun:
            return
        self._has_begun = True
        message = Message(
            id=self._call.id,
            role="assistant",
            model=self._call.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=usage_of(prompt=prompt, reused=reused, written=0),
        )
        yield MessageStart(message=message)
        yield Ping()

    def _ended(self, result: RunResult) -> MessageDelta:
        return MessageDelta(
            delta=stop_of(self._call, result, calls=self._blocks.calls),
            usage=usage_of_result(result, thought=self.thought),
            expertctl=extension_of(self._call, result, self._blocks.warnings),
        )


def name_of(event: StreamEvent) -> str:
    """Return the name of an event, which is its type."""
    return str(event.__struct_config__.tag)
