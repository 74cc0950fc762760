"""What goes to the terminal: data on stdout, everything else on stderr.

With ``--json`` stdout holds one JSON document and nothing else. Text that comes from packages is
stripped of control characters before a terminal sees it.
"""

import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from expertctl.digest import Progress, no_progress
from expertctl.errors import ExpertError
from expertctl.plain_text import replace_unsafe
from expertctl.settings import human_limit as human_limit
from expertctl.settings import human_size as human_size

if TYPE_CHECKING:
    from rich.progress import FileSizeColumn

_NARROWEST = 20
"""Fewest columns of folded text."""
LINE_SECONDS = 10.0
"""How often a line tells the progress where there is no terminal."""
_MOST_LINES = 60
"""How many lines tell the first ten minutes; later ones are further and further apart."""
_GAP, _BELOW = "  ", "    "
_UNIT = re.compile(r"(?<=\d) (?=(?:[kMGT]?i?B|ms|s|%)(?!\w))")
"""The space between a number and its unit, where no line is broken."""
_ONE_LINE_AT_A_TIME = Lock()
_JOINT = "\0"
"""Stands for a space at which no line is broken; `printable` replaces it in any text."""

JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout.", show_default=False)
]


def emit(document: Mapping[str, object], text: str, *, as_json: bool) -> None:
    """Print the result of a command: the document with ``--json``, else the text."""
    if as_json:
        print_json(document)
    elif text:
        _say(_shown_on(text, sys.stdout), sys.stdout)


def print_json(document: Mapping[str, object]) -> None:
    """Print one JSON document on stdout, in ASCII where stdout cannot take its text."""
    text = json.dumps(document, ensure_ascii=False)
    plain = text == _encodable(text, sys.stdout)
    _say(text if plain else json.dumps(document), sys.stdout)


def write_piece(text: str) -> None:
    """Print a part of a text as it comes; a terminal gets no control characters."""
    shown = printable(text) if sys.stdout.isatty() else text
    sys.stdout.write(_encodable(shown, sys.stdout))
    sys.stdout.flush()


def note(text: str) -> None:
    """Say something that is not data."""
    _say(_shown_on(text, sys.stderr), sys.stderr)


def note_once() -> Callable[[str], None]:
    """Return a function like `note` that prints a text only once; any thread may call it."""
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            said.add(text)
            note(text)

    return say


def warn(messages: Iterable[str]) -> None:
    """Print warnings, one a line."""
    for message in messages:
        note(f"warning: {message}")


def fail(error: ExpertError, *, as_json: bool) -> None:
    """Print an error as the contract says: the fact, a blank line, the way out."""
    hint = f"\n\nhint: {error.hint}" if error.hint else ""
    note(f"error: {error.message}{hint}")
    if as_json:
        fields = {"code": error.code, "message": error.message, "hint": error.hint}
        with suppress(OSError):  # the error may be that stdout is full or closed
            print_json({"error": fields})
            sys.stdout.flush()


def printable(text: str) -> str:
    """Replace what could control a terminal or reorder text; line ends and tabs stay."""
    return replace_unsafe(text)


def _say(text: str, stream: TextIO) -> None:
    """Print a line at once: those of several threads, and of progress bars, must not mix."""
    with _ONE_LINE_AT_A_TIME:
        stream.write(f"{_encodable(text, stream)}\n")


def _shown_on(text: str, stream: TextIO) -> str:
    """Return a text as a person shall see it, folded on a terminal so that no word is broken."""
    width = terminal_width(stream)
    shown = printable(text)
    return "\n".join(fold(line, width) for line in shown.split("\n")) if width else shown


def terminal_width(stream: TextIO) -> int:
    """Return the columns of a terminal; 0 for a pipe or a file, which take lines of any length."""
    if not stream.isatty():
        return 0
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except OSError:
        return 0


