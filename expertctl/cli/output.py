"""What goes to the terminal: data on stdout, everything else on stderr.

`VERBOSITY` decides what of everything else is printed: ``--quiet`` hides notes and progress, not
warnings and errors; ``--verbose`` adds the texts of `debug`.

With ``--json``, stdout holds one JSON document and nothing else. Text from packages is stripped of
control characters before a terminal sees it.

Answers are wrapped for a terminal while they are written, and left as they are for a program. A
word is held back until it is complete, so lines break between words. Text without spaces, such as
Chinese, may break between any two characters. Lines of a fenced block are not wrapped, because
their line ends mean something, nor is a word wider than the terminal, nor a command.

Tables come from `format_table`, which cuts what is too wide for a terminal; a pipe gets all of it.
"""

import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import compress
from pathlib import Path
from threading import Lock
from typing import Annotated, Literal, TextIO

import typer

from expertctl.errors import (
    WARNING_PREFIX,
    DiskFullError,
    ExpertError,
    NotFoundError,
    replace_unsafe,
)
from expertctl.files import NO_SPACE_ERRORS, write_to_path

_MIN_WIDTH = 20
"""Fewest columns of folded text."""
_GAP = "  "
_SHORTEST_CELL = 10
"""Fewest columns to which a cell is cut."""
_COMMAND = re.compile(r"`[^`]*`|(?:^ *|(?<=  )|(?<=^hint: ))(?:expertctl|\S*python\S*|pip|uv) .*")
"""A command in a text, or on a line or in a cell of its own, where no line is broken."""
_UNIT = re.compile(r"(?<=\d) (?=(?:[kMGT]?i?B|ms|s|%|tokens(?:/s)?)(?!\w))")
"""The space between a number and its unit, where no line is broken."""
_QUOTED_CHARACTERS = 300
_PRINT_LOCK = Lock()
_UNBROKEN_SPACE = "\0"
"""Stands for a space at which no line is broken; `make_printable` removes it from any text."""

_ALWAYS_PRINTED = (WARNING_PREFIX, "error: ")
_STYLES = {WARNING_PREFIX: "1;33", "error: ": "1;31", "hint: ": "1;36"}
"""Beginnings of lines, and the attributes in which a terminal shows them: bold, and a colour."""
_DIM = "2"
Colour = Literal["auto", "always", "never"]


class Verbosity:
    """How much goes to stderr; `expertctl.cli.help` sets it from the options of a command."""

    def __init__(self) -> None:
        """Start with notes and progress, without details, and with colour on a terminal."""
        self.is_quiet = False
        self.is_verbose = False
        self.colour: Colour = "auto"


VERBOSITY = Verbosity()
"""Of this process: any thread may print."""

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout.", show_default=False)
]


def emit(document: Mapping[str, object], text: str, *, as_json: bool) -> None:
    """Print the result of a command: the document with ``--json``, else the text."""
    if as_json:
        print_json(document)
    elif text:
        _print_line(_fold_for_stream(text, sys.stdout), sys.stdout)


def print_json(document: Mapping[str, object]) -> None:
    """Print one JSON document on stdout, in ASCII where stdout cannot take its text."""
    text = json.dumps(document, ensure_ascii=False)
    plain = text == _escape_unencodable(text, sys.stdout)
    _print_line(text if plain else json.dumps(document), sys.stdout)


def write_piece(text: str) -> None:
    """Print a part of a text as it comes; a terminal gets no control characters."""
    shown = make_printable(text) if sys.stdout.isatty() else text
    sys.stdout.write(_escape_unencodable(shown, sys.stdout))
    sys.stdout.flush()


def note(text: str, *, dim: bool = False) -> None:
    """Print a line on stderr; ``--quiet`` hides it unless it is a warning or an error."""
    if not VERBOSITY.is_quiet or text.startswith(_ALWAYS_PRINTED):
        print_message(text, dim=dim)


def print_message(text: str, *, dim: bool = False) -> None:
    """Print a line on stderr, also with ``--quiet``: the user asked for it, or must know it."""
    shown = _fold_for_stream(text, sys.stderr)
    _print_line(_add_colour(shown, dim=dim) if has_colour(sys.stderr) else shown, sys.stderr)


