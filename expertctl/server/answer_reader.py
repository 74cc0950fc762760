"""`AnswerReader`: splits what a model writes, as it comes, into speech, thoughts and calls."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from expertctl.server.json_filter import JsonFilter
from expertctl.server.thinking import Part as Thinking
from expertctl.server.thinking import ThinkingFilter, Thought
from expertctl.server.tool_calls.call import Call
from expertctl.server.tool_calls.call_format import CallFormat
from expertctl.server.tool_calls.scanner import Part, Text, ToolCallScanner

Read = Text | Thought | Call


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A whole answer in its parts, and warnings of calls that are left out."""

    parts: tuple[Read, ...]
    warnings: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """The text that is neither thought nor call."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def thought(self) -> str:
        """The thoughts, as one text."""
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls, in order."""
        return tuple(part for part in self.parts if isinstance(part, Call))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How to read answers: the format of calls, the tools, how many calls count, thoughts, JSON."""

    form: CallFormat
    tools: Collection[str] = ()
    one_call: bool = False
    """Whether only the first call counts, as the client asked."""
    thinks: bool = False
    """Whether the base is one that may think before it answers."""
    opened: bool = False
    """Whether the prompt ends inside a thought."""
    json_asked: bool = False
    """Whether the request asked for JSON, so that what stands around it is removed."""
    before: str = ""
    """The beginning of the answer, without thoughts, where the request contains it."""
    tag_begin: str = ""
    """The first part of a tag of thoughts with which the prompt ends."""

    def whole(self, text: str) -> WholeAnswer:
        """Split a whole answer."""
        reader = AnswerReader(self)
        parts = (*reader.push(text), *reader.finish())
        return WholeAnswer(parts, reader.warnings)


class AnswerReader:
    """Reads one answer; how it is cut into pieces does not matter."""

    def __init__(self, reading: Reading) -> None:
        """Begin at its start."""
        self.calls = self.calls_left_out = 0
        self._one_call = reading.one_call
        self._thinking = ThinkingFilter(opened=reading.opened, begun=reading.tag_begin)
        self._json: JsonFilter | None = None
        before = reading.before
        if reading.json_asked:
            self._json = JsonFilter(ends=not reading.tools, before=before)
            before = JsonFilter(ends=not reading.tools).push(before)
        self._scanner = ToolCallScanner(reading.form, reading.tools, before=before)

    def push(self, text: str) -> list[Read]:
        """Take the next piece; return the parts that are certain now."""
        return list(self._read(self._thinking.push(text)))

    def finish(self) -> list[Read]:
        """Return what was held back."""
        parts = list(self._read(self._thinking.finish()))
        if self._json is not None:
            parts += self._counted(self._scanner.push(self._json.finish()))
        return [*parts, *self._counted(self._scanner.finish())]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Say what of the answer was left out: calls, a fence, text after JSON."""
        told = list[str]()
        if self.calls_left_out:
            told.append(f"calls of tools left out, since one was asked for: {self.calls_left_out}")
        return (*told, *(self._json.warnings if self._json is not None else ()))

    def _read(self, parts: Iterable[Thinking]) -> Iterator[Read]:
        for part in parts:
            if isinstance(part, Thought):
                yield part
            else:
                text = part.text if self._json is None else self._json.push(part.text)
                yield from self._counted(self._scanner.push(text))

    def _counted(self, parts: Iterable[Part]) -> Iterator[Read]:
        for part in parts:
            if isinstance(part, Call) and self._one_call and self.calls:
                self.calls_left_out += 1
                continue
            self.calls += isinstance(part, Call)
            yield part
