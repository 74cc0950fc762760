"""Progress of long work on stderr: bars on a terminal, lines now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from expertctl.cli.output import VERBOSITY, note
from expertctl.digest import Progress, ignore_progress
from expertctl.settings import format_size

if TYPE_CHECKING:
    from rich.progress import FileSizeColumn, TaskID
    from rich.progress import Progress as Bars

LINE_SECONDS = 10.0
"""Seconds between two lines of progress where there is no terminal."""
_MAX_LINES = 60
"""Most progress lines in the first ten minutes; later ones come less and less often."""


@contextmanager
def show_progress(label: str, total: int | None, *, as_json: bool = False) -> Iterator[Progress]:
    """Show a progress bar on stderr while bytes are handled; only on a terminal.

    Yields a callable that takes the number of bytes just handled.
    """
    with _show_bar(label, total, in_bytes=True, as_json=as_json) as report:
        yield report


@contextmanager
def show_download(total: int, *, as_json: bool) -> Iterator[Progress]:
    """Show how many bytes have come of a download; lines where there is no terminal."""
    if not (VERBOSITY.is_quiet or sys.stderr.isatty()):
        yield make_line_reporter("downloading", total, format_count=format_size)
        return
    with _show_bar("downloading", total, in_bytes=True, as_json=as_json) as report:
        yield report


class LoadingBar:
    """The progress up to the first word: bytes and kernels, then tokens of the prompt.

    Bytes may be counted in several threads.
    """

    def __init__(self, bars: "Bars | None", label: str) -> None:
        """Show bars; without a terminal, lines for kernels only."""
        self._bars, self._compiled = bars, 0
        self._bytes_task = None if bars is None else bars.add_task(label, total=None)
        self._kernels_task: TaskID | None = None
        self._reading_task: TaskID | None = None
        self._lines: Progress = ignore_progress

    def __call__(self, count: int) -> None:
        """Count loaded bytes."""
        if self._bars is not None and self._bytes_task is not None:
            self._bars.update(self._bytes_task, advance=count)

    def report_kernels(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` kernels are compiled; nothing for 0 of 0."""
        if not total:
            return
        if self._bars is not None:
            self._show_kernels(self._bars, done, total)
            return
        if not done:
            self._compiled, self._lines = 0, make_line_reporter("compiling kernels", total)
        self._lines(done - self._compiled)
        self._compiled = done

    def report_reading(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` tokens of the prompt are read, when all is loaded."""
        if self._bars is None:
            return
        if self._reading_task is None:
            if self._bytes_task is not None:
                self._bars.remove_task(self._bytes_task)
                self._bytes_task = None
            self._reading_task = self._bars.add_task(
                "reading the prompt", total=total, counts_items=True
            )
        self._bars.update(self._reading_task, completed=done, total=total)

    def _show_kernels(self, bars: "Bars", done: int, total: int) -> None:
        if self._kernels_task is not None and done in {0, total}:
            bars.remove_task(self._kernels_task)
            self._kernels_task = None
        if done == total:
            return
        if self._kernels_task is None:
            self._kernels_task = bars.add_task("compiling kernels", total=total, counts_items=True)
        bars.update(self._kernels_task, completed=done, refresh=True)


@contextmanager
def show_loading(label: str, *, as_json: bool) -> Iterator[LoadingBar]:
    """Show progress on stderr while a base and its experts are loaded; see `LoadingBar`."""
    if as_json or VERBOSITY.is_quiet or not sys.stderr.isatty():
        yield LoadingBar(None, label)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), _build_amount_column())
    console = Console(stderr=True)
    with Bars(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        yield LoadingBar(bars, label)


@contextmanager
def show_counter(label: str, total: int, *, as_json: bool) -> Iterator[Progress]:
    """Show a progress bar while items are handled one by one; lines where there is no terminal."""
    if not (VERBOSITY.is_quiet or sys.stderr.isatty()):
        yield make_line_reporter(label, total)
        return
    with _show_bar(label, total, in_bytes=False, as_json=as_json) as report:
        yield report


class StepBar:
    """The progress of steps, with a text that changes, such as the loss of a training."""

    def __init__(self, label: str, *, as_json: bool) -> None:
        """Show nothing before the first step, which tells how many there are."""
        self._label, self._as_json, self._text, self._done = label, as_json, "", 0
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._lines: Progress | None = None

    def __call__(self, done: int, total: int, text: str) -> None:
        """Show that ``done`` of ``total`` steps are done."""
        if VERBOSITY.is_quiet:
            return
        self._text = text
        if self._as_json or not sys.stderr.isatty():
            if self._lines is None:
                self._done = done
                self._lines = make_line_reporter(
                    self._label,
                    total,
                    before=done,
                    describe=lambda: self._text and f", {self._text}",
                )
            self._lines(done - self._done)
        else:
            self._show(done, total)
        self._done = done

    def close(self) -> None:
        """Remove the bar."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _show(self, done: int, total: int) -> None:
        if self._bars is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bars

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            console = Console(stderr=True)
            self._bars = Bars(*columns, TimeRemainingColumn(), console=console, transient=True)
            self._task = self._bars.add_task(self._label, total=total)
            self._bars.start()
        assert self._task is not None
        label = f"{self._label}, {self._text}" if self._text else self._label
        self._bars.update(self._task, completed=done, total=total, description=label)


def make_line_reporter(
    label: str,
    total: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    format_count: Callable[[int], str] = str,
    before: int = 0,
    describe: Callable[[], str] = str,
) -> Progress:
    """Return a progress callback that prints a line at most every `LINE_SECONDS`.

    After ten minutes, a line follows when another sixtieth of the elapsed time has passed. So
    many as ``before`` were done earlier, which tells nothing of the speed. Each line ends with what
    ``describe`` returns.
    """
    start = printed_at = clock()
    done = before

    def report(count: int) -> None:
        nonlocal printed_at, done
        done += count
        now = clock()
        spent = now - start
        if now - printed_at < max(LINE_SECONDS, spent / _MAX_LINES) or done >= total:
            return
        printed_at = now
        seconds = spent / (done - before) * (total - done) if done > before else None
        left = "" if seconds is None else f", about {_format_duration(seconds)} left"
        note(f"{label}: {format_count(done)} of {format_count(total)}{left}{describe()}")

    return report


def _format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


@contextmanager
def _show_bar(
    label: str, total: int | None, *, in_bytes: bool, as_json: bool
) -> Iterator[Progress]:
    if as_json or VERBOSITY.is_quiet or not sys.stderr.isatty():
        yield ignore_progress
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
    amount_columns = (
        (amount, TimeRemainingColumn()) if total else (_build_amount_column(), TimeElapsedColumn())
    )
    columns = (TextColumn("{task.description}"), BarColumn(), *amount_columns)
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total)
        yield lambda count: bars.update(task, advance=count)


def _build_amount_column() -> "FileSizeColumn":
    """Return a column with the bytes read, empty before the first byte, or with items."""
    from rich.progress import FileSizeColumn, Task
    from rich.text import Text

    class AmountColumn(FileSizeColumn):
        def render(self, task: Task) -> Text:
            if task.fields.get("counts_items"):
                return Text(f"{task.completed:.0f} of {task.total:.0f}")
            return super().render(task) if task.completed else Text("")

    return AmountColumn()
