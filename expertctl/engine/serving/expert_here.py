"""`ExpertHere`: an installed expert, and what it is to a server of one base."""

from dataclasses import dataclass

from expertctl.routing.candidate import Installed


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertHere:
    """One version of one expert."""

    expert: Installed
    fits: bool
    """Whether it was made for the base that is served."""
    in_memory: bool
    """Whether its weights are there for the next job that wants it."""
