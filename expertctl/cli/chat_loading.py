"""What goes on around an answer of ``chat``: reading for it, and saving the plan it had."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from expertctl.cli.named_file import write_file

if TYPE_CHECKING:
    from expertctl.digest import Progress


class StoppedError(Exception):
    """The user stopped an answer while something was read for it."""


class Loading:
    """Shows what is read for an answer, and ends that when the answer is not wanted any more."""

    def __init__(self) -> None:
        """Show nothing yet."""
        self.report: Progress | None = None
        self.unwanted: Callable[[], bool] = lambda: False

    def __call__(self, count: int) -> None:
        """Count bytes that were read.

        Raises:
            StoppedError: when nobody wants the answer any more.
        """
        if self.unwanted():
            raise StoppedError
        if self.report is not None:
            self.report(count)


def save_plan(path: Path, document: dict[str, object]) -> None:
    """Write a plan as JSON.

    Raises:
        DiskFullError: when there is no room.
        NotFoundError: when the file cannot be written.
    """
    text = json.dumps(document, ensure_ascii=False, indent=2)
    write_file(path, text.encode() + b"\n")
