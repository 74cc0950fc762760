"""The score of an expert for a prompt, its threshold, and the order of candidates."""

SIMILAR = 0.6
"""An expert this close to a prompt is a candidate without a keyword or a hint."""
THRESHOLD = 0.6
"""A candidate is used only from this score on; below it the base answers alone."""
DEFAULT_SUCCESS = 0.5
"""The success rate of an expert that nobody has judged."""
DEFAULT_BUDGET = 1 << 30
"""Bytes that experts are weighed against when nobody set a memory budget: 1 GiB."""

_MIB = 1 << 20


def score(*, cosine: float, success: float, vram_mb: float, budget_mb: float) -> float:
    """Return ``0.50*cosine + 0.30*success + 0.20*max(0, 1 - vram/budget)``."""
    return 0.50 * cosine + 0.30 * success + 0.20 * max(0.0, 1 - vram_mb / budget_mb)


def mebibytes(size: int) -> float:
    """Return bytes in MiB, the unit of scores."""
    return size / _MIB


def order_key(*, score: float, priority: float, name: str) -> tuple[float, float, str]:
    """Sort key: the best score first, ties by the manifest's priority, then by name."""
    return (-round(score, 6), -priority, name)
