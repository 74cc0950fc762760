"""Running an application under granian, in processes of its own.

One process listens for signals, its workers answer. When it is killed, the workers end with it;
when it is told to end, running requests are finished first, for some seconds at most.
"""

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from granian.constants import HTTPModes, Interfaces
from granian.errors import ConfigurationError
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server import MPServer
from starlette.applications import Starlette

from expertctl.errors import RegistryError, UsageError
from expertctl.http.connections import MAX_CONNECTIONS, allow_files
from expertctl.http.ending import heed_first_signal, heed_signals, ignore_signals
from expertctl.http.listening import Listening, is_answering
from expertctl.http.log import configure_log

START_SECONDS = 120
HEADER_MILLISECONDS = 15_000
_LOOK_SECONDS = 0.02
_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of prctl(2)."""

Load = Callable[[], Starlette]
Report = Callable[[Listening], None]
End = Callable[[Starlette], None]


def nothing_more(_: Starlette) -> None:
    """End as soon as requests that run are answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """How an application is run; ``log`` is that of `expertctl.http.log.log_config`."""

    name: str
    log: dict[str, Any]
    drain_seconds: int
    """How long requests that run may take when the server is told to end."""
    workers: int = 1
    certificate: Path | None = None
    private_key: Path | None = None
    end: End = nothing_more
    """Called in a worker that was told to end, before anything else; it returns at once."""


def new_server(hosting: Hosting, address: Listening) -> MPServer:
    """Return a server that does not run yet.

    Raises:
        UsageError: when the certificate and its key are none.
    """
    try:
        return MPServer(
            hosting.name,
            address=address.host,
            port=address.port,
            interface=Interfaces.ASGI,
            workers=hosting.workers,
            workers_kill_timeout=hosting.drain_seconds,
            backpressure=MAX_CONNECTIONS,
            http=HTTPModes.http1,
            http1_settings=HTTP1Settings(header_read_timeout=HEADER_MILLISECONDS),
            websockets=False,
            log_level=LogLevels.warning,
            log_dictconfig=hosting.log,
            ssl_cert=hosting.certificate,
            ssl_key=hosting.private_key,
        )
    except (OSError, ValueError, ConfigurationError) as error:
        named = f"{hosting.certificate} and {hosting.private_key}"
        message = f"{named} are no certificate and its key: {error}"
        raise UsageError(message, hint="both in PEM form, the key without passphrase") from error


def run(server: MPServer, hosting: Hosting, load: Load) -> None:
    """Serve what ``load`` returns in each worker, until SIGTERM or SIGINT.

    Raises:
        RegistryError: when a worker ended by itself.
    """
    allow_files()
    server.on_startup(partial(heed_signals, server))
    server.on_shutdown(ignore_signals)
    try:
        loading = partial(_load_worker, load, hosting, os.getpid())
        server.serve(target_loader=loading, wrap_loader=False)
    except SystemExit as error:
        if error.code and not server.interrupt_signal:
            message = "a worker of the server ended by itself"
            raise RegistryError(message, hint="the lines above say why") from error


def report_soon(address: Listening, report: Report) -> None:
    """Tell the address when the first worker accepts connections, in a thread."""

    def watch() -> None:
        ended = time.monotonic() + START_SECONDS
        while time.monotonic() < ended:
            time.sleep(_LOOK_SECONDS)
            if is_answering(address):
                report(address)
                return

    threading.Thread(target=watch, daemon=True).start()


def _load_worker(load: Load, hosting: Hosting, parent: int) -> Starlette:
    """Make the application in a worker process, which is to end with its parent."""
    _die_with(parent)
    made: list[Starlette] = []

    def told_to_end() -> None:
        for app in made:
            hosting.end(app)

    heed_first_signal(asyncio.get_event_loop(), told_to_end)
    configure_log(hosting.log)
    made.append(load())
    return made[0]


def _die_with(parent: int) -> None:
    """Have the system kill this process when its parent is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
