"""Whether the engine accepts jobs: not before the base is loaded and warm, nor at the end."""

from typing import Literal

from msgspec import Struct

State = Literal["loading", "ready", "failed", "ending"]


class ReadinessDocument(Struct, frozen=True):
    """Whether jobs are taken, and what keeps them from that."""

    ready: bool
    state: State


class Readiness:
    """The owner of the state of the engine; any thread may change it."""

    def __init__(self, state: State = "ready") -> None:
        """Begin in a state."""
        self.state: State = state

    @property
    def document(self) -> ReadinessDocument:
        """The state as a document."""
        return ReadinessDocument(self.is_ready, self.state)

    @property
    def is_ready(self) -> bool:
        """Whether jobs are accepted."""
        return self.state == "ready"
