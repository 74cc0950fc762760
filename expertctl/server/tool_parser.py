"""`ToolCallParser`: separates tool calls from the text of an answer while it is written.

A call names an offered tool, and its arguments are a JSON object, parsed as strictly as any other
untrusted JSON. Anything else is not a call and stays text.

A `ToolCallFormat` is how the models of one family write calls; it is recognised by the chat
template, which writes earlier calls in the same form. Control tokens are not text (see
`expertctl.engine.text.tokenizer`), so where a family marks calls by one, the marker may be missing:
then a call counts only at the very beginning of an answer, or right after another call. In every
family a call without a marker counts if it is the whole answer: models forget the marker, or have
it as a control token.

Text that could still become a call is held back; if it does not, it is returned as written. White
space around a call belongs to the call. If an answer ends inside a call of which only the end
marker is missing, the call counts. The result does not depend on how the text is cut into pieces;
no more is held back than the longest call may have. If the request contains the beginning of the
answer, that is read first and not returned: a call may begin in it.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from expertctl.errors import InvalidPackageError
from expertctl.schema.strict_json import JsonObject, JsonValue, loads
from expertctl.server.reasoning_parser import MAX_SPACE, WHITE_SPACE, PendingText, count_overlap

MAX_CALL_CHARACTERS = 1 << 18
"""Maximum characters of one call, or of several written as one list."""
MAX_CALLS = 128
"""Maximum calls in one list."""
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = {"name", "id", "type"}
CALL_KEYS = frozenset({*_ARGUMENT_KEYS, *_OTHER_KEYS})
"""The keys that the JSON object of a call can have."""


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One call, as the model wrote it."""

    name: str
    arguments: JsonObject

    @property
    def arguments_json(self) -> str:
        """The arguments as JSON text."""
        return json.dumps(self.arguments, ensure_ascii=False)


def make_call_id(prefix: str, *, job_id: str, number: int) -> str:
    """Return the id of a job's call: stable, and as hard to guess as the job's id."""
    digest = hashlib.sha256(f"{job_id}/{number}".encode())
    return f"{prefix}{digest.hexdigest()[:24]}"


def parse_tool_calls(text: str, *, tools: Collection[str]) -> tuple[ParsedToolCall, ...] | None:
    """Return the calls in a JSON text, one or a list; None for anything else."""
    document = _load_json(text)
    found = document if isinstance(document, list) else [document]
    if not 0 < len(found) <= MAX_CALLS:
        return None
    calls = [_parse_call(one, tools) for one in found]
    sure = tuple(call for call in calls if call is not None)
    return sure if len(sure) == len(calls) else None


def parse_named_call(name: str, text: str) -> tuple[ParsedToolCall, ...] | None:
    """Return the call of a tool with these JSON arguments; None if they are not an object."""
    arguments = _load_json(text)
    return (ParsedToolCall(name, arguments),) if isinstance(arguments, dict) else None


def _load_json(text: str) -> JsonValue:
    try:
        data = text.encode("utf-8")
        return loads(data, what="a call", max_bytes=4 * MAX_CALL_CHARACTERS)
    except (InvalidPackageError, UnicodeEncodeError):
        return None


def _parse_call(value: JsonValue, tools: Collection[str]) -> ParsedToolCall | None:
    """Parse one call; None for anything else, or with unknown fields, which would be lost."""
    if not isinstance(value, dict):
        return None
    name, given = value.get("name"), [key for key in _ARGUMENT_KEYS if key in value]
    if not isinstance(name, str) or name not in tools or len(given) != 1:
        return None
    arguments = value[given[0]]
    if not isinstance(arguments, dict) or not value.keys() <= {*_OTHER_KEYS, *given}:
        return None
    return ParsedToolCall(name, arguments)


