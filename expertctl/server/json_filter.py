"""`JsonFilter`: leaves the JSON of an answer that was to be JSON, while it is written.

Clients that asked for JSON parse the whole answer, but models like to write it in a Markdown code
block and to explain it afterwards. One fence around the JSON is removed: the opening line as soon
as JSON begins behind it, the closing one at the end. What follows a whole object or list is left
out, where a decoder that was forced to write JSON would have stopped; not where tools are offered,
since a call may follow. An answer that begins with any other text stays as it is. Where the request
contains the beginning of the answer, that is followed first, and none of it is given out. How the
text is cut into pieces does not matter, and no more is held back than a fence and white space.
"""

import re

from expertctl.server.tool_calls.json_span import JsonSpan

MAX_SPACE = 1024
"""White space that is held back because a fence may follow; any more is text."""
_OPENING = re.compile(r"\s*(`{3,})[ \t]*[A-Za-z0-9+.-]{0,20}[ \t]*\r?\n\s*(?=[\[{\"0-9tfn-])")
_PERHAPS = re.compile(r"\s*(?:`{0,2}|`{3,}[ \t]*[A-Za-z0-9+.-]{0,20}[ \t]*\r?(?:\n\s*)?)")
_NESTED = re.compile(r"\s*[\[{]")
_BEGUN = re.compile(r"[\[{\"`]")
"""What a beginning of an answer contains if it is more than words that announce the JSON."""


class JsonFilter:
    """Filters the text of one answer."""

    def __init__(self, *, ends: bool = True, before: str = "") -> None:
        """Begin behind ``before``; ``ends``: leave out what follows the JSON."""
        self.removed_fence = self.left_out = False
        self._ends = ends
        self._fence = ""
        """The backticks that opened the block; empty outside of one."""
        self._span: JsonSpan | None = None
        """Follows an object or a list, up to its end."""
        self._held = ""
        self._silent = 0
        """How much of what is held belongs to ``before`` and is not given out."""
        self._begun = False
        if _BEGUN.search(before):
            self.push(before)
            self._silent = len(self._held)
            self.removed_fence = self.left_out = False

    def push(self, text: str) -> str:
        """Take the next piece; return the text that is certain now."""
        self._held += text
        if not self._begun and not self._begin():
            return ""
        certain = "" if self._span is None else self._follow(self._span)
        if self._span is None:
            certain += self._give(self._certain() if self._fence else len(self._held))
        return certain

    def finish(self) -> str:
        """Return what was held back, without the closing fence."""
        if self._span is not None and self._span.state == "closed":
            return ""
        is_closed = self._begun and bool(self._fence) and self._fence in self._held
        held = self._give(len(self._held))
        return "" if is_closed else held

    @property
    def warnings(self) -> tuple[str, ...]:
        """Say what of the text was left out: a fence, text after the JSON."""
        fence = ("a Markdown fence around the JSON was removed",) if self.removed_fence else ()
        rest = ("text after the JSON was left out",) if self.left_out else ()
        return (*fence, *rest)

    def _begin(self) -> bool:
        """Decide whether the answer begins with a fence; return False if more must come first."""
        opening = _OPENING.match(self._held[: MAX_SPACE + 1])
        if opening is None and len(self._held) <= MAX_SPACE and _PERHAPS.fullmatch(self._held):
            return False
        self._begun = True
        if opening is not None:
            self._fence, self.removed_fence = opening[1], not self._silent
            self._give(opening.end())
        if self._ends and (begin := _NESTED.match(self._held)):
            self._span = JsonSpan(begin.end() - 1)
        return True

    def _follow(self, span: JsonSpan) -> str:
        """Return what belongs to the object or list; drop what comes once it is closed."""
        text = ""
        if span.state == "open":
            span.follow(self._held)
            text = self._give(span.end)
            span.start = span.end = 0
        if span.state == "broken":
            self._span = None
        elif span.state == "closed":
            rest = self._give(len(self._held))
            self.left_out = self.left_out or bool(rest.strip(" \t\r\n`"))
        return text

    def _certain(self) -> int:
        """Return the length of the text that no closing fence can take."""
        body = self._held.rstrip().rstrip("`").rstrip()
        return max(len(body), len(self._held) - MAX_SPACE)

    def _give(self, count: int) -> str:
        """Take so many characters from what is held; return those that are not of ``before``."""
        text, self._held = self._held[self._silent : count], self._held[count:]
        self._silent = max(0, self._silent - count)
        return text


def json_of(text: str) -> str:
    """Return a whole answer as a filter leaves it."""
    json = JsonFilter()
    return json.push(text) + json.finish()
