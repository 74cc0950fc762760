"""`FenceFilter`: removes one Markdown fence around JSON that was asked for, while it is written.

Models like to write JSON in a code block; clients that asked for JSON parse the whole answer. The
opening line goes as soon as JSON begins behind it, the closing one if nothing but white space
follows. Any other text stays as it is. How the text is cut into pieces does not matter, and no more
is held back than a fence and white space.
"""

import re

MAX_SPACE = 1024
"""White space that is held back because a fence may follow; any more is text."""
_OPENING = re.compile(r"\s*(`{3,})[ \t]*[A-Za-z0-9+.-]{0,20}[ \t]*\r?\n\s*(?=[\[{\"0-9tfn-])")
_PERHAPS = re.compile(r"\s*(?:`{0,2}|`{3,}[ \t]*[A-Za-z0-9+.-]{0,20}[ \t]*\r?(?:\n\s*)?)")
_TAIL = re.compile(r"\s*`*\s*\Z")


class FenceFilter:
    """Filters the text of one answer."""

    def __init__(self) -> None:
        """Begin at the start of the answer."""
        self.removed = False
        """Whether a fence was removed."""
        self._fence = ""
        """The backticks that opened the block; empty outside of one."""
        self._held = ""
        self._begun = False

    def push(self, text: str) -> str:
        """Take the next piece; return the text that is certain now."""
        self._held += text
        if not self._begun and not self._begin():
            return ""
        return self._give(self._certain()) if self._fence else self._give(len(self._held))

    def finish(self) -> str:
        """Return what was held back, without the closing fence."""
        held, self._held = self._held, ""
        is_closed = self._begun and bool(self._fence) and self._fence in held
        return "" if is_closed else held

    def _begin(self) -> bool:
        """Decide whether the answer begins with a fence; return False if more must come first."""
        opening = _OPENING.match(self._held[: MAX_SPACE + 1])
        if opening is None and len(self._held) <= MAX_SPACE and _PERHAPS.fullmatch(self._held):
            return False
        self._begun = True
        if opening is not None:
            self._fence, self.removed = opening[1], True
            self._held = self._held[opening.end() :]
        return True

    def _certain(self) -> int:
        """Return the length of the text that no closing fence can take."""
        recent = max(0, len(self._held) - MAX_SPACE)
        tail = _TAIL.search(self._held, recent)
        return tail.start() if tail else len(self._held)

    def _give(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


def without_fence(text: str) -> str:
    """Return a whole text without the fence around it."""
    fence = FenceFilter()
    return fence.push(text) + fence.finish()
