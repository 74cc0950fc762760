"""What happens where a routed expert is not in memory: `MissPolicy`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MissPolicy:
    """What happens where an expert is missing: it is brought, or left out within a cap.

    ``cap`` is the largest share of a token's weights that may be left out. With ``reads_ahead``,
    what the next layer will ask for is read early; how fast that is decides what is left out.
    """

    skips: bool = False
    cap: float = 1.0
    reads_ahead: bool = True


EXACT = MissPolicy()
