"""Serving a registry under granian; any other ASGI server calls `application`.

One process keeps the lock of the data folder, its workers answer; see `expertctl.http.hosting`.
"""

import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from starlette.applications import Starlette

from expertctl.errors import UsageError
from expertctl.http.hosting import Hosting, Report, new_server, report_soon, run
from expertctl.http.listening import held_address
from expertctl.http.log import configure_log
from registry_server.operation.data_lock import serving
from registry_server.operation.listening import demand_secure
from registry_server.operation.log import LOGGING
from registry_server.settings import ServerSettings
from registry_server.settings_file import check_settings, read_settings

DATA_VARIABLE = "EXPERT_REGISTRY_DATA"
SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"
DRAIN_SECONDS = 45
"""More than a body may pause (`STALL_SECONDS`): then a request that stalls is answered with 408,
and the worker ends by itself instead of being killed."""
MAX_WORKERS = 64


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
    configure_log(LOGGING)
    lock = ExitStack()
    lock.enter_context(serving(settings.data))
    app = _create_app(settings)
    app.state.lock = lock
    return app


def serve(settings: ServerSettings, *, workers: int, insecure: bool, report: Report) -> None:
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
    secure = settings.certificate is not None
    hosting = _hosting(settings, workers)
    with (
        serving(settings.data),
        held_address(settings.host, settings.port, secure=secure) as address,
        ExitStack() as stack,
    ):
        if workers > 1:
            shared = stack.enter_context(tempfile.TemporaryDirectory(prefix="expertctl-metrics-"))
            os.environ[SHARED_METRICS] = shared
        server = new_server(hosting, address)
        _check_data(settings)
        server.on_startup(partial(report_soon, address, report))
        run(server, hosting, partial(_create_app, replace(settings, port=address.port)))


def _hosting(settings: ServerSettings, workers: int) -> Hosting:
    return Hosting(
        name="registry",
        log=LOGGING,
        drain_seconds=DRAIN_SECONDS,
        workers=workers,
        certificate=settings.certificate,
        private_key=settings.private_key,
    )


def _check_data(settings: ServerSettings) -> None:
    """Find what is wrong with the data before any worker starts; bring tables up to date once."""
    from registry_server.registry import open_registry

    open_registry(settings).close()


def _create_app(settings: ServerSettings) -> Starlette:
    """Make the application; imported only now, when it is known how workers share their counts."""
    from registry_server.app import create_app

    return create_app(settings)
