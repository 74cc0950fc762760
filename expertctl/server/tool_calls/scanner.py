"""`ToolCallScanner`: separates calls from the text of an answer while it is written.

Text that could still become a call is held back; if it turns out to be none, it is given out as
written. White space around a call belongs to the call. If an answer ends inside a call of which
only the end mark is missing, the call counts. An answer that is nothing but the JSON of one call
counts, too, where the format demands a mark: models forget it, or have it as a control token. How
the text is cut into pieces does not matter, and no more is held back than the longest call may
have. Where the request contains the beginning of the answer, that is followed first, and none of it
is given out: a call may begin in it.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from expertctl.server.tool_calls.call import KEYS, MAX_CALL_CHARACTERS, Call, call_of, calls_in
from expertctl.server.tool_calls.call_format import CallFormat, Opening
from expertctl.server.tool_calls.json_span import JsonSpan

MAX_SPACE = 1024
"""Most white space before or inside a call; more before its mark is text, else it is no call."""
_SPACE = " \t\r\n"


_WHOLE_ANSWER = Opening("", "{")
"""How an answer begins that may be nothing but a call, without a mark."""
_FIRST_KEY = re.compile(r'\{[ \t\r\n]*"([^"\\]*)"')


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer that is no call."""

    text: str


Part = Text | Call


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A possible call: its opening, and its JSON in the text that is held."""

    opening: Opening
    json: JsonSpan
    bare: bool


class ToolCallScanner:
    """Splits one answer into text and calls."""

    def __init__(self, form: CallFormat, tools: Collection[str], *, before: str = "") -> None:
        """Look for calls of these tools, behind ``before``."""
        self._form, self._tools = form, frozenset(tools)
        self._marked = tuple(form.openings(sorted(self._tools), bare=False))
        usual = form.openings(sorted(self._tools), bare=True)
        self._bare = tuple(usual) if form.bare else (_WHOLE_ANSWER,)
        self._held = ""
        self._space = ""
        self._candidate: _Candidate | None = None
        self._mark_may_miss = True
        self._behind_call = False
        self._silent = 0
        """How much of what is held belongs to ``before`` and is not given out."""
        if before and self._tools:
            self.push(before)
            self._silent, self._space = len(self._held), ""

    def push(self, text: str) -> list[Part]:
        """Take the next piece; return the parts that are certain now."""
        if not self._tools:
            return [Text(text)] if text else []
        self._held += text
        return list(self._parts(final=False))

    def finish(self) -> list[Part]:
        """Return what was held back."""
        parts = list(self._parts(final=True))
        space, self._space = self._space, ""
        return [*parts, Text(space)] if space else parts

    def _parts(self, *, final: bool) -> Iterator[Part]:
        while self._held:
            parts = self._seek(final=final) if self._candidate is None else self._read(final=final)
            if parts is None:
                return
            yield from parts

    def _seek(self, *, final: bool) -> list[Part] | None:
        """Return the text before the next candidate; None if more text must come first."""
        if self._mark_may_miss:
            return self._seek_bare(final=final)
        at = _find(self._held, self._form.mark)
        parts = self._give(at)
        begun = _begun(self._held, self._marked, bare=False)
        if isinstance(begun, _Candidate):
            self._candidate = begun
        elif begun == "perhaps" and not final:
            return parts or None
        else:
            parts += self._give(len(self._form.mark))
        return parts

    def _seek_bare(self, *, final: bool) -> list[Part] | None:
        """Look for a call right here; if there is none, the next one needs its mark."""
        between = _SPACE + (self._form.separator if self._behind_call else "")
        begun = _begun(self._held, self._bare, bare=True, skip=between)
        if begun == "perhaps" and not final:
            return None
        self._candidate = begun if isinstance(begun, _Candidate) else None
        self._mark_may_miss = False
        return []

    def _read(self, *, final: bool) -> list[Part] | None:
        """Return the calls of the candidate if it is whole; None if more text must come first."""
        assert self._candidate is not None
        json = self._candidate.json
        json.follow(self._held)
        if self._candidate.opening is _WHOLE_ANSWER:
            end = _end_of_whole(self._held, json, self._form.end, final=final)
        else:
            end = _end_of(self._held, json, self._form.end, final=final)
        if end == "perhaps":
            return None
        calls = None if end is None else self._calls(self._candidate)
        if end is None or calls is None:
            return self._refuse(self._candidate)
        self._take(end)
        self._space, self._candidate = "", None
        self._behind_call, self._mark_may_miss = True, self._form.bare
        return list(calls)

    def _calls(self, candidate: _Candidate) -> tuple[Call, ...] | None:
        text = self._held[candidate.json.start : candidate.json.end]
        tool = candidate.opening.tool
        return calls_in(text, tools=self._tools) if tool is None else call_of(tool, text)

    def _refuse(self, candidate: _Candidate) -> list[Part]:
        """Drop a candidate: its mark is text; without one, a mark is looked for from here on."""
        self._candidate = None
        return [] if candidate.bare else self._give(len(self._form.mark))

    def _give(self, count: int) -> list[Part]:
        """Return ``count`` held characters as text; keep back the white space at their end."""
        text = self._space + self._take(count)
        text = text.lstrip(_SPACE) if self._behind_call else text
        body = len(text.rstrip(_SPACE))
        self._behind_call = self._behind_call and body == 0
        certain = max(body, len(text) - MAX_SPACE)
        self._space = text[certain:]
        return [Text(text[:certain])] if certain else []

    def _take(self, count: int) -> str:
        """Take so many characters from what is held; return those that are not of ``before``."""
        text, self._held = self._held[self._silent : count], self._held[count:]
        self._silent = max(0, self._silent - count)
        return text


def parted(text: str, form: CallFormat, tools: Collection[str]) -> list[Part]:
    """Split a whole answer; the text between two calls is one part."""
    scanner = ToolCallScanner(form, tools)
    parts: list[Part] = []
    for part in (*scanner.push(text), *scanner.finish()):
        last = parts[-1] if parts else None
        if isinstance(part, Text) and isinstance(last, Text):
            parts[-1] = Text(last.text + part.text)
        else:
            parts.append(part)
    return parts


def _find(text: str, mark: str) -> int:
    """Return where a mark begins, even a partial one at the end; the length if nowhere."""
    at = text.find(mark)
    if at >= 0:
        return at
    counts = range(min(len(mark) - 1, len(text)), 0, -1)
    return len(text) - next((n for n in counts if mark.startswith(text[-n:])), 0)


def _begun(
    text: str, openings: Iterable[Opening], *, bare: bool, skip: str = ""
) -> _Candidate | Literal["perhaps"] | None:
    """Return the candidate that a text begins with; "perhaps" if it may yet become one."""
    first = len(text) - len(text.lstrip(skip)) if skip else 0
    perhaps = False
    for opening in openings if first <= MAX_SPACE else ():
        begin = first + len(opening.text)
        if not text.startswith(opening.text, first):
            perhaps = perhaps or opening.text.startswith(text[first:])
            continue
        start = begin + _spaces(text, begin)
        if start < len(text) and text[start] in opening.brackets and start - begin <= MAX_SPACE:
            return _Candidate(opening, JsonSpan(start), bare)
        perhaps = perhaps or start == len(text) <= begin + MAX_SPACE
    return "perhaps" if perhaps else None


def _end_of(
    text: str, json: JsonSpan, mark: str, *, final: bool
) -> int | Literal["perhaps"] | None:
    """Return the end of a candidate; "perhaps" if more text must come, None if it is no call."""
    if json.state == "broken" or json.end - json.start > MAX_CALL_CHARACTERS:
        return None
    if json.state == "open":
        return None if final else "perhaps"
    begin = json.end + (_spaces(text, json.end) if mark else 0)
    if begin - json.end > MAX_SPACE:
        return None
    if text.startswith(mark, begin):
        return begin + len(mark)
    if not mark.startswith(text[begin:]):
        return None
    return len(text) if final else "perhaps"


def _end_of_whole(
    text: str, json: JsonSpan, mark: str, *, final: bool
) -> int | Literal["perhaps"] | None:
    """Return the end of a call that is a whole answer, as `_end_of` does."""
    if json.state == "broken" or json.end - json.start > MAX_CALL_CHARACTERS:
        return None
    key = _FIRST_KEY.match(text, json.start)
    if key is not None and key[1] not in KEYS:
        return None  # it need not be held back any longer
    if json.state == "open":
        return None if final else "perhaps"
    rest = text[json.end :].strip(_SPACE)
    if len(text) - json.end > MAX_SPACE or not mark.startswith(rest):
        return None
    return len(text) if final else "perhaps"


def _spaces(text: str, start: int) -> int:
    """Return how much white space begins at ``start``."""
    rest = text[start : start + MAX_SPACE + 1]
    return len(rest) - len(rest.lstrip(_SPACE))
