"""Text on stdin that is no terminal: of a pipe, a file or another program.

A command that can do without stdin must not hang on one that it only inherited: a service, ssh or
an editor may hold a pipe open and never write to it. Nor may it leave out what a slow program is
about to write. So it waits for the first byte for `PATIENCE_SECONDS`, and refuses to go on then.
"""

import io
import os
import select
import stat
import sys
from contextlib import suppress
from typing import BinaryIO, TextIO

from expertctl.cli.output import note
from expertctl.errors import InvalidPackageError, UsageError

PATIENCE_SECONDS = 60.0
"""How long to wait for the first byte where stdin may be of no use."""
_SILENT_SECONDS = 2.0
"""How long to wait before a person is told what is waited for."""
_MAX_TEXT_BYTES = 4 * 500_000
"""More bytes than the longest prompt can have in UTF-8."""


def read_text(what: str) -> str:
    """Return all of stdin as text, without its last line end; of a terminal, up to Ctrl-D.

    Raises:
        UsageError: when stdin is closed or cannot be read, or is longer than a prompt may be.
        InvalidPackageError: when it is not UTF-8.
    """
    if sys.stdin is None:
        raise UsageError(f"{what}: stdin is closed", hint="pipe a text, or give an argument")
    _wait_for_all(sys.stdin)
    try:
        text = read_limited(sys.stdin.buffer, f"{what} on stdin")
    except OSError as error:
        message = f"{what}: stdin cannot be read: {error.strerror or error}"
        raise UsageError(message, hint="pipe a text, or give an argument") from error
    return text.removesuffix("\n").removesuffix("\r")


def is_terminal() -> bool:
    """Tell whether stdin is a terminal, where a person types."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def is_piped() -> bool:
    """Tell whether stdin is there and is no terminal."""
    return sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty()


def waiting_text(what: str, *, patience: float = PATIENCE_SECONDS) -> str | None:
    """Return the text that was piped into a command that can do without; None if there is none.

    Nothing is read of a terminal. Raises as `read_text` does, and:

    Raises:
        UsageError: when nothing comes, although stdin is open.
    """
    descriptor = _readable_descriptor()
    if descriptor is None:
        return None
    _wait_for_begin(descriptor, what, patience)
    text = read_text(what)
    return text if text.strip() else None


def read_limited(stream: BinaryIO, what: str) -> str:
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


def _wait_for_all(stdin: TextIO) -> None:
    """Have reading wait for the end, even where another program left the pipe non-blocking."""
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


def _wait_for_begin(descriptor: int, what: str, patience: float) -> None:
    """Wait until there is a first byte or an end."""
    silent = min(_SILENT_SECONDS, patience)
    if _is_ready(descriptor, silent):
        return
    note("waiting for text on stdin; if there is none, end the command with < /dev/null")
    if not _is_ready(descriptor, patience - silent):
        raise UsageError(
            f"{what}: stdin is open, but nothing came within {patience:g} s",
            hint="end the command with `< /dev/null` if there is no text; `--body -` waits for it",
        )


def _is_ready(descriptor: int, seconds: float) -> bool:
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    except (OSError, ValueError):  # where only sockets can be waited for: Windows
        return True
