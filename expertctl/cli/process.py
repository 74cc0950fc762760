"""The process of a command: exit codes, signals, garbage collection.

The most specific class of an error decides its exit code. Ctrl-C and SIGTERM raise
`KeyboardInterrupt` inside the command, so that resources are released and progress bars removed;
`expertctl.cli.app` then prints a message. While text is generated, a `CancellationFlag` ends
generation instead, and the text so far is kept.

Garbage is collected rarely while a command imports modules, and not at exit: importing
libraries creates many objects that stay, and each collection traverses all of them. A
process that calls `expertctl.cli.app.run` itself keeps its own settings.
"""

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from expertctl.cli.output import print_message
from expertctl.errors import (
    BudgetError,
    ExpertError,
    IncompatibleError,
    InvalidPackageError,
    NotFoundError,
    RegistryError,
    TrustError,
    UsageError,
)

OK = 0
FAILURE = 1
USAGE = 2
UNTRUSTED = 5
UNREACHABLE = 6
INTERRUPTED = 130

_CODES_BY_CLASS: dict[type[ExpertError], int] = {
    UsageError: USAGE,
    NotFoundError: 3,
    IncompatibleError: 4,
    TrustError: UNTRUSTED,
    RegistryError: UNREACHABLE,
    BudgetError: 7,
    InvalidPackageError: 8,
}


def get_exit_code(error: ExpertError) -> int:
    """Return the process exit code for an error."""
    classes = (_CODES_BY_CLASS.get(cls) for cls in type(error).__mro__)
    return next((code for code in classes if code is not None), FAILURE)


STOPPED_MESSAGE = "stopped"
_CALLBACK_LIBRARY, _RETRY_SECONDS = "llvmlite", 0.02
_FOREIGN_HANDLERS = (signal.SIG_IGN, None)
"""Handlers that are kept: an ignored signal, or a handler not installed by Python."""


class TerminatedError(KeyboardInterrupt):
    """SIGTERM was received; it ends the command even where Ctrl-C must be pressed twice."""


def install_signal_handlers() -> None:
    """Let SIGINT and SIGTERM raise, unless they are ignored or have a handler of someone else."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler}:
            signal.signal(number, _raise_interruption)


def report_stopped() -> None:
    """Print that the command was stopped; a further signal kills the process at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    print_message(
        f"\n{STOPPED_MESSAGE}" if sys.stderr.isatty() else STOPPED_MESSAGE
    )  # the terminal has echoed ^C


class CancellationFlag:
    """Whether the user wants an answer to end; the engine calls it between two steps."""

    def __init__(self) -> None:
        """Start without a request."""
        self.raises: type[Exception] | None = None
        """What the first signal raises at once, where nothing calls this meanwhile."""
        self._requested = False

    def __call__(self) -> bool:
        """Return whether the answer is to end."""
        return self._requested

    @contextmanager
    def catch_signals(self, *signals: signal.Signals) -> Iterator[None]:
        """Let these signals request the end of the answer; a second one ends the command.

        An ignored signal stays ignored, as in a command that a script started in the background.
        """
        caught = [number for number in signals if signal.getsignal(number) not in _FOREIGN_HANDLERS]
        before = {number: signal.signal(number, self._handle_signal) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            _raise_interruption(number, frame)
        self._requested = True
        if self.raises is not None:
            raise self.raises


def _raise_interruption(number: int, frame: FrameType | None) -> None:
    """Raise the interruption; later, if called from C, where an exception would be lost."""
    if _has_native_caller(frame):
        again = threading.Timer(_RETRY_SECONDS, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
        return
    raise TerminatedError if number == signal.SIGTERM else KeyboardInterrupt


def _has_native_caller(frame: FrameType | None) -> bool:
    """Return whether LLVM, which calls back while it compiles kernels, is among the callers."""
    while frame is not None:
        if _CALLBACK_LIBRARY in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


_DEFAULT_THRESHOLD = gc.get_threshold()
_STARTUP_THRESHOLD = 50_000
"""New objects before a collection: enough for imports, few enough for long-running commands."""


def reduce_collections() -> None:
    """Collect rarely while a command starts."""
    gc.set_threshold(_STARTUP_THRESHOLD)


def restore_collections() -> None:
    """Collect as before `reduce_collections`, but skip the present objects: modules stay."""
    if gc.get_threshold()[0] == _STARTUP_THRESHOLD:
        gc.freeze()
        gc.set_threshold(*_DEFAULT_THRESHOLD)


def disable_collections() -> None:
    """Stop collecting at exit: the system frees the memory as a whole."""
    gc.disable()
    gc.freeze()
