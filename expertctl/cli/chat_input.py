"""What the user of a chat says: one line, or several that belong together.

A line that ends in a backslash goes on in the next one. Three quotation marks at the beginning of
a line open a block that lasts until a line ends with three. A text pasted into a terminal is one
message. A single line that begins with a slash is a command.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from expertctl.cli.piped import is_terminal
from expertctl.errors import InvalidPackageError, UsageError

PROMPT = "> "
FURTHER = ". "
QUOTES = '"""'
_MAX_LINE_BYTES = 4 * 500_001
"""More bytes than the longest prompt can have in UTF-8."""

ReadLine = Callable[[str], str | None]
"""Shows a prompt, returns a line without its end; ``None`` at the end of the input."""


@dataclass(frozen=True, slots=True)
class Said:
    """A message to the model, or a command to the chat."""

    text: str
    is_command: bool = False


def next_said(read_line: ReadLine) -> Said | None:
    """Return what the user says next; ``None`` at the end of the input.

    Raises:
        UsageError: when the input ends within a block.
    """
    line = read_line(PROMPT)
    if line is None:
        return None
    if line.lstrip().startswith(QUOTES):
        return Said(_block(line.lstrip().removeprefix(QUOTES), read_line))
    text = _continued(line, read_line)
    return Said(text, is_command=text.lstrip().startswith("/") and "\n" not in text)


def _continued(line: str, read_line: ReadLine) -> str:
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        further = read_line(FURTHER)
        if further is None:
            return "\n".join(lines)
        line = further
    return "\n".join([*lines, line])


def _block(line: str, read_line: ReadLine) -> str:
    lines = []
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        further = read_line(FURTHER)
        if further is None:
            raise UsageError(
                f"the input ends within a block that began with {QUOTES}",
                hint=f"end it with {QUOTES}",
            )
        line = further
    return "\n".join([*lines, line.rstrip().removesuffix(QUOTES)]).strip("\n")


def line_reader(*, as_json: bool = False) -> ReadLine:
    """Return a reader of stdin; it edits lines if stdin and stdout are terminals, without JSON."""
    if not is_terminal():
        return _piped_line
    if as_json or not sys.stdout.isatty():
        return _plain_line
    with suppress(ImportError):  # readline is not on every system, nor needed
        import readline

        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")
    return _edited_line


def _edited_line(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        sys.stdout.write("\n")
        return None
    except UnicodeDecodeError as error:
        raise _not_text(error) from error


def _plain_line(prompt: str) -> str | None:
    """Read from a terminal, with the prompt on stderr: stdout is for answers alone."""
    sys.stderr.write(prompt)
    sys.stderr.flush()
    return _piped_line(prompt)


def _piped_line(_: str) -> str | None:
    if sys.stdin is None:  # closed by the shell: <&-
        return None
    line = sys.stdin.buffer.readline(_MAX_LINE_BYTES)
    if len(line) == _MAX_LINE_BYTES:
        raise UsageError(
            "a line of stdin is longer than any prompt may be", hint="write one message a line"
        )
    try:
        return line.decode("utf-8").removesuffix("\n").removesuffix("\r") if line else None
    except UnicodeDecodeError as error:
        raise _not_text(error) from error


def _not_text(error: UnicodeDecodeError) -> InvalidPackageError:
    problem = f"a line is not UTF-8 at byte {error.start}"
    return InvalidPackageError("stdin", [problem], hint="convert it, e.g. with iconv")
