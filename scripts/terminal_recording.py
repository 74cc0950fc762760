"""Record a first run as docs/images/first-run.svg: an animation of real commands.

Run ``python -m scripts.terminal_recording`` in the root of the checkout. The commands are processes
in an empty home, with the encoder that an installation without extras has; what they print is
shown whole, folded as on a terminal of `COLUMNS` columns. Only the pace of the animation is ours,
so two recordings differ in the times that the commands print and in nothing else.

The animation is CSS in one SVG without scripts, fonts or links. It plays once and then stays. Where
the reader prefers reduced motion, or nothing animates, the end is shown at once; the colours follow
the colour scheme of the reader.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from expertctl.cli.output import fold

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "first-run.svg"
EXPERTCTL = Path(sys.executable).with_name("expertctl")
COMMANDS = (
    ("run", "Sort these numbers: 41, 17, 23, 15"),
    ("run", "Answer with an exclamation mark. What is the plural of city?"),
    ("list",),
)
COLUMNS = 104
LIMIT_SECONDS = 300
_COLUMN, _LINE, _MARGIN = 8.4, 20, 16
"""Widths and heights in pixels of the picture; a letter is 14 pixels high."""
_KEY_SECONDS, _START_SECONDS, _LINE_SECONDS, _READ_SECONDS = 0.03, 0.5, 0.07, 1.6
_MEASURED = re.compile(r"\d+(?= (?:tokens/s|ms)\b)")
_STYLE = """
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
fill:#1f2328;white-space:pre}
rect{fill:#fff;stroke:#d1d9e0}.prompt{fill:#1a7f37}.command{font-weight:600}.remark{fill:#59636e}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}rect{fill:#0d1117;stroke:#3d444d}
.prompt{fill:#3fb950}.remark{fill:#9198a1}}
@media (prefers-reduced-motion:no-preference){
.line{animation:show 1ms linear backwards}.typed{animation:type linear backwards}
@keyframes show{from{visibility:hidden}}
@keyframes type{from{clip-path:inset(-4px 100% -4px 0)}to{clip-path:inset(-4px 0 -4px 0)}}}
"""


@dataclass(frozen=True, slots=True)
class RecordedCommand:
    """A command as it is typed, and the lines it printed."""

    typed: str
    lines: tuple[str, ...]


def record_commands() -> list[RecordedCommand]:
    """Run the commands in a new home.

    Raises:
        CalledProcessError: when one fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        environment = {**kept, "HOME": folder, "EXPERT_ENCODER": "lexical", "NO_COLOR": "1"}
        return [_record(words, folder, environment) for words in COMMANDS]


def _record(words: tuple[str, ...], folder: str, environment: dict[str, str]) -> RecordedCommand:
    done = subprocess.run(  # noqa: S603  # our own program
        [EXPERTCTL, *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
        check=True,
    )
    typed = ["expertctl", words[0], *(f'"{text}"' for text in words[1:])]
    return RecordedCommand(" ".join(typed), tuple(map(str.rstrip, done.stdout.splitlines())))


def mask_times(text: str) -> str:
    """Return a text without the measured times, which differ from run to run."""
    return _MEASURED.sub("…", text)


def draw_recording(commands: Sequence[RecordedCommand]) -> str:
    """Return the animation as SVG."""
    lines, seconds, row = list[str](), 0.4, 0
    for command in commands:
        typing = len(command.typed) * _KEY_SECONDS
        lines.append(_draw_prompt(command.typed, row, seconds, typing))
        seconds += typing + _START_SECONDS
        row += 1
        for line in command.lines:
            kind = "line remark" if line.startswith(" ") else "line"
            for part in fold(line, COLUMNS).split("\n"):
                if part:
                    lines.append(_draw_line(part, row, seconds, kind))
                seconds += _LINE_SECONDS
                row += 1
        seconds += _READ_SECONDS
        row += 1
    width, height = round(COLUMNS * _COLUMN) + 2 * _MARGIN, (row - 1) * _LINE + 2 * _MARGIN
    transcript = "\n".join(f"$ {c.typed}\n" + "\n".join(c.lines) for c in commands)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" xml:space="preserve" role="img" aria-labelledby="title text">\n'
        f'<title id="title">A first run of expertctl in a terminal</title>\n'
        f'<desc id="text">{escape(transcript)}</desc>\n<style>{_STYLE}</style>\n'
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )


def _draw_prompt(typed: str, row: int, seconds: float, typing: float) -> str:
    """Return the line of a command, which appears letter by letter."""
    style = f"animation-delay:{seconds:.2f}s;animation-duration:{typing:.2f}s;"
    style += f"animation-timing-function:steps({len(typed)})"
    y = _MARGIN + row * _LINE + 14
    prompt = _draw_text("$", _MARGIN, y, f'class="line prompt" style="{_delay(seconds - 0.4)}"')
    x = _MARGIN + 2 * _COLUMN
    return prompt + _draw_text(typed, x, y, f'class="typed command" style="{style}"')


def _draw_line(line: str, row: int, seconds: float, kind: str) -> str:
    """Return one line of output; what is indented, such as statistics, is a remark."""
    text = line.lstrip()
    indent = len(line) - len(text)
    x, y = _MARGIN + indent * _COLUMN, _MARGIN + row * _LINE + 14
    return _draw_text(text, x, y, f'class="{kind}" style="{_delay(seconds)}"')


def _draw_text(text: str, x: float, y: float, attributes: str) -> str:
    """Return a text as wide as its columns, whatever font the reader has."""
    size = f'textLength="{len(text) * _COLUMN:.1f}"'
    return f'<text x="{x:.1f}" y="{y}" {size} {attributes}>{escape(text)}</text>'


def _delay(seconds: float) -> str:
    return f"animation-delay:{seconds:.2f}s"


if __name__ == "__main__":
    PICTURE.write_text(draw_recording(record_commands()), encoding="utf-8")
