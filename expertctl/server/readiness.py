"""Whether the engine can take jobs: not before the base is loaded and warm, nor at the end."""

from typing import Literal

State = Literal["loading", "ready", "failed", "ending"]


class Readiness:
    """The owner of what is told about the engine; it changes from any thread."""

    def __init__(self, state: State = "ready") -> None:
        """Begin in a state."""
        self.state: State = state

    @property
    def is_ready(self) -> bool:
        """Whether jobs are taken."""
        return self.state == "ready"
