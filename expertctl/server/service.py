"""What every route of the generation server is given."""

from dataclasses import dataclass
from typing import Protocol

from expertctl.engine.request import RunRequest
from expertctl.routing.planner import Planned
from expertctl.server.generation import Jobs
from expertctl.server.settings import ServeSettings


class Serving(Jobs, Protocol):
    """The batch, as routes use it; what they submit is counted."""

    @property
    def base_name(self) -> str:
        """The name of the base that is served."""

    @property
    def context(self) -> int:
        """How many tokens a text can have, the prompt included."""

    def plan(self, request: RunRequest) -> Planned:
        """Return the plan that a request would have; it blocks, so call it in a thread."""

    def forget(self, cache_key: str) -> None:
        """Forget what was kept under a key."""


@dataclass(frozen=True, slots=True)
class Service:
    """The engine and how it is served; one for the life of the application."""

    engine: Serving
    settings: ServeSettings
