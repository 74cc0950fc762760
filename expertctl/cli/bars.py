"""Bars and sparklines of characters, in ASCII where the terminal lacks blocks."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_PLAIN_LEVELS = "_.-~=+*#"
NOTHING = "·"
_PLAIN_NOTHING = " "
_DEFAULT_COLUMNS = 80


@dataclass(frozen=True, slots=True)
class Canvas:
    """What a terminal can show."""

    columns: int
    has_blocks: bool

    @classmethod
    def of_stdout(cls) -> "Canvas":
        """Return what stdout can show; a pipe is 80 columns wide."""
        columns = shutil.get_terminal_size((_DEFAULT_COLUMNS, 24)).columns
        width = columns if sys.stdout.isatty() or "COLUMNS" in os.environ else _DEFAULT_COLUMNS
        return cls(width, _can_encode(_EIGHTHS + _LEVELS + NOTHING, sys.stdout.encoding))

    def bar(self, share: float, width: int) -> str:
        """Draw a share of 1 as a bar of up to ``width`` characters, never empty above 0."""
        share = min(1.0, max(0.0, share))
        if not self.has_blocks:
            return "#" * max(round(share * width), int(share > 0))
        eighths = max(round(share * width * 8), int(share > 0))
        return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()

    def spark(self, values: Sequence[float | None], *, most: float) -> str:
        """Draw one character a value, as high as its share of the maximum; None is a dot."""
        levels = _LEVELS if self.has_blocks else _PLAIN_LEVELS
        nothing = NOTHING if self.has_blocks else _PLAIN_NOTHING
        top = len(levels) - 1
        return "".join(
            nothing if value is None else levels[min(top, int(value / most * top + 0.5))]
            for value in values
        )


def _can_encode(text: str, encoding: str | None) -> bool:
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
