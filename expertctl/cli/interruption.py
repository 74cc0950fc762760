"""How a command is ended: Ctrl-C, or SIGTERM from elsewhere, both cleanly and with a message.

Either raises `KeyboardInterrupt` inside the command, so that resources are released, bars are taken
off the terminal, and `expertctl.cli.app` says so. An answer is ended where it is instead, by an
`Ending`, so that its text is kept.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from expertctl.cli.output import note

STOPPED = "stopped"
_CALLS_BACK, _SOON_SECONDS = "llvmlite", 0.02
_NOT_OURS = (signal.SIG_IGN, None)
"""Handlers that are kept: an ignored signal, or a handler not installed by Python."""


class TerminatedError(KeyboardInterrupt):
    """SIGTERM came: it ends the command even where Ctrl-C must be pressed twice."""


def heed_signals() -> None:
    """Let both signals raise, unless they are ignored or have a handler of others."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler}:
            signal.signal(number, _end)


def tell_stopped() -> None:
    """Say that a command was stopped; a further signal kills the process at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    note(f"\n{STOPPED}" if sys.stderr.isatty() else STOPPED)  # the terminal has echoed ^C


class Ending:
    """Whether the user wants an answer to end; the engine asks between two steps."""

    def __init__(self) -> None:
        """Begin with an answer that is wanted."""
        self._asked = False

    def __call__(self) -> bool:
        """Tell whether the answer shall end."""
        return self._asked

    @contextmanager
    def heeding(self, *signals: signal.Signals) -> Iterator[None]:
        """Take these signals as the wish to end the answer; a second one ends the command.

        An ignored signal stays ignored, as in a command that a script started in the background.
        """
        heeded = [number for number in signals if signal.getsignal(number) not in _NOT_OURS]
        before = {number: signal.signal(number, self._ask) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            _end(number, frame)
        self._asked = True


def _end(number: int, frame: FrameType | None) -> None:
    """Raise the interruption; later, if called from C, where an exception would be lost."""
    if _is_called_from_c(frame):
        again = threading.Timer(_SOON_SECONDS, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
        return
    raise TerminatedError if number == signal.SIGTERM else KeyboardInterrupt


def _is_called_from_c(frame: FrameType | None) -> bool:
    """Tell whether LLVM, which calls back while it compiles kernels, is among the callers."""
    while frame is not None:
        if _CALLS_BACK in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
