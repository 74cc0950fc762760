"""Serving under granian: one process listens for signals, one worker owns the engine and answers.

The worker answers ``/healthz`` from the start and everything else once the base is loaded. An error
while loading is raised in the parent process. When the worker is told to end it accepts no more
jobs; the present ones get `DRAIN_SECONDS`, then what they have written is their answer.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

from anyio import to_thread
from starlette.applications import Starlette

from expertctl.errors import ExpertError, RegistryError
from expertctl.http.hosting import Hosting, new_server, run
from expertctl.http.listening import Listening, held_address
from expertctl.http.log import log_config
from expertctl.server.aliases import check_bases, check_installed
from expertctl.server.api_keys import ApiKeys
from expertctl.server.exposure import demand_secure
from expertctl.server.heap import bound_arenas, return_free_pages
from expertctl.server.settings import ServeSettings, check_settings
from expertctl.settings import Settings
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store

DRAIN_SECONDS = 30
_LAST_SECONDS = 15
"""How long cancelled jobs may take to end, before the worker is killed."""
_TIDY_SECONDS = 20.0
Report = Callable[[Listening], None]


def _nothing() -> None:
    """Prepare nothing."""


def serve(
    settings: ServeSettings,
    home: Settings,
    *,
    insecure: bool = False,
    prepare: Callable[[], object] = _nothing,
    report: Report,
) -> None:
    """Serve until SIGTERM or SIGINT; call ``report`` with the address once jobs are accepted.

    ``prepare`` is called after the settings and the address were checked.

    Raises:
        UsageError: when others could reach the server without keys, or read keys on the way; or
            when an alias hides a base.
        NotFoundError: when an alias stands for a model or an expert that is not installed.
        RegistryError: when the address cannot be used, or the worker died.
        ExpertError: when the base cannot be served.
    """
    check_settings(settings)
    demand_secure(settings, keyed=ApiKeys(home.home.api_keys).are_demanded, insecure=insecure)
    secure = settings.certificate is not None
    if settings.batch.device == "cuda":  # CUDA fails in a fork of a process that probed it
        multiprocessing.set_start_method("spawn", force=True)
    with held_address(settings.host, settings.port, secure=secure) as address:
        news, tell = multiprocessing.Pipe(duplex=False)
        hosting = _hosting(settings)
        server = new_server(hosting, address)
        prepare()
        _check_aliases(settings, home)
        told = _Told(address, report)
        threading.Thread(target=told.listen, args=(news,), daemon=True).start()
        try:
            run(server, hosting, partial(_load, replace(settings, port=address.port), home, tell))
        except RegistryError:
            told.raise_problem()
            raise
        told.raise_problem()


def _check_aliases(settings: ServeSettings, home: Settings) -> None:
    if settings.aliases:
        known = BaseStore(home.home.bases).bases()
        check_bases(settings.aliases, {base.name for base in known})
        check_installed(settings.aliases, Store(home.home.store))


@dataclass(slots=True)
class _Told:
    """What the worker tells the process that listens for signals."""

    address: Listening
    report: Report
    problem: ExpertError | None = None

    def listen(self, news: Connection) -> None:
        """Report that jobs are accepted; or keep the problem, and end the server."""
        with suppress(EOFError, OSError):
            said: object = news.recv()
            if isinstance(said, ExpertError):
                self.problem = said
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                self.report(self.address)

    def raise_problem(self) -> None:
        if self.problem is not None:
            raise self.problem


def _hosting(settings: ServeSettings) -> Hosting:
    return Hosting(
        name="serve",
        log=log_config("expertctl.server", "opentelemetry"),
        drain_seconds=DRAIN_SECONDS + _LAST_SECONDS,
        certificate=settings.certificate,
        private_key=settings.private_key,
        end=_end,
    )


def _load(settings: ServeSettings, home: Settings, tell: Connection) -> Starlette:
    """Make the application in the worker, the only process that imports torch."""
    from expertctl.server.opening import Opening

    bound_arenas()
    opening = Opening(settings, home)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        opening.begin(tell.send)
        tidying = asyncio.create_task(_tidy())
        yield
        tidying.cancel()
        opening.end()

    return opening.app(lifespan)


async def _tidy() -> None:
    """Return memory that a burst of jobs left free to the system, now and then."""
    while True:
        await asyncio.sleep(_TIDY_SECONDS)
        await to_thread.run_sync(return_free_pages)


def _end(app: Starlette) -> None:
    app.state.opening.close_soon(seconds=DRAIN_SECONDS)