_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class CallOpening:
    """The text that precedes the JSON of a call."""

    text: str
    brackets: str
    """Brackets that the JSON may begin with, after white space."""
    tool: str | None = None
    """The tool, if the JSON is only its arguments."""


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a model family writes calls."""

    start_marker: str
    """Text that begins a call anywhere in an answer."""
    brackets: str = "{"
    end_marker: str = ""
    """Text after the JSON."""
    marker_optional: bool = False
    """Whether the start marker may be missing."""
    separator: str = ""
    """Characters allowed between two calls."""
    name_separator: str | None = None
    """Text between the tool's name and its arguments; None: the name is in the JSON."""
    id_length: int | None = None
    """Number of letters and digits the template requires in a call id; None: any id."""

    def iter_openings(self, tools: Iterable[str], *, without_marker: bool) -> Iterator[CallOpening]:
        """Yield all ways to begin a call of these tools, with or without the marker."""
        mark = "" if without_marker else self.start_marker
        yield CallOpening(mark, self.brackets)
        if self.name_separator is None:
            return
        for tool in tools:
            yield CallOpening(f"{mark}{tool}{self.name_separator}", "{", tool)
            yield CallOpening(f"{mark}{tool}", "{", tool)


HERMES = ToolCallFormat("<tool_call>", end_marker="</tool_call>")
"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>``: Hermes, Qwen, and many after them."""
LLAMA = ToolCallFormat("<|python_tag|>", marker_optional=True, separator=";")
"""``{"name": …, "parameters": {…}}`` as the answer: Llama 3.1 and later."""
MISTRAL = ToolCallFormat(
    "[TOOL_CALLS]", brackets="[{", marker_optional=True, name_separator="[ARGS]", id_length=9
)
"""``[TOOL_CALLS][{"name": …, "arguments": {…}}]``, later ``[TOOL_CALLS]name[ARGS]{…}``."""


def detect_call_format(template: str) -> ToolCallFormat:
    """Return the format that a chat template writes; Hermes if none is recognised."""
    if HERMES.start_marker in template:
        return HERMES
    if MISTRAL.start_marker in template:
        return MISTRAL
    if LLAMA.start_marker in template or '"parameters": ' in template:
        return LLAMA
    return HERMES


def template_reads_tools(template: str) -> bool:
    """Tell whether a chat template reads tools; otherwise the model never sees them."""
    return _TOOLS.search(template) is not None


_STRUCTURE = re.compile(r"[ \t\r\n,:0-9+\-.eEtrufalsn]*")
"""Text between brackets and strings, in any order: a parser checks it later."""
_STRING_TEXT = re.compile(r'[^"\\\x00-\x1f]*')
_CLOSING = {"{": "}", "[": "]"}

JsonSpanState = Literal["open", "closed", "broken"]


class JsonSpan:
    """Finds the end of an object or list in a growing text; each character is read once.

    It knows only brackets and strings, which suffice to find the end. Most text that cannot become
    JSON is recognised at once.
    """

    def __init__(self, start: int) -> None:
        """Start at the opening bracket."""
        self.start = self.end = start
        self.state: JsonSpanState = "open"
        self._closing: list[str] = []
        self._in_string = False

    def follow(self, text: str) -> None:
        """Read on to the end of the value or of ``text``, which must extend the previous one."""
        while self.state == "open" and self.end < len(text):
            inside = _STRING_TEXT if self._in_string else _STRUCTURE
            match = inside.match(text, self.end)
            self.end = match.end() if match else self.end
            if self.end == len(text) or not self._step_letter(text):
                return

    def _step_letter(self, text: str) -> bool:
        """Read the next significant character; return False if it needs the one after it."""
        letter = text[self.end]
        if self._in_string:
            return self._step_in_string(letter, last=self.end + 1 == len(text))
        self.end += 1
        if letter == '"' and self._closing:
            self._in_string = True
        elif letter in _CLOSING:
            self._closing.append(_CLOSING[letter])
        elif self._closing and letter == self._closing[-1]:
            self._closing.pop()
            self.state = "open" if self._closing else "closed"
        else:
            self.state = "broken"
        return True

    def _step_in_string(self, letter: str, *, last: bool) -> bool:
        if letter == "\\":
            if last:
                return False
            self.end += 2
            return True
        self.end += 1
        self._in_string = False
        self.state = "open" if letter == '"' else "broken"
        return True


