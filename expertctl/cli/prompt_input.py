"""Reads prompts, bodies, saved plans and chat messages from arguments, stdin and files.

::

    run "Sort these:"                     the prompt
    run Sort these numbers: 3, 1          the prompt, its words joined
    echo 3, 1 | run "Sort these:"         the prompt, and piped text as its body
    echo "Sort 3, 1" | run                piped text as the prompt; also run -
    echo 3, 1 | run "Sort these:" --body -

Only one of them can come from stdin. A command that does not need stdin must not hang on one that
it only inherited: a service, ssh or an editor may hold a pipe open and never write to it. Nor may
it ignore the text of a slow program. So it waits `PATIENCE_SECONDS` for the first byte, and then
fails.

A chat message is one line, or several: a line that ends in a backslash continues on the next one,
and three quotation marks begin and end a block. A text pasted into a terminal is one message. A
single line that begins with a slash is a command.
"""

import io
import os
import select
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO

from expertctl.cli.output import note
from expertctl.errors import InvalidPackageError, NotFoundError, UsageError

if TYPE_CHECKING:
    from expertctl.routing.plan import SavedPlan


PATIENCE_SECONDS = 60.0
"""Seconds to wait for the first byte where stdin may be unused."""
_SILENT_SECONDS = 2.0
"""Seconds to wait before a note says what the command waits for."""
_MAX_TEXT_BYTES = 4 * 500_000
"""More bytes than the longest prompt can have in UTF-8."""


def read_text(what: str) -> str:
    """Return all of stdin as text, without its last line end; from a terminal, up to Ctrl-D.

    Raises:
        UsageError: when stdin is closed or cannot be read, or is longer than a prompt may be.
        InvalidPackageError: when it is not UTF-8.
    """
    if sys.stdin is None:
        raise UsageError(f"{what}: stdin is closed", hint="pipe a text, or give an argument")
    _make_blocking(sys.stdin)
    try:
        text = read_bounded_text(sys.stdin.buffer, f"{what} on stdin")
    except OSError as error:
        message = f"{what}: stdin cannot be read: {error.strerror or error}"
        raise UsageError(message, hint="pipe a text, or give an argument") from error
    return text.removesuffix("\n").removesuffix("\r")


def is_terminal() -> bool:
    """Return whether stdin is a terminal."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def is_piped() -> bool:
    """Return whether stdin is open and not a terminal."""
    return sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty()


def read_piped_text(what: str, *, timeout: float = PATIENCE_SECONDS) -> str | None:
    """Return text that was piped into a command that does not need it; None if there is none.

    Nothing is read from a terminal. Raises as `read_text` does, and:

    Raises:
        UsageError: when nothing comes, although stdin is open.
    """
    descriptor = _readable_descriptor()
    if descriptor is None:
        return None
    _wait_for_input(descriptor, what, timeout)
    text = read_text(what)
    return text if text.strip() else None


def read_bounded_text(stream: BinaryIO, what: str) -> str:
    """Return the text of a stream of a user.

    Raises:
        UsageError: when it is longer than a prompt may be.
        InvalidPackageError: when it is not UTF-8.
    """
    data = stream.read(_MAX_TEXT_BYTES + 1)
    if len(data) > _MAX_TEXT_BYTES:
        raise UsageError(
            f"{what} has more than {_MAX_TEXT_BYTES} bytes, more than any prompt may have",
            hint="shorten it, or ask in several parts",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPackageError(
            what, [f"not UTF-8 at byte {error.start}"], hint="convert it, e.g. with iconv"
        ) from error


def _make_blocking(stdin: TextIO) -> None:
    """Make reads wait for the end, even where another program left the pipe non-blocking."""
    with suppress(OSError, ValueError, AttributeError):  # no descriptor; Windows before Python 3.12
        os.set_blocking(stdin.fileno(), True)


def _readable_descriptor() -> int | None:
    """Return the descriptor of a stdin that may hold text: a pipe, a file, a socket, a device.

    A descriptor that can only be written to holds none: ``nohup`` gives such a stdin.
    """
    if not is_piped():
        return None
    try:
        descriptor = sys.stdin.fileno()
        os.read(descriptor, 0)
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError, io.UnsupportedOperation):  # replaced by an object without one
        return None
    kinds = (stat.S_ISFIFO, stat.S_ISREG, stat.S_ISSOCK, stat.S_ISCHR)
    return descriptor if any(is_kind(mode) for is_kind in kinds) else None


def _wait_for_input(descriptor: int, what: str, timeout: float) -> None:
    """Wait until there is a first byte or the end."""
    silent = min(_SILENT_SECONDS, timeout)
    if _is_ready(descriptor, silent):
        return
    note("waiting for text on stdin; if there is none, end the command with < /dev/null")
    if not _is_ready(descriptor, timeout - silent):
        raise UsageError(
            f"{what}: stdin is open, but nothing came within {timeout:g} s",
            hint="end the command with `< /dev/null` if there is no text; `--body -` waits for it",
        )


def _is_ready(descriptor: int, seconds: float) -> bool:
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    except (OSError, ValueError):  # where only sockets can be waited for: Windows
        return True


STDIN = "-"
_BODY_HINT = "name a text file, or - for stdin"
_PROMPT_HINT = 'expertctl run "Sort these numbers: 3, 1, 2"; a prompt may be piped, too'


@dataclass(frozen=True, slots=True)
class PromptInput:
    """The prompt, and the body that is appended to it."""

    prompt: str
    body: str | None


def read_prompt(words: Sequence[str] | None) -> str:
    """Return the prompt of a command that reads nothing else: from its words, else from stdin.

    Raises:
        UsageError: when there is none.
        InvalidPackageError: when stdin is not UTF-8.
    """
    return _join_words(words) or _read_piped_prompt(words)


def read_input(
    words: Sequence[str] | None, body: str | None, *, plan: Path | None = None
) -> PromptInput:
    """Return prompt and body; ``body`` and ``plan`` are the values of the options.

    Raises:
        UsageError: when there is no prompt, or two texts are to come from stdin.
        NotFoundError: when the file of the body cannot be read.
        InvalidPackageError: when a text is not UTF-8.
    """
    prompt = _join_words(words)
    wanted = {"the prompt": prompt is None, "the body": body == STDIN, "the plan": _is_stdin(plan)}
    _check_single_stdin([name for name, is_wanted in wanted.items() if is_wanted])
    if prompt is None:
        return PromptInput(_read_piped_prompt(words), read_body(body))
    if body is None and not _is_stdin(plan):
        return PromptInput(prompt, read_piped_text("the body"))
    return PromptInput(prompt, read_body(body))


def read_body(source: str | None) -> str | None:
    """Return the text of ``--body``: of a file, or for ``-`` of stdin.

    Raises:
        NotFoundError: when the file cannot be read.
        InvalidPackageError: when it is not UTF-8.
    """
    if source is None or source == STDIN:
        return None if source is None else read_text("the body")
    path = Path(source)
    try:
        with path.open("rb") as stream:
            return read_bounded_text(stream, str(path))
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file", hint=_BODY_HINT) from error
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror or error}"
        raise NotFoundError(message, hint=_BODY_HINT) from error


def load_saved_plan(source: Path | None) -> "SavedPlan | None":
    """Return the plan of ``--plan``: of a file, or for ``-`` of stdin."""
    from expertctl.routing.plan import MAX_PLAN_BYTES, parse_plan, read_plan

    if source is None or not _is_stdin(source):
        return None if source is None else read_plan(source)
    if sys.stdin is None:
        raise UsageError("the plan: stdin is closed", hint="write it to a file: --plan FILE")
    return parse_plan(sys.stdin.buffer.read(MAX_PLAN_BYTES + 1), what="the plan on stdin")


def _join_words(words: Sequence[str] | None) -> str | None:
    """Return the prompt of a command line; None if it is to come from stdin."""
    return None if not words or list(words) == [STDIN] else " ".join(words)


def _read_piped_prompt(words: Sequence[str] | None) -> str:
    if not words and not is_piped():
        raise UsageError("there is no prompt", hint=_PROMPT_HINT)
    return read_text("the prompt")


def _is_stdin(path: Path | None) -> bool:
    return path is not None and str(path) == STDIN


def _check_single_stdin(names: Sequence[str]) -> None:
    if len(names) > 1:
        raise UsageError(
            f"{' and '.join(names)} cannot both come from stdin",
            hint="write one of them to a file: --body FILE, --plan FILE",
        )


PRIMARY_PROMPT = "> "
CONTINUATION_PROMPT = ". "
BLOCK_QUOTES = '"""'
_MAX_LINE_BYTES = 4 * 500_001
"""More bytes than the longest prompt can have in UTF-8."""

