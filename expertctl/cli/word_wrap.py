"""Wraps an answer for a terminal while it is written: lines are broken between words.

A word is held back until it is complete. Text that is written without spaces, such as Chinese, is
broken between any two characters. Lines of a fenced block stay as they are, because their line
ends mean something, and so does a word that is wider than the terminal.
"""

import unicodedata
from collections.abc import Callable

_NARROWEST = 20
_TAB = 8
_JOINER = "\N{ZERO WIDTH JOINER}"
_FENCES = ("```", "~~~")
_SKIN_TONES = range(0x1F3FB, 0x1F400)


class WordWrap:
    """The state of one answer on one terminal."""

    def __init__(self, width: Callable[[], int]) -> None:
        """Begin at the left margin; ``width`` returns the columns, 0 where there is no margin."""
        self._width = width
        self._column = 0
        self._gap, self._word = "", ""
        self._line = ""
        """The line so far, as the model writes it."""
        self._is_fenced, self._overflows = False, False

    def push(self, text: str) -> str:
        """Take the next piece of an answer, return what can be printed now."""
        room = self._width()
        if room < _NARROWEST:
            return self.finish() + text
        return "".join(self._take(character, room) for character in text)

    def finish(self) -> str:
        """Return what was held back."""
        return self._placed(self._width())

    def _take(self, character: str, room: int) -> str:
        if character == "\n":
            return self._placed(room) + self._gap_taken() + self._next_line()
        self._line += character if len(self._line) < room else ""
        if character in " \t":
            shown = self._placed(room)
            self._gap, self._overflows = self._gap + character, False
            return shown + (self._gap_taken() if self._is_fenced else "")
        shown = self._placed(room) if _may_break(self._word, character) else ""
        self._word += character
        if self._is_fenced or self._overflows or columns(self._word) >= room:
            shown += self._placed(room)
            self._overflows = True
        return shown

    def _placed(self, room: int) -> str:
        """Return the held word, on a new line where the current one has no room for it."""
        if not self._word:
            return ""
        gap, word = self._gap, self._word
        self._gap = self._word = ""
        taken = columns(gap, self._column) + columns(word)
        fits = self._column + taken <= room or not self._column
        if fits or self._is_fenced or self._overflows:
            self._column = _last_column(self._column + taken, room)
            return gap + word
        self._column = _last_column(columns(word), room)
        return f"\n{word}"

    def _gap_taken(self) -> str:
        gap, self._gap = self._gap, ""
        self._column += columns(gap, self._column)
        return gap

    def _next_line(self) -> str:
        if self._line.lstrip().startswith(_FENCES):
            self._is_fenced = not self._is_fenced
        self._line, self._column, self._overflows = "", 0, False
        return "\n"


def columns(text: str, start: int = 0) -> int:
    """Return how many columns of a terminal a text takes that begins in column ``start``."""
    column = start
    for character in text:
        column += _TAB - column % _TAB if character == "\t" else _width(character)
    return column - start


def _last_column(taken: int, room: int) -> int:
    """Return the column behind a text that the terminal breaks where it has no room for it."""
    return (taken - 1) % room + 1 if taken and room else 0


def _width(character: str) -> int:
    if character.isascii():
        return 1
    if unicodedata.category(character) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _may_break(word: str, character: str) -> bool:
    """Tell whether a line may end between a word and the character behind it."""
    if not word or word.endswith(_JOINER) or ord(character) in _SKIN_TONES:
        return False
    if _width(character) == 2:
        return True
    return character.isalnum() and _width(word[-1]) == 2