def fold(line: str, width: int) -> str:
    """Break a line at spaces; the rest is indented to the last column of the left half.

    Two spaces separate cells; a cell such as ``2.6 MB`` is broken only if wider than a line.
    """
    if len(line) <= width:
        return line
    indent = len(line) - len(line.lstrip())
    column = line.rfind("  ", indent, width // 2) + 2
    start, hanging = (column, column) if column > 1 else (indent, indent + 2)
    wide_gap = len(line[start:]) - len(line[start:].lstrip())
    if wide_gap and start + wide_gap + _NARROWEST <= width:  # the column begins after the middle
        start = hanging = start + wide_gap
    room = max(width - hanging, _NARROWEST)
    cells = re.split("( {2,})", _UNIT.sub(_JOINT, line[start:]))
    whole = "".join(
        cell.replace(" ", _JOINT) if 0 < len(cell.strip()) <= room else cell for cell in cells
    )
    parts = textwrap.wrap(whole, room, break_long_words=False, break_on_hyphens=False)
    return line[:start] + f"\n{' ' * hanging}".join(parts).replace(_JOINT, " ")


def _encodable(text: str, stream: TextIO) -> str:
    """Escape what the encoding of a stream lacks, else it would end a command with a traceback."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns with two spaces between them; readable without colour.

    If a terminal has no room for all columns but the last, the ones that do not fit go to a line
    below, the same ones in each row.
    """
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    beside = _columns_beside(widths, terminal_width(sys.stdout))
    parts = [(line[:beside], line[beside:]) for line in lines]
    shown = [(_aligned(left, widths), _aligned(below, widths[beside:])) for left, below in parts]
    return "\n".join(f"{left}\n{_BELOW}{below}" if below else left for left, below in shown)


def _columns_beside(widths: Sequence[int], room: int) -> int:
    """Return how many columns fit on one line; a long last one is folded instead."""
    ends = [end - len(_GAP) for end in accumulate(width + len(_GAP) for width in widths)]
    if not room or len(ends) < 2 or ends[-2] <= room:
        return len(ends)
    return max(sum(end <= room for end in ends), 1)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return _GAP.join(map(str.ljust, cells, widths)).rstrip()


def counted(count: int, thing: str) -> str:
    """Return a number with its noun: ``1 expert``, ``2 experts``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


@contextmanager
def progress(label: str, total: int | None, *, as_json: bool = False) -> Iterator[Progress]:
    """Show a progress bar on stderr while bytes are handled; only on a terminal.

    Yields a callable that takes the number of bytes just handled.
    """
    with _bar(label, total, in_bytes=True, as_json=as_json) as report:
        yield report


@contextmanager
def counting(label: str, total: int, *, as_json: bool) -> Iterator[Progress]:
    """Show a progress bar while things are handled one by one; without a terminal, some lines."""
    if not sys.stderr.isatty():
        yield report_lines(label, total)
        return
    with _bar(label, total, in_bytes=False, as_json=as_json) as report:
        yield report


def report_lines(
    label: str, total: int, *, clock: Callable[[], float] = time.monotonic
) -> Progress:
    """Return a progress that says how far it is, in a line every `LINE_SECONDS` at most.

    What takes more than ten minutes has a line each sixtieth of the time that it took until then.
    """
    start = told = clock()
    done = 0

    def report(count: int) -> None:
        nonlocal told, done
        done += count
        now = clock()
        spent = now - start
        if now - told < max(LINE_SECONDS, spent / _MOST_LINES) or done >= total:
            return
        told = now
        left = f", about {_minutes(spent / done * (total - done))} left" if done else ""
        note(f"{label}: {done} of {total}{left}")

    return report


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


@contextmanager
def _bar(label: str, total: int | None, *, in_bytes: bool, as_json: bool) -> Iterator[Progress]:
    if as_json or not sys.stderr.isatty():
        yield no_progress
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    told = (amount, TimeRemainingColumn()) if total else (_read_size_column(), TimeElapsedColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *told)
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total)
        yield lambda count: bars.update(task, advance=count)


def _read_size_column() -> "FileSizeColumn":
    """Return a column with what was read; it is empty before the first byte."""
    from rich.progress import FileSizeColumn, Task
    from rich.text import Text

    class ReadSizeColumn(FileSizeColumn):
        def render(self, task: Task) -> Text:
            return super().render(task) if task.completed else Text("")

    return ReadSizeColumn()
