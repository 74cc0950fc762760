"""`JsonSpan`: finds the end of the JSON value that begins a text which is still coming."""

import re
from typing import Literal

_BETWEEN = re.compile(r"[ \t\r\n,:0-9+\-.eEtrufalsn]*")
"""What stands between brackets and strings, in any order: a parser checks it later."""
_INSIDE = re.compile(r'[^"\\\x00-\x1f]*')
_CLOSING = {"{": "}", "[": "]"}

State = Literal["open", "closed", "broken"]


class JsonSpan:
    """Follows one object or list through a text that grows; each letter is looked at once.

    It knows only brackets and strings, which is enough to find the end. Text that cannot become
    JSON is mostly noticed at once.
    """

    def __init__(self, start: int) -> None:
        """Begin at the first bracket."""
        self.start = self.end = start
        self.state: State = "open"
        self._closing: list[str] = []
        self._in_string = False

    def follow(self, text: str) -> None:
        """Go on to the end of the value or of ``text``, which may only have grown since."""
        while self.state == "open" and self.end < len(text):
            inside = _INSIDE if self._in_string else _BETWEEN
            match = inside.match(text, self.end)
            self.end = match.end() if match else self.end
            if self.end == len(text) or not self._step(text):
                return

    def _step(self, text: str) -> bool:
        """Take the next significant letter; return False if it needs the letter after it."""
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
