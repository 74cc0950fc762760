"""Serving under granian: a parent process handles signals, one worker owns the engine.

The worker answers ``/healthz`` from the start and everything else once the base is loaded. An error
while loading is raised in the parent process. On shutdown the worker accepts no more jobs; running
ones get `DRAIN_SECONDS`, or until Ctrl-C is pressed again. Then what they have written is their
answer.

Memory: glibc gives each thread its own arena, up to eight per processor, and memory free in one
arena is not used by another. The server has dozens of threads that compute now and then, so they
share two arenas, which is hardly slower: large arrays are allocated outside of arenas. An arena
returns only its end to the system; memory free in its middle, after many simultaneous jobs, stays
with the process until `trim_heap` is called.
"""

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

from anyio import to_thread
from starlette.applications import Starlette

from expertctl.errors import ExpertError, RegistryError, StoreError
from expertctl.http.log import build_log_config
from expertctl.http.server import (
    GranianOptions,
    ListenAddress,
    build_server,
    reserve_address,
    run_server,
)
from expertctl.server.api_keys import ApiKeyStore
from expertctl.server.settings import (
    ServeSettings,
    check_alias_bases,
    check_alias_experts,
    check_settings,
    require_secure,
)
from expertctl.settings import Settings
from expertctl.store.bases import BaseStore
from expertctl.store.preference import find_working_folder
from expertctl.store.server_record import (
    Policy,
    ServerRegistration,
    create_secret,
    describe_home_policy,
)
from expertctl.store.store import Store

MAX_ARENAS = 2
_M_ARENA_MAX = -8
"""``M_ARENA_MAX`` of mallopt(3)."""


def limit_malloc_arenas() -> bool:
    """Make all threads of this process share `MAX_ARENAS` arenas; False without glibc."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, MAX_ARENAS) == 1


def trim_heap() -> bool:
    """Return free pages to the system; False if there were none, or without glibc.

    Takes some milliseconds, during which other threads may wait for memory.
    """
    if sys.platform != "linux":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the call releases the GIL
    return trim is not None and trim(0) == 1


LOG = logging.getLogger("expertctl.server")
DRAIN_SECONDS = 30
_CANCEL_SECONDS = 15
"""How long cancelled jobs may take to end before the worker is killed."""
_TRIM_SECONDS = 20.0
ReportAddress = Callable[[ListenAddress], None]


def serve(
    settings: ServeSettings,
    home: Settings,
    *,
    insecure: bool = False,
    prepare: Callable[[], object] = lambda: None,
    report: ReportAddress,
) -> None:
    """Serve until SIGTERM or SIGINT; call ``report`` with the address once jobs are accepted.

    ``prepare`` is called after the settings and the address have been checked.

    Raises:
        UsageError: when others could reach the server without keys, or read keys in transit; or
            when an alias hides a base.
        NotFoundError: when an alias stands for a model or an expert that is not installed.
        RegistryError: when the address cannot be used, or the worker died.
        ExpertError: when the base cannot be served.
    """
    check_settings(settings)
    require_secure(settings, keyed=ApiKeyStore(home.home.api_keys).are_required, insecure=insecure)
    secure = settings.certificate is not None
    if settings.engine.device == "cuda":  # CUDA fails in a fork of a process that probed it
        multiprocessing.set_start_method("spawn", force=True)
    with reserve_address(settings.host, settings.port, secure=secure) as address:
        news, tell = multiprocessing.Pipe(duplex=False)
        hosting = _build_hosting(settings)
        server = build_server(hosting, address)
        prepare()
        _check_aliases(settings, home)
        worker_report = _WorkerReport(address, report)
        threading.Thread(target=worker_report.listen, args=(news,), daemon=True).start()
        try:
            run_server(
                server,
                hosting,
                partial(_load_app, settings, address, home, tell),
            )
        except RegistryError:
            worker_report.raise_problem()
            raise
        worker_report.raise_problem()


def _check_aliases(settings: ServeSettings, home: Settings) -> None:
    if settings.aliases:
        known = BaseStore(home.home.bases).list_bases()
        check_alias_bases(settings.aliases, {base.name for base in known})
        check_alias_experts(settings.aliases, Store(home.home.store))


@dataclass(slots=True)
class _WorkerReport:
    """Receives the worker's message, in the parent process."""

    address: ListenAddress
    report: ReportAddress
    problem: ExpertError | None = None

    def listen(self, news: Connection) -> None:
        """Report that jobs are accepted, or keep the error and stop the server."""
        with suppress(EOFError, OSError):
            message: object = news.recv()
            if isinstance(message, ExpertError):
                self.problem = message
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                self.report(self.address)

    def raise_problem(self) -> None:
        if self.problem is not None:
            raise self.problem


def _build_hosting(settings: ServeSettings) -> GranianOptions:
    return GranianOptions(
        name="serve",
        log=build_log_config("expertctl.server", "opentelemetry"),
        drain_seconds=DRAIN_SECONDS + _CANCEL_SECONDS,
        certificate=settings.certificate,
        private_key=settings.private_key,
        on_stop=_begin_shutdown,
        on_second_interrupt=_hasten_shutdown,
    )


def _load_app(
    settings: ServeSettings, address: ListenAddress, home: Settings, tell: Connection
) -> Starlette:
    """Build the application in the worker, the only process that imports the engine."""
    from expertctl.server.app import EngineWorker

    limit_malloc_arenas()
    secret = create_secret()
    opening = EngineWorker(replace(settings, port=address.port, secret=secret), home)
    registration = ServerRegistration(home.home.servers, secret=secret)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        def announce(problem: ExpertError | None) -> None:
            if problem is None:
                base = app.state.service.engine.base_name
                _register(registration, address, base, describe_policy(settings, home))
            tell.send(problem)

        app.state.registration = registration
        opening.start(announce)
        tidying = asyncio.create_task(_trim_heap_regularly())
        yield
        registration.withdraw()
        tidying.cancel()
        opening.shut_down()

    return opening.build_app(lifespan)


def _register(
    registration: ServerRegistration, address: ListenAddress, base: str, policy: Policy
) -> None:
    """Write the record of the server; without TLS only, as certificates name public addresses."""
    if address.secure:
        return
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)  # noqa: S104  # listening there includes loopback
    url = replace(address, host=host).url
    try:
        registration.publish(pid=os.getppid(), url=url, base=base, policy=policy)
    except (OSError, StoreError) as error:
        LOG.warning("run and chat will not use this server by themselves: %s", error)


def describe_policy(settings: ServeSettings, home: Settings) -> Policy:
    """Return what may make answers of this server differ from those of `run`."""
    engine, folder = settings.engine, find_working_folder()
    return {
        **describe_home_policy(home, folder),
        "dtype": engine.dtype,
        "adapter_dtype": engine.adapter_dtype,
        "deterministic": engine.deterministic,
        "device": engine.device,
        "moe_miss": engine.moe_miss,
        "on_budget": engine.batching.on_budget,
        "timeout": settings.timeout,
        "log_prompts": settings.log_prompts,
    }


async def _trim_heap_regularly() -> None:
    """Trim the heap every `_TRIM_SECONDS`, to return what a burst of jobs left free."""
    while True:
        await asyncio.sleep(_TRIM_SECONDS)
        await to_thread.run_sync(trim_heap)


def _begin_shutdown(app: Starlette) -> None:
    app.state.registration.withdraw()
    app.state.opening.close_soon(seconds=DRAIN_SECONDS)


def _hasten_shutdown(app: Starlette) -> None:
    app.state.opening.cancel_soon()