ReadLine = Callable[[str], str | None]
"""Shows a prompt and returns a line without its end; ``None`` at the end of the input."""


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A message to the model, or a command to the chat."""

    text: str
    is_command: bool = False


def read_chat_input(read_line: ReadLine) -> ChatInput | None:
    """Return the next message or command; ``None`` at the end of the input.

    Raises:
        UsageError: when the input ends within a block.
    """
    line = read_line(PRIMARY_PROMPT)
    if line is None:
        return None
    if line.lstrip().startswith(BLOCK_QUOTES):
        return ChatInput(_read_block(line.lstrip().removeprefix(BLOCK_QUOTES), read_line))
    text = _read_continuation(line, read_line)
    return ChatInput(text, is_command=text.lstrip().startswith("/") and "\n" not in text)


def _read_continuation(line: str, read_line: ReadLine) -> str:
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        further = read_line(CONTINUATION_PROMPT)
        if further is None:
            return "\n".join(lines)
        line = further
    return "\n".join([*lines, line])


def _read_block(line: str, read_line: ReadLine) -> str:
    lines = []
    while not line.rstrip().endswith(BLOCK_QUOTES):
        lines.append(line)
        further = read_line(CONTINUATION_PROMPT)
        if further is None:
            raise UsageError(
                f"the input ends within a block that began with {BLOCK_QUOTES}",
                hint=f"end it with {BLOCK_QUOTES}",
            )
        line = further
    return "\n".join([*lines, line.rstrip().removesuffix(BLOCK_QUOTES)]).strip("\n")


def make_line_reader(*, as_json: bool = False) -> ReadLine:
    """Return a reader of stdin; it edits lines if stdin and stdout are terminals, without JSON."""
    if not is_terminal():
        return _read_piped_line
    if as_json or not sys.stdout.isatty():
        return _read_terminal_line
    return _read_edited_line


def _read_edited_line(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        sys.stdout.write("\n")
        return None
    except UnicodeDecodeError as error:
        raise _build_decode_error(error) from error


def _read_terminal_line(prompt: str) -> str | None:
    """Read from a terminal, with the prompt on stderr: stdout is for answers only."""
    sys.stderr.write(prompt)
    sys.stderr.flush()
    return _read_piped_line(prompt)


def _read_piped_line(_: str) -> str | None:
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
        raise _build_decode_error(error) from error


def _build_decode_error(error: UnicodeDecodeError) -> InvalidPackageError:
    problem = f"a line is not UTF-8 at byte {error.start}"
    return InvalidPackageError("stdin", [problem], hint="convert it, e.g. with iconv")
