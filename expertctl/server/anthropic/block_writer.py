"""`BlockWriter`: the content blocks of an answer, told in events as it is written.

A block lasts as long as what comes is of its kind; a call is a block of its own. What was thought
is left out where it is not asked for.
"""

from collections.abc import Iterable, Iterator

from expertctl.schema.strict_json import JsonObject
from expertctl.server.answer_reader import AnswerReader, Read
from expertctl.server.anthropic.message_answer import signature_of, tool_use
from expertctl.server.anthropic.message_call import MessageCall
from expertctl.server.thinking import Thought
from expertctl.server.tool_calls.call import Call
from expertctl.server.tool_calls.scanner import Text

_Kind = type[Text] | type[Thought]


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
        """How many calls there are."""
        return self._calls

    @property
    def warnings(self) -> tuple[str, ...]:
        """What of the answer is not given out."""
        return self._reader.warnings

    def push(self, text: str) -> Iterator[JsonObject]:
        """Take the next piece of the answer, yield what is certain now."""
        yield from self._written(self._reader.push(text))

    def finish(self) -> Iterator[JsonObject]:
        """Yield what was held back, and close what is open."""
        yield from self._written(self._reader.finish())
        yield from self._close()

    def _written(self, parts: Iterable[Read]) -> Iterator[JsonObject]:
        for part in parts:
            match part:
                case Text(text):
                    yield from self._go_on(Text, {"type": "text", "text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case Call():
                    yield from self._called(part)
                case Thought(thought) if self._call.shows_thinking:
                    empty: JsonObject = {"type": "thinking", "thinking": "", "signature": ""}
                    yield from self._go_on(Thought, empty)
                    yield self._delta({"type": "thinking_delta", "thinking": thought})
                case Thought():
                    continue

    def _go_on(self, kind: _Kind, empty: JsonObject) -> Iterator[JsonObject]:
        if self._open is kind:
            return
        yield from self._close()
        self._open = kind
        yield self._start(empty)

    def _close(self) -> Iterator[JsonObject]:
        if self._open is Thought:
            signature = signature_of(self._call)
            yield self._delta({"type": "signature_delta", "signature": signature})
        if self._open is not None:
            yield self._stop()
        self._open = None

    def _called(self, call: Call) -> Iterator[JsonObject]:
        yield from self._close()
        yield self._start({**tool_use(self._call, call, number=self._calls), "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments_json})
        yield self._stop()
        self._calls += 1

    def _start(self, block: JsonObject) -> JsonObject:
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: JsonObject) -> JsonObject:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> JsonObject:
        self._index += 1
        return {"type": "content_block_stop", "index": self._index - 1}
