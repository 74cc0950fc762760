"""`OutputParser`: splits what a model writes, as it comes, into text, reasoning and tool calls.

`JsonExtractor` keeps only the JSON of an answer that must be JSON. Clients parse the whole answer,
but models like to wrap JSON in a Markdown code block and explain it afterwards. One fence around
the JSON is removed: the opening line once JSON begins after it, the closing one at the end. What
follows a whole object or list is dropped, where constrained decoding would have stopped; not where
tools are offered, since a call may follow. An answer that begins with any other text is unchanged.
If the request contains the beginning of the answer, that is read first and not returned. The result
does not depend on how the text is cut into pieces; no more is held back than a fence and white
space.

`AnswerValidator` checks a whole answer, since generation cannot be constrained: its text against
the schema or format of the request, or else the form that experts or the prompt call for; a call
against the schema of its tool if the tool is ``strict``. Reasoning is not checked, nor is the text
of an answer with calls.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from expertctl.engine.serving.request import CheckFunction
from expertctl.engine.text.answer_format import UNCHECKED, FormatCheck, worst_check
from expertctl.errors import UsageError
from expertctl.http.operation import FieldError
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.json_schema import AnswerSchema, check_schema_bounds, compile_schema
from expertctl.server.reasoning_parser import (
    MAX_SPACE,
    PendingText,
    ReasoningParser,
    ReasoningPart,
    ReasoningText,
)
from expertctl.server.tool_parser import (
    JsonSpan,
    ParsedToolCall,
    PlainText,
    ToolCallFormat,
    ToolCallParser,
    ToolCallPart,
)

_OPENING = re.compile(r"\s*(`{3,})[ \t]*[A-Za-z0-9+.-]{0,20}[ \t]*\r?\n\s*(?=[\[{\"0-9tfn-])")
_PARTIAL_OPENING = re.compile(r"\s*(?:`{0,2}|`{3,}[ \t]*[A-Za-z0-9+.-]{0,20}[ \t]*\r?(?:\n\s*)?)")
_NESTED = re.compile(r"\s*[\[{]")
_JSON_START = re.compile(r"[\[{\"`]")
"""Found in the beginning of an answer unless that only announces the JSON in words."""


class JsonExtractor:
    """Reduces the text of one answer to its JSON."""

    def __init__(self, *, drop_rest: bool = True, prefix: str = "") -> None:
        """Start after ``prefix``; ``drop_rest``: drop what follows the JSON."""
        self.removed_fence = self.dropped_text = False
        self._drops_rest = drop_rest
        self._fence = ""
        """The backticks that opened the code block; empty outside one."""
        self._span: JsonSpan | None = None
        """Tracks an object or a list up to its end."""
        self._held = PendingText()
        self._has_started = False
        if _JSON_START.search(prefix):
            self.push(prefix)
            self._held.hidden = len(self._held.text)
            self.removed_fence = self.dropped_text = False

    def push(self, text: str) -> str:
        """Add the next piece; return the text that is now certain."""
        self._held.text += text
        if not self._has_started and not self._detect_fence():
            return ""
        certain = "" if self._span is None else self._follow_span(self._span)
        if self._span is not None:
            return certain
        count = self._certain_length() if self._fence else len(self._held.text)
        return certain + self._held.take(count)

    def finish(self) -> str:
        """Return what was held back, without the closing fence."""
        if self._span is not None and self._span.state == "closed":
            return ""
        is_closed = self._has_started and bool(self._fence) and self._fence in self._held.text
        held = self._held.take(len(self._held.text))
        return "" if is_closed else held

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about what was removed: a fence, text after the JSON."""
        fence = ("a Markdown fence around the JSON was removed",) if self.removed_fence else ()
        rest = ("text after the JSON was left out",) if self.dropped_text else ()
        return (*fence, *rest)

    def _detect_fence(self) -> bool:
        """Decide whether the answer begins with a fence; return False if more text is needed."""
        opening = _OPENING.match(self._held.text[: MAX_SPACE + 1])
        if (
            opening is None
            and len(self._held.text) <= MAX_SPACE
            and _PARTIAL_OPENING.fullmatch(self._held.text)
        ):
            return False
        self._has_started = True
        if opening is not None:
            self._fence, self.removed_fence = opening[1], not self._held.hidden
            self._held.take(opening.end())
        if self._drops_rest and (begin := _NESTED.match(self._held.text)):
            self._span = JsonSpan(begin.end() - 1)
        return True

    def _follow_span(self, span: JsonSpan) -> str:
        """Return text of the object or list; drop what follows once it is closed."""
        text = ""
        if span.state == "open":
            span.follow(self._held.text)
            text = self._held.take(span.end)
            span.start = span.end = 0
        if span.state == "broken":
            self._span = None
        elif span.state == "closed":
            rest = self._held.take(len(self._held.text))
            self.dropped_text = self.dropped_text or bool(rest.strip(" \t\r\n`"))
        return text

    def _certain_length(self) -> int:
        """Return the length of the text that cannot belong to a closing fence."""
        body = self._held.text.rstrip().rstrip("`").rstrip()
        return max(len(body), len(self._held.text) - MAX_SPACE)


def extract_json(text: str) -> str:
    """Return the JSON of a whole answer; see `JsonExtractor`."""
    json = JsonExtractor()
    return json.push(text) + json.finish()


