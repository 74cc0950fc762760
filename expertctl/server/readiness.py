"""Whether the engine can take jobs: not before the base is loaded and warm, nor at the end."""

from typing import Literal

from msgspec import Struct

State = Literal["loading", "ready", "failed", "ending"]


class ReadinessDocument(Struct, frozen=True):
    """Whether jobs are taken, and what keeps them from that."""

    ready: bool
    state: State


class Readiness:
    """The owner of what is told about the engine; it changes from any thread."""

    def __init__(self, state: State = "ready") -> None:
        """Begin in a state."""
        self.state: State = state

    @property
    def document(self) -> ReadinessDocument:
        """What is told of it."""
        return ReadinessDocument(self.is_ready, self.state)

    @property
    def is_ready(self) -> bool:
        """Whether jobs are taken."""
        return self.state == "ready"
