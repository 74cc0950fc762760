"""Serves a registry under granian; other ASGI servers call `application`.

The parent process holds the lock of the data folder, its workers answer requests; see
`expertctl.http.server`. Clear text is allowed only on this machine or behind a proxy.
"""

import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from starlette.applications import Starlette

from expertctl.errors import UsageError
from expertctl.http.log import configure_log
from expertctl.http.server import (
    GranianOptions,
    ReportAddress,
    build_server,
    is_loopback,
    report_when_ready,
    reserve_address,
    run_server,
)
from registry_server.errors import LOG_CONFIG
from registry_server.settings import ServerSettings, check_settings, lock_data_folder, read_settings


def require_encryption(settings: ServerSettings) -> None:
    """Refuse settings that would send tokens over a network in clear text.

    Raises:
        UsageError: when other machines can reach the server without encryption.
    """
    proxied = bool(settings.trusted_proxies) or (settings.url or "").startswith("https://")
    if is_loopback(settings.host) or settings.certificate or proxied:
        return
    hint = (
        "give --tls-cert and --tls-key, or `url` (https://…) and `trusted_proxies` of the proxy "
        "that encrypts; --insecure-http serves in clear text all the same"
    )
    message = f"others can reach {settings.host}, and tokens would travel in clear text"
    raise UsageError(message, hint=hint)


DATA_VARIABLE = "EXPERT_REGISTRY_DATA"
SHARED_METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
DRAIN_SECONDS = 45
"""Longer than a body may pause (`STALL_SECONDS`), so that a stalled request is answered with 408
and the worker ends by itself instead of being killed."""
MAX_WORKERS = 64


def application() -> Starlette:
    """Return the application of the data folder in ``EXPERT_REGISTRY_DATA``; an ASGI factory.

    The process holds the lock of the data folder until it ends, so there can be only one worker:
    ``uvicorn --factory registry_server.operation.serve:application``.

    Raises:
        UsageError: when the variable is not set.
        StoreError: when another server uses the folder.
    """
    folder = os.environ.get(DATA_VARIABLE)
    if not folder:
        raise UsageError(f"{DATA_VARIABLE} is not set", hint="set it to the data folder")
    settings = read_settings(Path(folder))
    configure_log(LOG_CONFIG)
    lock = ExitStack()
    lock.enter_context(lock_data_folder(settings.data))
    app = _create_app(settings)
    app.state.lock = lock
    return app


def serve(settings: ServerSettings, *, workers: int, insecure: bool, report: ReportAddress) -> None:
    """Serve until SIGTERM or SIGINT; call ``report`` with the address once it answers.

    Raises:
        UsageError: when tokens would travel in clear text (see `require_encryption`).
        StoreError: when another server uses the data folder.
        RegistryError: when the address cannot be used, or a worker ended by itself.
    """
    check_settings(settings)
    if not 1 <= workers <= MAX_WORKERS:
        raise UsageError(f"{workers} workers: there can be 1 to {MAX_WORKERS}")
    if not insecure:
        require_encryption(settings)
    secure = settings.certificate is not None
    hosting = _build_hosting(settings, workers)
    with (
        lock_data_folder(settings.data),
        reserve_address(settings.host, settings.port, secure=secure) as address,
        ExitStack() as stack,
    ):
        if workers > 1:
            shared = stack.enter_context(tempfile.TemporaryDirectory(prefix="expertctl-metrics-"))
            os.environ[SHARED_METRICS_VARIABLE] = shared
        server = build_server(hosting, address)
        _check_registry(settings)
        server.on_startup(partial(report_when_ready, address, report))
        run_server(server, hosting, partial(_create_app, replace(settings, port=address.port)))


def _build_hosting(settings: ServerSettings, workers: int) -> GranianOptions:
    return GranianOptions(
        name="registry",
        log=LOG_CONFIG,
        drain_seconds=DRAIN_SECONDS,
        workers=workers,
        certificate=settings.certificate,
        private_key=settings.private_key,
    )


def _check_registry(settings: ServerSettings) -> None:
    """Check the data and migrate the tables once, before any worker starts."""
    from registry_server.registry import open_registry

    open_registry(settings).close()


def _create_app(settings: ServerSettings) -> Starlette:
    """Create the application; imported only after the folder of shared counts is set."""
    from registry_server.app import create_app

    return create_app(settings)
