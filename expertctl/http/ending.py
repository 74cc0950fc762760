"""How a server is told to end: by signals, any number of them, at any moment.

granian sets a `threading.Event` in its signal handlers. A handler that runs while the main thread
is inside that event, waiting for it or setting it for an earlier signal, deadlocks; and when two
signals come together, other threads may take both, which does not wake the main thread. Here the
thread that takes a signal writes it into a pipe, without Python, and one thread passes on what it
reads.

In a worker, granian breaks off what runs at the second signal, which always comes when a terminal
signals all processes. Here a worker heeds only the first.
"""

import asyncio
import operator
import os
import signal
import threading
import time
from collections.abc import Callable

from granian.server import MPServer

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_SECONDS = 0.5
_PIECE = 4096


def heed_signals(server: MPServer) -> None:
    """End ``server`` at SIGINT and SIGTERM, renew its workers at SIGHUP; a hook of its start."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, operator.is_)  # does nothing, in C: no signal can interrupt it
    threading.Thread(target=_pass_on, args=(told, server), daemon=True).start()


def ignore_signals() -> None:
    """Let no late signal change how the process ends; a hook of the server's end."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def heed_first_signal(loop: asyncio.AbstractEventLoop, told_to_end: Callable[[], None]) -> None:
    """Pass on only the first of all signals to the handlers that a worker will add to its loop.

    ``told_to_end``, which must return at once, is called before that handler.
    """
    signal.set_wakeup_fd(-1)
    add = loop.add_signal_handler
    told: list[int] = []

    def add_once(number: int, handler: Callable[..., object], *values: object) -> None:
        def heed() -> None:
            told.append(number)
            if len(told) == 1:
                told_to_end()
                handler(*values)

        add(number, heed)

    loop.add_signal_handler = add_once  # type: ignore[method-assign,assignment]  # not our class


def _pass_on(told: int, server: MPServer) -> None:
    """Pass signals on to the server; once it was told to end, repeat that until it has ended.

    Once is not enough: a reload that begins just then forgets it, and a worker that was just forked
    has the handlers of its parent, which do nothing there.
    """
    while set(os.read(told, _PIECE)) == {signal.SIGHUP}:
        server.signal_handler_reload()  # type: ignore[no-untyped-call]  # granian's
    while True:
        server.signal_handler_interrupt()  # type: ignore[no-untyped-call]  # granian's
        time.sleep(_AGAIN_SECONDS)
        for worker in tuple(server.wrks):
            worker.terminate()  # type: ignore[no-untyped-call]  # granian's
