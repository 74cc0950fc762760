"""`Opening`: the engine of a worker, from loading its base to the end of its last job."""

import logging
import os
import threading
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.types import Lifespan

from expertctl.engine.message import UserMessage
from expertctl.engine.request import RunRequest
from expertctl.engine.serving.batch_engine import BatchEngine
from expertctl.errors import (
    ExpertError,
    IncompatibleError,
    NotFoundError,
    RevokedError,
    UsageError,
)
from expertctl.routing.planner import Planner
from expertctl.routing.request import RouteRequest
from expertctl.server.aliases import check_served, named_experts
from expertctl.server.app import create_app
from expertctl.server.model_name import Choice
from expertctl.server.readiness import Readiness
from expertctl.server.service import service_of
from expertctl.server.settings import ServeSettings
from expertctl.settings import Settings
from expertctl.store.preference import working_folder
from expertctl.telling import WARNING

LOG = logging.getLogger("expertctl.server")
LAST_WORDS_SECONDS = 1.0
_ANY_PROMPT = "?"
"""A plan of named experts does not depend on the prompt."""
Tell = Callable[[ExpertError | None], None]
"""Gets None when jobs are accepted, or the error for which none ever will be."""


class Opening:
    """The owner of the engine in a worker."""

    def __init__(self, settings: ServeSettings, home: Settings) -> None:
        """Hold nothing yet."""
        planner = Planner.open(home, tell=LOG.info, folder=working_folder())
        self._engine = BatchEngine(planner, settings.batch, tell=_log, broke=self._break)
        self._readiness = Readiness("loading")
        self._service = service_of(self._engine, planner, settings, readiness=self._readiness)
        self._closing = threading.Lock()
        self._loading: threading.Thread | None = None

    def app(self, lifespan: Lifespan[Starlette]) -> Starlette:
        """Return the application, which answers little before the engine is ready."""
        app = create_app(self._service, lifespan=lifespan)
        app.state.opening = self
        return app

    def begin(self, tell: Tell) -> None:
        """Load the base and warm up, in a thread."""
        self._loading = threading.Thread(target=self._load, args=(tell,), daemon=True)
        self._loading.start()

    def close_soon(self, *, seconds: float) -> None:
        """Begin to close, in a thread."""
        threading.Thread(target=self.close, kwargs={"seconds": seconds}, daemon=True).start()

    def close(self, *, seconds: float) -> None:
        """Accept no more jobs; give the present ones ``seconds`` to end, and wait for all."""
        with self._closing:
            if self._readiness.state == "ready":
                self._readiness.state = "ending"
                self._engine.close(seconds=seconds)

    def end(self) -> None:
        """Close at once, after all requests were answered, and send the last spans."""
        self.close(seconds=0)
        if self._service.tracing is not None:
            self._service.tracing.close()

    def _load(self, tell: Tell) -> None:
        try:
            if self._service.tracing is not None:
                self._service.tracing.open()
            self._engine.start()
            self._check_aliases()
        except ExpertError as error:
            self._readiness.state = "failed"
            tell(error)
            return
        except Exception:  # a bug must not leave a server that never answers
            LOG.exception("loading failed")
            self._readiness.state = "failed"
            tell(ExpertError("the server failed to load", hint="its log says why"))
            return
        if self._readiness.state != "failed":  # the engine may have ended meanwhile
            self._readiness.state = "ready"
        tell(None)

    def _check_aliases(self) -> None:
        service = self._service
        if aliases := service.settings.aliases:
            bases = {base.name for base in service.planner.bases.bases()}
            check_served(aliases, base=self._engine.base_name, bases=bases)
            for alias, model in aliases.items():
                self._check_plan(alias, named_experts(alias, model))

    def _check_plan(self, alias: str, choice: Choice | None) -> None:
        """Check that the base can answer with the experts that an alias stands for, if any.

        A revoked expert is only warned of: other models go on being served.

        Raises:
            NotFoundError: when an expert that is required is not installed.
            IncompatibleError: when they do not fit the base or each other.
        """
        if choice is None:
            return
        route = RouteRequest(prompt=_ANY_PROMPT)
        message = UserMessage(prompt=_ANY_PROMPT)
        try:
            request = RunRequest(message=message, route=route, experts=choice.force)
            self._engine.plan(request).result()
        except RevokedError as error:
            LOG.warning("requests for the alias %s are refused: %s", alias, error.message)
        except (UsageError, NotFoundError, IncompatibleError) as error:
            raise type(error)(f"the alias {alias}: {error.message}", hint=error.hint) from error

    def _break(self) -> None:
        """End the broken worker, a moment later, so that its clients are still told."""
        self._readiness.state = "failed"
        threading.Timer(LAST_WORDS_SECONDS, os._exit, (1,)).start()


def _log(told: str) -> None:
    """Log a message of the engine; lines after the first are the traceback of a bug."""
    first, *trace = told.splitlines()
    if trace:
        LOG.error(first, extra={"fields": {"trace": trace}})
    elif first.startswith(WARNING):
        LOG.warning(first.removeprefix(WARNING))
    else:
        LOG.info(first)
