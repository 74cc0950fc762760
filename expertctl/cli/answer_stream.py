"""An answer on stdout while it is written: as it is for a program, wrapped for a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from expertctl.cli.output import terminal_width, write_piece
from expertctl.cli.word_wrap import WordWrap


class AnswerStream:
    """Writes the pieces of one answer; `end` must follow the last one."""

    def __init__(self) -> None:
        """Write nothing yet."""
        self._wrap = WordWrap(lambda: terminal_width(sys.stdout))
        self._last = ""

    def write(self, piece: str) -> None:
        """Print what can be printed of a piece now."""
        self._last = piece or self._last
        self._put(self._wrap.push(piece))

    def end(self) -> None:
        """Print what was held back, and end the line unless the answer did."""
        held = self._wrap.finish()
        self._put(held if not self._last or self._last.endswith("\n") else f"{held}\n")
        self._last = ""

    def _put(self, text: str) -> None:
        if text:
            write_piece(text)


@contextmanager
def closing_stream() -> Iterator[AnswerStream]:
    """Lend a stream for one answer, and end it however the answer ends."""
    stream = AnswerStream()
    try:
        yield stream
    finally:
        stream.end()
