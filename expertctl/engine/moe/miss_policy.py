"""What happens where a routed expert is not in memory: `MissPolicy`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MissPolicy:
    """What happens where an expert is missing: it is brought, or left out within a cap.

    ``cap`` is how much of a token's weights may be left out at most, of 1. What the next layer will
    ask for is read ahead; then what is left out depends on how fast that is.
    """

    skips: bool = False
    cap: float = 1.0
    reads_ahead: bool = True


EXACT = MissPolicy()
