"""Serving a registry under granian; any other ASGI server calls `application`.

One process listens for signals and keeps the lock of the data folder, its workers answer. When it
is killed they end with it; when it is told to end, requests that run are finished first, for
`DRAIN_SECONDS` at most.
"""

import asyncio
import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from granian.constants import HTTPModes, Interfaces
from granian.errors import ConfigurationError
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server import MPServer
from starlette.applications import Starlette

from expertctl.errors import RegistryError, UsageError
from registry_server.operation.connections import MAX_CONNECTIONS, allow_files
from registry_server.operation.data_lock import serving
from registry_server.operation.ending import heed_first_signal, heed_signals, ignore_signals
from registry_server.operation.listening import Listening, demand_secure, held_address, is_answering
from registry_server.operation.log import LOGGING, configure_log
from registry_server.settings import ServerSettings
from registry_server.settings_file import check_settings, read_settings

DATA_VARIABLE = "EXPERT_REGISTRY_DATA"
SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"
DRAIN_SECONDS = 30
START_SECONDS = 120
MAX_WORKERS = 64
HEADER_MILLISECONDS = 15_000
_LOOK_SECONDS = 0.02
_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of prctl(2)."""


def application() -> Starlette:
    """Return the application of the data folder in ``EXPERT_REGISTRY_DATA``, as an ASGI factory.

    It holds the lock of the data folder as long as its process lives, so it is for one worker:
    ``uvicorn --factory registry_server.operation.serve:application``.

    Raises:
        UsageError: when the variable is not set.
        StoreError: when another server runs on the folder.
    """
    folder = os.environ.get(DATA_VARIABLE)
    if not folder:
        raise UsageError(f"{DATA_VARIABLE} is not set", hint="set it to the data folder")
    settings = read_settings(Path(folder))
    configure_log()
    lock = ExitStack()
    lock.enter_context(serving(settings.data))
    app = _create_app(settings)
    app.state.lock = lock
    return app


def serve(
    settings: ServerSettings, *, workers: int, insecure: bool, report: Callable[[Listening], None]
) -> None:
    """Serve until SIGTERM or SIGINT; call ``report`` with the address once it answers there.

    Raises:
        UsageError: when tokens would travel in clear text (see `demand_secure`).
        StoreError: when another server runs on the data folder.
        RegistryError: when the address cannot be used, or a worker died.
    """
    check_settings(settings)
    if not 1 <= workers <= MAX_WORKERS:
        raise UsageError(f"{workers} workers: there can be 1 to {MAX_WORKERS}")
    if not insecure:
        demand_secure(settings)
    with serving(settings.data), held_address(settings) as address, ExitStack() as stack:
        if workers > 1:
            shared = stack.enter_context(tempfile.TemporaryDirectory(prefix="expertctl-metrics-"))
            os.environ[SHARED_METRICS] = shared
        allow_files()
        server = _server(settings, address, workers)
        _check_data(settings)
        server.on_startup(partial(heed_signals, server))
        server.on_startup(partial(_report_soon, address, report))
        server.on_shutdown(ignore_signals)
        load = partial(_load_worker, replace(settings, port=address.port), os.getpid())
        _run(server, load)


def _server(settings: ServerSettings, address: Listening, workers: int) -> MPServer:
    try:
        return MPServer(
            "registry",
            address=address.host,
            port=address.port,
            interface=Interfaces.ASGI,
            workers=workers,
            workers_kill_timeout=DRAIN_SECONDS,
            backpressure=MAX_CONNECTIONS,
            http=HTTPModes.http1,
            http1_settings=HTTP1Settings(header_read_timeout=HEADER_MILLISECONDS),
            websockets=False,
            log_level=LogLevels.warning,
            log_dictconfig=LOGGING,
            ssl_cert=settings.certificate,
            ssl_key=settings.private_key,
        )
    except (OSError, ValueError, ConfigurationError) as error:
        named = f"{settings.certificate} and {settings.private_key}"
        message = f"{named} are no certificate and its key: {error}"
        raise UsageError(message, hint="both in PEM form, the key without passphrase") from error


def _run(server: MPServer, load: Callable[[], Starlette]) -> None:
    try:
        server.serve(target_loader=load, wrap_loader=False)
    except SystemExit as error:
        if error.code and not server.interrupt_signal:
            message = "a worker of the server ended by itself"
            raise RegistryError(message, hint="the lines above say why") from error


def _report_soon(address: Listening, report: Callable[[Listening], None]) -> None:
    """Tell the address when the first worker accepts connections, in a thread."""

    def watch() -> None:
        ended = time.monotonic() + START_SECONDS
        while time.monotonic() < ended:
            time.sleep(_LOOK_SECONDS)
            if is_answering(address):
                report(address)
                return

    threading.Thread(target=watch, daemon=True).start()


def _check_data(settings: ServerSettings) -> None:
    """Find what is wrong with the data before any worker starts; bring tables up to date once."""
    from registry_server.registry import open_registry

    open_registry(settings).close()


def _load_worker(settings: ServerSettings, parent: int) -> Starlette:
    """Make the application in a worker process, which is to end with its parent."""
    _die_with(parent)
    heed_first_signal(asyncio.get_event_loop())
    configure_log()
    return _create_app(settings)


def _create_app(settings: ServerSettings) -> Starlette:
    """Make the application; imported only now, when it is known how workers share their counts."""
    from registry_server.app import create_app

    return create_app(settings)


def _die_with(parent: int) -> None:
    """Have the system kill this process when its parent is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