def has_colour(stream: TextIO) -> bool:
    """Return whether a stream is coloured: by ``--color``, else the environment, else a terminal.

    See https://no-color.org and https://force-color.org.
    """
    if VERBOSITY.colour != "auto":
        return VERBOSITY.colour == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    if sys.platform == "win32":
        return "WT_SESSION" in os.environ and stream.isatty()
    return os.environ.get("TERM", "dumb") != "dumb" and stream.isatty()


def _add_colour(text: str, *, dim: bool) -> str:
    """Add the control sequences of colours to printable text."""
    if dim:
        return _paint(text, _DIM)
    return "\n".join(map(_paint_beginning, text.split("\n")))


def _paint_beginning(line: str) -> str:
    for beginning, attributes in _STYLES.items():
        if line.startswith(beginning):
            word = beginning.rstrip()
            return _paint(word, attributes) + line[len(word) :]
    return line


def _paint(text: str, attributes: str) -> str:
    return f"\x1b[{attributes}m{text}\x1b[0m"


def debug(text: str) -> None:
    """Print a line on stderr with ``--verbose``; a stderr that takes no text is no error."""
    if VERBOSITY.is_verbose and not sys.stderr.closed:
        with suppress(OSError):
            print_message(text)


def make_note_once() -> Callable[[str], None]:
    """Return a function like `print_message` that prints a text once; any thread may call it."""
    printed: set[str] = set()

    def say(text: str) -> None:
        if text not in printed:
            printed.add(text)
            print_message(text)

    return say


def warn(messages: Iterable[str]) -> None:
    """Print warnings, one a line."""
    for message in messages:
        note(f"{WARNING_PREFIX}{message}")


def fail(error: ExpertError, *, as_json: bool) -> None:
    """Print an error: the message, a blank line, the hint; with ``--json`` also as a document."""
    hint = f"\n\nhint: {error.hint}" if error.hint else ""
    note(f"error: {error.message}{hint}")
    if as_json:
        fields = {"code": error.code, "message": error.message, "hint": error.hint}
        with suppress(OSError):  # the error may be that stdout is full or closed
            print_json({"error": fields})
            sys.stdout.flush()


def make_printable(text: str) -> str:
    """Replace characters that could control a terminal or reorder text; line ends and tabs stay."""
    return replace_unsafe(text)


def _print_line(text: str, stream: TextIO) -> None:
    """Print a line at once, so that lines of several threads and progress bars do not mix."""
    with _PRINT_LOCK:
        stream.write(f"{_escape_unencodable(text, stream)}\n")


def _fold_for_stream(text: str, stream: TextIO) -> str:
    """Return printable text, folded at spaces if the stream is a terminal."""
    width = terminal_width(stream)
    shown = make_printable(text)
    return "\n".join(fold(line, width) for line in shown.split("\n")) if width else shown


def terminal_width(stream: TextIO) -> int:
    """Return the columns of a terminal; 0 for a pipe or a file, where lines may have any length.

    ``COLUMNS`` in the environment replaces what the terminal says.
    """
    if not stream.isatty():
        return 0
    chosen = os.environ.get("COLUMNS", "")
    if chosen.isdecimal() and int(chosen):
        return int(chosen)
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except OSError:
        return 0