OutputPart = PlainText | ReasoningText | ParsedToolCall


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A whole answer in parts, and warnings about what was removed."""

    parts: tuple[OutputPart, ...]
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text that is neither reasoning nor a call."""
        return "".join(part.text for part in self.parts if isinstance(part, PlainText))

    @property
    def reasoning(self) -> str:
        """The reasoning, as one text."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningText))

    @property
    def calls(self) -> tuple[ParsedToolCall, ...]:
        """The calls, in order."""
        return tuple(part for part in self.parts if isinstance(part, ParsedToolCall))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParserConfig:
    """How to parse the answers to one request."""

    call_format: ToolCallFormat
    tools: Collection[str] = ()
    single_call: bool = False
    """Whether the client wants only the first call."""
    may_think: bool = False
    """Whether the base may write reasoning."""
    starts_in_reasoning: bool = False
    """Whether the prompt ends inside reasoning."""
    expects_json: bool = False
    """Whether JSON was requested, so that text around it is removed."""
    prefix: str = ""
    """The beginning of the answer, without reasoning, if the request contains it."""
    partial_tag: str = ""
    """The partial reasoning tag at the end of the prompt."""

    def parse(self, text: str) -> ParsedOutput:
        """Parse a whole answer."""
        reader = OutputParser(self)
        parts = (*reader.push(text), *reader.finish())
        return ParsedOutput(parts, reader.warnings)


class OutputParser:
    """Parses one answer incrementally; the result does not depend on the pieces."""

    def __init__(self, config: OutputParserConfig) -> None:
        """Start at the beginning of the answer."""
        self.calls = self.dropped_calls = 0
        self._single_call = config.single_call
        self._reasoning_parser = ReasoningParser(
            starts_in_reasoning=config.starts_in_reasoning, partial_tag=config.partial_tag
        )
        self._json_extractor: JsonExtractor | None = None
        before = config.prefix
        if config.expects_json:
            self._json_extractor = JsonExtractor(drop_rest=not config.tools, prefix=before)
            before = JsonExtractor(drop_rest=not config.tools).push(before)
        self._tool_parser = ToolCallParser(config.call_format, config.tools, prefix=before)

    def push(self, text: str) -> list[OutputPart]:
        """Add the next piece; return the parts that are now certain."""
        return list(self._parse_parts(self._reasoning_parser.push(text)))

    def finish(self) -> list[OutputPart]:
        """Return what was held back."""
        parts = list(self._parse_parts(self._reasoning_parser.finish()))
        if self._json_extractor is not None:
            parts += self._limit_calls(self._tool_parser.push(self._json_extractor.finish()))
        return [*parts, *self._limit_calls(self._tool_parser.finish())]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about what was removed: calls, a fence, text after the JSON."""
        messages = list[str]()
        if self.dropped_calls:
            messages.append(
                f"tool calls left out, since only one was requested: {self.dropped_calls}"
            )
        return (
            *messages,
            *(self._json_extractor.warnings if self._json_extractor is not None else ()),
        )

    def _parse_parts(self, parts: Iterable[ReasoningPart]) -> Iterator[OutputPart]:
        for part in parts:
            if isinstance(part, ReasoningText):
                yield part
            else:
                text = (
                    part.text
                    if self._json_extractor is None
                    else self._json_extractor.push(part.text)
                )
                yield from self._limit_calls(self._tool_parser.push(text))

    def _limit_calls(self, parts: Iterable[ToolCallPart]) -> Iterator[OutputPart]:
        for part in parts:
            if isinstance(part, ParsedToolCall) and self._single_call and self.calls:
                self.dropped_calls += 1
                continue
            self.calls += isinstance(part, ParsedToolCall)
            yield part


ToolSchemas = Mapping[str, AnswerSchema]
"""Strict tool → the schema of its arguments."""


@dataclass(frozen=True, slots=True)
class StrictTool:
    """A tool whose arguments must fit its schema; ``field`` is the schema's path."""

    name: str
    schema: JsonObject
    field: str


@dataclass(frozen=True, slots=True)
class AnswerValidator:
    """Checks the answers to one request."""

    config: OutputParserConfig
    text_check: CheckFunction | None
    """The check of the text; None: the form that experts or the prompt call for."""
    tools: ToolSchemas

    def __call__(self, text: str) -> FormatCheck | str:
        """Check a whole answer as written; or return the part that is left for a later check."""
        answer = self.config.parse(text)
        if answer.calls:
            found = [
                self._check_arguments(call) for call in answer.calls if call.name in self.tools
            ]
            return worst_check(found) if found else UNCHECKED
        if self.text_check is None:
            return answer.text
        said = self.config.prefix + answer.text
        return self.text_check(extract_json(said) if self.config.expects_json else said)

    def _check_arguments(self, call: ParsedToolCall) -> FormatCheck:
        what = f"the input of {call.name}"
        return self.tools[call.name].check_value(call.arguments, what=what)


def build_answer_validator(
    config: OutputParserConfig, *, text_check: CheckFunction | None, tools: Sequence[StrictTool]
) -> AnswerValidator | None:
    """Return the validator; None without a format, tools, or a base that may reason.

    Raises:
        FieldError: when the schema of a tool cannot be used.
    """
    schemas = _compile_tool_schemas(tools)
    needed = text_check is not None or config.tools or config.may_think
    return AnswerValidator(config, text_check, schemas) if needed else None


def _compile_tool_schemas(tools: Sequence[StrictTool]) -> ToolSchemas:
    """Compile the schemas; the bounds of one schema also apply to all of them together."""
    try:
        check_schema_bounds(
            list[JsonValue](tool.schema for tool in tools), where="the schemas of tools"
        )
    except UsageError as error:
        raise FieldError(error.message, field="tools", hint=error.hint) from error
    return {tool.name: _compile_tool_schema(tool) for tool in tools}


def _compile_tool_schema(tool: StrictTool) -> AnswerSchema:
    try:
        return compile_schema(tool.schema, where=tool.field)
    except UsageError as error:
        raise FieldError(error.message, field=tool.field, hint=error.hint) from error