_WHOLE_ANSWER = CallOpening("", "{")
"""The opening of an answer that consists of one call without a marker."""
_FIRST_KEY = re.compile(r'\{[ \t\r\n]*"([^"\\]*)"')


@dataclass(frozen=True, slots=True)
class PlainText:
    """A piece of the answer that is not a call."""

    text: str


ToolCallPart = PlainText | ParsedToolCall


@dataclass(frozen=True, slots=True)
class _CallCandidate:
    """A possible call: its opening, and its JSON in the buffer."""

    opening: CallOpening
    json: JsonSpan
    without_marker: bool


class ToolCallParser:
    """Splits one answer into text and calls."""

    def __init__(self, form: ToolCallFormat, tools: Collection[str], *, prefix: str = "") -> None:
        """Look for calls of these tools, after ``prefix``."""
        self._format, self._tools = form, frozenset(tools)
        self._marked_openings = tuple(form.iter_openings(sorted(self._tools), without_marker=False))
        openings = form.iter_openings(sorted(self._tools), without_marker=True)
        self._unmarked_openings = tuple(openings) if form.marker_optional else (_WHOLE_ANSWER,)
        self._held = PendingText()
        self._space = ""
        self._candidate: _CallCandidate | None = None
        self._accepts_unmarked = True
        self._is_after_call = False
        if prefix and self._tools:
            self.push(prefix)
            self._held.hidden, self._space = len(self._held.text), ""

    def push(self, text: str) -> list[ToolCallPart]:
        """Add the next piece; return the parts that are now certain."""
        if not self._tools:
            return [PlainText(text)] if text else []
        self._held.text += text
        return list(self._iter_parts(final=False))

    def finish(self) -> list[ToolCallPart]:
        """Return what was held back."""
        parts = list(self._iter_parts(final=True))
        space, self._space = self._space, ""
        return [*parts, PlainText(space)] if space else parts

    def _iter_parts(self, *, final: bool) -> Iterator[ToolCallPart]:
        while self._held.text:
            parts = (
                self._seek_call(final=final)
                if self._candidate is None
                else self._read_call(final=final)
            )
            if parts is None:
                return
            yield from parts

    def _seek_call(self, *, final: bool) -> list[ToolCallPart] | None:
        """Return the text before the next candidate; None if more text is needed."""
        if self._accepts_unmarked:
            return self._seek_unmarked_call(final=final)
        at = _find_marker(self._held.text, self._format.start_marker)
        parts = self._emit(at)
        opening = _match_opening(self._held.text, self._marked_openings, bare=False)
        if isinstance(opening, _CallCandidate):
            self._candidate = opening
        elif opening == "perhaps" and not final:
            return parts or None
        else:
            parts += self._emit(len(self._format.start_marker))
        return parts

    def _seek_unmarked_call(self, *, final: bool) -> list[ToolCallPart] | None:
        """Look for a call at the current position; if there is none, the next needs its marker."""
        between = WHITE_SPACE + (self._format.separator if self._is_after_call else "")
        opening = _match_opening(self._held.text, self._unmarked_openings, bare=True, skip=between)
        if opening == "perhaps" and not final:
            return None
        self._candidate = opening if isinstance(opening, _CallCandidate) else None
        self._accepts_unmarked = False
        return []

    def _read_call(self, *, final: bool) -> list[ToolCallPart] | None:
        """Return the calls of the candidate if it is complete; None if more text is needed."""
        assert self._candidate is not None
        text, json = self._held.text, self._candidate.json
        json.follow(text)
        is_whole = self._candidate.opening is _WHOLE_ANSWER
        find_end = _find_whole_answer_end if is_whole else _find_call_end
        end = find_end(text, json, self._format.end_marker, final=final)
        if end == "perhaps":
            return None
        calls = None if end is None else self._parse_calls(self._candidate)
        if end is None or calls is None:
            return self._reject_candidate(self._candidate)
        self._held.take(end)
        self._space, self._candidate = "", None
        self._is_after_call, self._accepts_unmarked = True, self._format.marker_optional
        return list(calls)

    def _parse_calls(self, candidate: _CallCandidate) -> tuple[ParsedToolCall, ...] | None:
        text = self._held.text[candidate.json.start : candidate.json.end]
        tool = candidate.opening.tool
        return (
            parse_tool_calls(text, tools=self._tools)
            if tool is None
            else parse_named_call(tool, text)
        )

    def _reject_candidate(self, candidate: _CallCandidate) -> list[ToolCallPart]:
        """Drop a candidate: its marker is text; without one, look for a marker from here on."""
        self._candidate = None
        return [] if candidate.without_marker else self._emit(len(self._format.start_marker))

    def _emit(self, count: int) -> list[ToolCallPart]:
        """Return ``count`` buffered characters as text; hold back white space at their end."""
        text = self._space + self._held.take(count)
        text = text.lstrip(WHITE_SPACE) if self._is_after_call else text
        body = len(text.rstrip(WHITE_SPACE))
        self._is_after_call = self._is_after_call and body == 0
        certain = max(body, len(text) - MAX_SPACE)
        self._space = text[certain:]
        return [PlainText(text[:certain])] if certain else []


