"""What goes on around an answer of ``chat``: reading files for it, and saving its plan."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from expertctl.cli.named_file import write_file

if TYPE_CHECKING:
    from expertctl.digest import Progress


class StoppedError(Exception):
    """The user stopped an answer while files were read for it."""


class Loading:
    """Shows the progress of reading for an answer; stops it when the user stops the answer."""

    def __init__(self) -> None:
        """Show nothing yet."""
        self.report: Progress | None = None
        self.unwanted: Callable[[], bool] = lambda: False

    def __call__(self, count: int) -> None:
        """Count bytes that were read.

        Raises:
            StoppedError: when the user does not want the answer any more.
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