def fold(line: str, width: int) -> str:
    """Break a line at spaces; the rest is indented to the last column of the left half.

    Two spaces separate cells; a cell such as ``2.6 MB`` is broken only if it is wider than a line,
    and a command never.
    """
    if count_columns(line) <= width:
        return line
    indent = len(line) - len(line.lstrip())
    column = line.rfind("  ", indent, width // 2) + 2
    start, hanging = (column, column) if column > 1 else (indent, indent + 2)
    if count_columns(line[start:].split()[0]) > width - start:  # it has more room on the next line
        start, hanging = indent, indent + 2
    wide_gap = len(line[start:]) - len(line[start:].lstrip())
    if wide_gap and start + wide_gap + _MIN_WIDTH <= width:  # the column begins after the middle
        start = hanging = start + wide_gap
    hanging += count_columns(line[:start]) - start
    room = max(width - hanging, _MIN_WIDTH)
    line = _COMMAND.sub(_join_words, line)
    cells = re.split("( {2,})", _UNIT.sub(_UNBROKEN_SPACE, line[start:]))
    whole = "".join(
        cell.replace(" ", _UNBROKEN_SPACE) if 0 < count_columns(cell.strip()) <= room else cell
        for cell in cells
    )
    shown = line[:start] + f"\n{' ' * hanging}".join(_break_at_spaces(whole, room))
    return shown.replace(_UNBROKEN_SPACE, " ")


def _break_at_spaces(text: str, room: int) -> list[str]:
    lines = [""]
    for gap, word in re.findall("( *)([^ ]+)", text):
        if lines[-1] and count_columns(lines[-1] + gap + word) > room:
            lines.append(word)
        else:
            lines[-1] += gap + word
    return lines


def _join_words(found: re.Match[str]) -> str:
    """Protect the spaces of a command, but not its indentation."""
    command = found[0].lstrip()
    return found[0][: -len(command)] + command.replace(" ", _UNBROKEN_SPACE)


def _escape_unencodable(text: str, stream: TextIO) -> str:
    """Escape what the encoding of a stream lacks, which would otherwise raise."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, shorten: Sequence[str] = ()
) -> str:
    """Align columns with two spaces between them; readable without colour.

    On a terminal that is too narrow, empty columns are left out, and cells of the columns named in
    ``shorten`` are cut, the widest first. If that is not enough, each row becomes a record with a
    line for each cell. Columns that users copy, such as digests, must not be named.
    """
    widths = [max(map(count_columns, column)) for column in zip(header, *rows, strict=True)]
    room = terminal_width(sys.stdout) or sum(widths) + len(_GAP) * len(widths)
    least = {n: max(_SHORTEST_CELL, len(x)) for n, x in enumerate(header) if x in shorten}
    while sum(widths) + len(_GAP) * (len(widths) - 1) > room:
        if not all(full := [any(column) for column in zip(*rows, strict=True)]):
            shown = [list(compress(line, full)) for line in (header, *rows)]
            return format_table(shown[0], shown[1:], shorten=shorten)
        widest = max(least, key=lambda n: (widths[n] > least[n], widths[n]), default=None)
        if widest is None or widths[widest] <= least[widest]:
            return format_records(header, rows)
        widths[widest] -= 1
    cells = [map(_pad, map(truncate, line, widths), widths) for line in (header, *rows)]
    return "\n".join(_GAP.join(line).rstrip() for line in cells)


def format_records(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a block of lines ``name: value`` for each row, without empty cells."""
    width = max(map(count_columns, header)) + 1
    labels = [_pad(f"{name}:", width) if name else "" for name in header]
    blocks = [
        [(label, cell.strip()) for label, cell in zip(labels, row, strict=True) if cell.strip()]
        for row in rows
    ]
    return "\n\n".join(map(format_fields, blocks))


def format_fields(rows: Sequence[Sequence[str]]) -> str:
    """Return lines of a name and a value, the values below each other."""
    width = max((count_columns(name) for name, _ in rows), default=0)
    return "\n".join(f"{_pad(name, width)}{_GAP}{value}" if name else value for name, value in rows)


def _pad(text: str, width: int) -> str:
    return text + " " * (width - count_columns(text))


def truncate(text: str, width: int) -> str:
    """Cut a text to a number of columns: words at their end, a name in its middle."""
    if count_columns(text) <= width:
        return text
    tail = "" if " " in text.strip() else _take_columns(text[::-1], (width - 1) // 2)[::-1]
    return _take_columns(text, width - 1 - count_columns(tail)).rstrip() + "…" + tail


def _take_columns(text: str, width: int) -> str:
    """Return the longest beginning that is not wider than a number of columns."""
    end = 0
    while end < len(text) and count_columns(text[: end + 1]) <= width:
        end += 1
    return text[:end]


def format_count(count: int, thing: str) -> str:
    """Return a number with its noun: ``1 expert``, ``2 experts``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def format_percent(share: float | None) -> str:
    """Return a share of 1 as a percentage; ``-`` for None."""
    return "-" if share is None else f"{100 * share:.1f} %"


def format_rate(number: float) -> str:
    """Return a rate with one decimal, or none from 100 on."""
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}"


def quote(text: str) -> str:
    """Return the first 300 characters as a JSON string, so that spaces and line ends show."""
    end = "…" if len(text) > _QUOTED_CHARACTERS else ""
    return json.dumps(text[:_QUOTED_CHARACTERS] + end, ensure_ascii=False)


def write_file(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write to a path that the user named, through links and into pipes.

    Raises:
        DiskFullError: when there is no space left.
        NotFoundError: when it cannot be written for any other reason.
    """
    try:
        write_to_path(path, data, mode=mode)
    except OSError as error:
        if error.errno in NO_SPACE_ERRORS:
            hint = "free some space, or name a file elsewhere"
            raise DiskFullError(f"{path}: no space left", hint=hint) from error
        message = f"{path} cannot be written: {error.strerror or error}"
        raise NotFoundError(message, hint="name a file in a writable folder") from error


_TAB = 8
_JOINER = "\N{ZERO WIDTH JOINER}"
_FENCES = ("```", "~~~")
_SKIN_TONES = range(0x1F3FB, 0x1F400)


class WordWrap:
    """Wraps one answer on one terminal."""

    def __init__(self, width: Callable[[], int]) -> None:
        """Start at the left margin; ``width`` returns the columns, 0 for unlimited."""
        self._width = width
        self._column = 0
        self._gap, self._word = "", ""
        self._line = ""
        """The line so far, as the model writes it."""
        self._is_fenced, self._overflows = False, False

    def feed(self, text: str) -> str:
        """Take the next piece of an answer and return what can be printed now."""
        room = self._width()
        if room < _MIN_WIDTH:
            return self.finish() + text
        return "".join(self._feed_character(character, room) for character in text)

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._place_word(self._width())

    def _feed_character(self, character: str, room: int) -> str:
        if character == "\n":
            return self._place_word(room) + self._take_gap() + self._start_line()
        self._line += character if len(self._line) < room else ""
        if character in " \t":
            shown = self._place_word(room)
            self._gap, self._overflows = self._gap + character, False
            return shown + (self._take_gap() if self._is_fenced else "")
        shown = self._place_word(room) if _can_break(self._word, character) else ""
        self._word += character
        if self._is_fenced or self._overflows or count_columns(self._word) >= room:
            shown += self._place_word(room)
            self._overflows = True
        return shown

    def _place_word(self, room: int) -> str:
        """Return the held word, on a new line where the current one has no room for it."""
        if not self._word:
            return ""
        gap, word = self._gap, self._word
        self._gap = self._word = ""
        taken = count_columns(gap, self._column) + count_columns(word)
        fits = self._column + taken <= room or not self._column
        if fits or self._is_fenced or self._overflows:
            self._column = _find_last_column(self._column + taken, room)
            return gap + word
        self._column = _find_last_column(count_columns(word), room)
        return f"\n{word}"

    def _take_gap(self) -> str:
        gap, self._gap = self._gap, ""
        self._column += count_columns(gap, self._column)
        return gap

    def _start_line(self) -> str:
        if self._line.lstrip().startswith(_FENCES):
            self._is_fenced = not self._is_fenced
        self._line, self._column, self._overflows = "", 0, False
        return "\n"


def count_columns(text: str, start: int = 0) -> int:
    """Return how many columns of a terminal a text takes that begins in column ``start``."""
    column = start
    for character in text:
        column += _TAB - column % _TAB if character == "\t" else _measure_character(character)
    return column - start


def _find_last_column(taken: int, room: int) -> int:
    """Return the column after ``taken`` columns of text that the terminal breaks at ``room``."""
    return (taken - 1) % room + 1 if taken and room else 0


def _measure_character(character: str) -> int:
    if character.isascii():
        return 1
    if unicodedata.category(character) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _can_break(word: str, character: str) -> bool:
    """Return whether a line may end between a word and the character after it."""
    if not word or word.endswith(_JOINER) or ord(character) in _SKIN_TONES:
        return False
    if _measure_character(character) == 2:
        return True
    return character.isalnum() and _measure_character(word[-1]) == 2


class AnswerStream:
    """Writes the pieces of one answer to stdout; `end` must follow the last one."""

    def __init__(self) -> None:
        """Start with nothing written."""
        self._wrap = WordWrap(lambda: terminal_width(sys.stdout))
        self._last_piece = ""

    def write(self, piece: str) -> None:
        """Print as much of a piece as can be printed now."""
        self._last_piece = piece or self._last_piece
        self._print(self._wrap.feed(piece))

    def end(self) -> None:
        """Print what was held back, and end the line unless the answer did."""
        held = self._wrap.finish()
        self._print(
            held if not self._last_piece or self._last_piece.endswith("\n") else f"{held}\n"
        )
        self._last_piece = ""

    def _print(self, text: str) -> None:
        if text:
            write_piece(text)


@contextmanager
def open_answer_stream() -> Iterator[AnswerStream]:
    """Open a stream for one answer, and end it however the answer ends."""
    stream = AnswerStream()
    try:
        yield stream
    finally:
        stream.end()
