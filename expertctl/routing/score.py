"""The score of an expert for a prompt, its threshold, and the order of candidates.

The score is the head's calibrated evidence. Nothing lifts it: an expert whose answers were judged
bad loses some of it, and what else is known only decides between equals.
"""

THRESHOLD = 0.5
"""An expert is used only from this score on; below it the base answers alone."""
DEFAULT_SUCCESS = 0.5
"""The success rate of an expert that nobody has judged."""

_MIB = 1 << 20


def trusted(score: float, *, success: float) -> float:
    """Return a score less what bad answers took from it: half of it when all were bad."""
    return score * min(1.0, 0.5 + success)


def mebibytes(size: int) -> float:
    """Return bytes in MiB, the unit of what experts take in memory."""
    return size / _MIB


Order = tuple[float, bool, float, float, float, str]
"""What candidates are sorted by."""

_DECIDES = ("its score", "a flag", "success", "priority", "size", "name")


def order_key(
    *, score: float, flagged: bool, success: float, priority: float, vram_mb: float, name: str
) -> Order:
    """Sort key: the best score first.

    Of equals, first what is not suspicious, then what was judged better, then by the manifest's
    priority, then the smaller one, then by name.
    """
    return (-round(score, 2), flagged, -round(success, 2), -priority, vram_mb, name)


def decided_tie(first: Order, second: Order) -> str:
    """Say what put one of two equal scores first; empty when the scores are not equal."""
    differs = next(n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    return _DECIDES[differs] if differs else ""
