"""`BlockWriter`: turns an answer into events of its content blocks while it is written.

Adjacent parts of one kind form one block; each call is a block of its own. Thoughts are left out
unless the request asks for them.
"""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from expertctl.server.answer_reader import AnswerReader, Read
from expertctl.server.anthropic.message_answer import signature_of, tool_use
from expertctl.server.anthropic.message_call import MessageCall
from expertctl.server.anthropic.message_document import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Delta,
    InputDelta,
    Said,
    SignatureDelta,
    TextDelta,
    Thinking,
    ThinkingDelta,
)
from expertctl.server.thinking import Thought
from expertctl.server.tool_calls.call import Call
from expertctl.server.tool_calls.scanner import Text

_Kind = type[Text] | type[Thought]
BlockEvent = BlockStart | BlockDelta | BlockStop


class BlockWriter:
    """Turns the text of one answer into events of its blocks."""

    def __init__(self, call: MessageCall) -> None:
        """Begin without a block."""
        self._call = call
        self._reader = AnswerReader(call.reading)
        self._open: _Kind | None = None
        self._index = self._calls = 0

    @property
    def calls(self) -> int:
        """How many calls were written so far."""
        return self._calls

    @property
    def warnings(self) -> tuple[str, ...]:
        """Say how many calls are left out, if any."""
        return self._reader.warnings

    def push(self, text: str) -> Iterator[BlockEvent]:
        """Take the next piece of the answer; yield the events that are certain now."""
        yield from self._written(self._reader.push(text))

    def finish(self) -> Iterator[BlockEvent]:
        """Yield the events of text that was held back, and close the open block."""
        yield from self._written(self._reader.finish())
        yield from self._close()

    def _written(self, parts: Iterable[Read]) -> Iterator[BlockEvent]:
        for part in parts:
            match part:
                case Text(text):
                    yield from self._go_on(Text, Said(text=""))
                    yield self._delta(TextDelta(text=text))
                case Call():
                    yield from self._called(part)
                case Thought(thought) if self._call.shows_thinking:
                    yield from self._go_on(Thought, Thinking(thinking="", signature=""))
                    yield self._delta(ThinkingDelta(thinking=thought))
                case Thought():
                    continue

    def _go_on(self, kind: _Kind, empty: Block) -> Iterator[BlockEvent]:
        if self._open is kind:
            return
        yield from self._close()
        self._open = kind
        yield self._start(empty)

    def _close(self) -> Iterator[BlockEvent]:
        if self._open is Thought:
            yield self._delta(SignatureDelta(signature=signature_of(self._call)))
        if self._open is not None:
            yield self._stop()
        self._open = None

    def _called(self, call: Call) -> Iterator[BlockEvent]:
        yield from self._close()
        yield self._start(replace(tool_use(self._call, call, number=self._calls), input={}))
        yield self._delta(InputDelta(partial_json=call.arguments_json))
        yield self._stop()
        self._calls += 1

    def _start(self, block: Block) -> BlockStart:
        return BlockStart(index=self._index, content_block=block)

    def _delta(self, delta: Delta) -> BlockDelta:
        return BlockDelta(index=self._index, delta=delta)

    def _stop(self) -> BlockStop:
        self._index += 1
        return BlockStop(index=self._index - 1)