def _find_marker(text: str, mark: str) -> int:
    """Return the index of a marker, even a partial one at the end; the length if none."""
    at = text.find(mark)
    return at if at >= 0 else len(text) - count_overlap(text, mark)


def _match_opening(
    text: str, openings: Iterable[CallOpening], *, bare: bool, skip: str = ""
) -> _CallCandidate | Literal["perhaps"] | None:
    """Return the candidate at the beginning of a text; "perhaps" if it may become one."""
    first = len(text) - len(text.lstrip(skip)) if skip else 0
    may_match = False
    for opening in openings if first <= MAX_SPACE else ():
        begin = first + len(opening.text)
        if not text.startswith(opening.text, first):
            may_match = may_match or opening.text.startswith(text[first:])
            continue
        start = begin + _count_spaces(text, begin)
        if start < len(text) and text[start] in opening.brackets and start - begin <= MAX_SPACE:
            return _CallCandidate(opening, JsonSpan(start), bare)
        may_match = may_match or start == len(text) <= begin + MAX_SPACE
    return "perhaps" if may_match else None


def _find_call_end(
    text: str, json: JsonSpan, mark: str, *, final: bool
) -> int | Literal["perhaps"] | None:
    """Return the end of a candidate; "perhaps" if more text is needed, None if not a call."""
    if json.state == "broken" or json.end - json.start > MAX_CALL_CHARACTERS:
        return None
    if json.state == "open":
        return None if final else "perhaps"
    begin = json.end + (_count_spaces(text, json.end) if mark else 0)
    if begin - json.end > MAX_SPACE:
        return None
    if text.startswith(mark, begin):
        return begin + len(mark)
    if not mark.startswith(text[begin:]):
        return None
    return len(text) if final else "perhaps"


def _find_whole_answer_end(
    text: str, json: JsonSpan, mark: str, *, final: bool
) -> int | Literal["perhaps"] | None:
    """Return the end of a call that is the whole answer, like `_find_call_end`."""
    if json.state == "broken" or json.end - json.start > MAX_CALL_CHARACTERS:
        return None
    key = _FIRST_KEY.match(text, json.start)
    if key is not None and key[1] not in CALL_KEYS:
        return None  # not a call: stop holding it back
    if json.state == "open":
        return None if final else "perhaps"
    rest = text[json.end :].strip(WHITE_SPACE)
    if len(text) - json.end > MAX_SPACE or not mark.startswith(rest):
        return None
    return len(text) if final else "perhaps"


def _count_spaces(text: str, start: int) -> int:
    """Return the number of white-space characters from ``start``."""
    rest = text[start : start + MAX_SPACE + 1]
    return len(rest) - len(rest.lstrip(WHITE_SPACE))
