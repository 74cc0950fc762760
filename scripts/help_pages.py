"""Writes ``expertctl/cli/help_pages.json``: what ``--help`` of each command prints, at any width.

Run ``python -m scripts.help_pages`` after a change to a command; a test in ``tests/cli`` compares.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from typer.main import get_command

from expertctl.cli.app import app
from expertctl.cli.help import HELP_PAGES


class HelpRecorder:
    """Takes the calls that a formatter of help gets, as `replay_page` repeats them."""

    def __init__(self) -> None:
        """Start with an empty page."""
        self.calls: list[list[Any]] = []
        self._title = ""

    def write_usage(self, program: str, words: str = "") -> None:
        """Record the usage line."""
        self.calls.append(["usage", program, words])

    def write_paragraph(self) -> None:
        """Record nothing: each text begins a paragraph."""

    def indentation(self) -> Any:
        """Record nothing: each text is indented."""
        return nullcontext()

    def write_text(self, text: str) -> None:
        """Record a paragraph."""
        self.calls.append(["text", text])

    @contextmanager
    def section(self, title: str) -> Iterator[None]:
        """Name the next table."""
        self._title = title
        yield

    def write_dl(self, rows: list[tuple[str, str]]) -> None:
        """Record a table."""
        self.calls.append(["table", self._title, [list(row) for row in rows]])

    def write(self, text: str) -> None:
        """Record lines that are not folded."""
        self.calls.append(["lines", text])


def build_pages() -> dict[str, list[list[Any]]]:
    """Return the page of each command, by its words after ``expertctl``."""
    root = get_command(app)
    context = root.make_context("expertctl", ["help"], resilient_parsing=True)
    return {name.partition(" ")[2]: page for name, page in _list_pages(root, context)}


def _list_pages(command: Any, context: Any) -> Iterator[tuple[str, list[list[Any]]]]:
    recorder = HelpRecorder()
    command.format_help(context, recorder)
    yield context.command_path, recorder.calls
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            yield from _list_pages(below, type(context)(below, info_name=name, parent=context))


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(page)}" for name, page in build_pages().items()]
    HELP_PAGES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
