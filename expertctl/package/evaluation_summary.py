"""Evaluations in words: counts of right answers, their share, and what it is worth for so many."""

from dataclasses import dataclass

from expertctl.package.proportion import Interval, share_interval
from expertctl.schema.manifest import Evaluation

_SHARES = frozenset({"exact_match", "contains", "json", "accuracy"})
"""Metrics whose values are shares of right answers."""
_ROUNDING = 0.00005
"""By how much a share in a manifest may differ: `expertctl build` writes four digits."""


@dataclass(frozen=True, slots=True)
class EvaluationSummary:
    """An entry of ``evaluation``, for tables; ``interval`` is empty where the metric has none."""

    base: str
    expert: str
    interval: str


def summarise(entry: Evaluation) -> EvaluationSummary:
    """Return the results of an entry: counts where its metric counts right answers."""
    n, base, expert = entry.n, right_answers(entry, entry.base), right_answers(entry, entry.expert)
    if base is None or expert is None:
        return EvaluationSummary(f"{entry.base:.4g}", f"{entry.expert:.4g}", "")
    interval = interval_text(share_interval(expert, n), n)
    return EvaluationSummary(count_text(base, n), count_text(expert, n), interval)


def evaluation_text(entry: Evaluation) -> str:
    """Return an entry in one line: ``5 of 5 right (100 %, …); base alone 0 of 5``."""
    n, base, expert = entry.n, right_answers(entry, entry.base), right_answers(entry, entry.expert)
    if base is None or expert is None:
        values = f"{entry.expert:.4g}; base alone {entry.base:.4g}"
        return f"{values} ({entry.metric}, n = {n})"
    share = share_text(expert, n)
    interval = interval_text(share_interval(expert, n), n)
    return f"{expert} of {n} right ({share}, 95 % interval {interval}); base alone {base} of {n}"


def right_answers(entry: Evaluation, value: float) -> int | None:
    """Return how many answers a share stands for; None if it is not the share of a count."""
    if entry.metric not in _SHARES or not 0 <= value <= 1:
        return None
    count = round(value * entry.n)
    return count if abs(value - count / entry.n) <= _ROUNDING + 1e-9 else None


def count_text(right: int, n: int) -> str:
    """Return a count of right answers with its share: ``5 of 5 (100 %)``."""
    return f"{right} of {n} ({share_text(right, n)})"


def share_text(right: int, n: int) -> str:
    """Return the share of right answers in per cent: 100 only for all of them, 0 only for none."""
    least = 10.0 ** -_digits(n)
    shown = 100 * right / n
    if 0 < right < n:
        shown = min(max(shown, least), 100 - least)
    return percent(shown / 100, n)


def interval_text(interval: Interval, n: int) -> str:
    """Return an interval of a share: ``57 to 100 %``."""
    return f"{percent(interval.low, n).removesuffix(' %')} to {percent(interval.high, n)}"


def percent(share: float, n: int) -> str:
    """Return a share of ``n`` answers in per cent, with as many digits as so many allow."""
    return f"{100 * share:.{_digits(n)}f} %"


def _digits(n: int) -> int:
    return 1 if n >= 1000 else 0
