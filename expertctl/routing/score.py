"""The score of an expert for a prompt, its threshold, and the order of candidates.

The score is the head's calibrated evidence. Nothing lifts it: an expert whose answers were judged
bad loses some of it, and what else is known only decides between equals.
"""

import math

THRESHOLD = 0.5
"""An expert is used only from this score on; below it the base answers alone."""
DEFAULT_SUCCESS = 0.5
"""The success rate of an expert without judgements."""

_MIB = 1 << 20
_LEAST = 1e-12


def trusted(score: float, *, success: float) -> float:
    """Return a score reduced by bad answers: half of it when all were bad."""
    return score * min(1.0, 0.5 + success)


def log_odds(score: float) -> float:
    """Return the logarithm of the odds that a score stands for, which is bounded."""
    return math.log(max(score, _LEAST) / max(1 - score, _LEAST))


def mebibytes(size: int) -> float:
    """Return bytes in MiB, the unit of what experts take in memory."""
    return size / _MIB


def two_decimals(figure: float) -> str:
    """Return a figure as a person reads it; there is no -0.00."""
    return f"{round(figure, 2) + 0.0:.2f}"


Order = tuple[float, bool, float, float, float, str]
"""What candidates are sorted by."""

_DECIDES = ("its score", "a flag", "success", "priority", "size", "name")


def order_key(
    *, score: float, flagged: bool, success: float, priority: float, vram_mb: float, name: str
) -> Order:
    """Sort key: the best score first, by its odds: near 1 scores differ by less than they mean.

    Equals are ordered by: not suspicious, judged better, the manifest's priority, smaller, name.
    """
    return (-round(log_odds(score), 1), flagged, -round(success, 2), -priority, vram_mb, name)


def decided_tie(first: Order, second: Order) -> str:
    """Say what put one of two equal scores first; empty when the scores are not equal."""
    differs = next(n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    return _DECIDES[differs] if differs else ""
