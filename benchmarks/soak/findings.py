"""What half an hour of load comes to: wrong answers, memory that grew, what was kept."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.soak.caller import Told
from benchmarks.soak.churn import Away, Change
from benchmarks.soak.mistake import Mistake
from benchmarks.soak.request import Request
from benchmarks.soak.watch import Sample, is_idle

BLOCKS = 20
"""Means of so many stretches are fitted: neighbours in time are alike, so a line through single
samples would seem surer than it is."""
GROWTH = 0.01
"""What the last third of the time may hold more than the second."""
SPARE_THREADS = 8
"""Threads of pools that start when many requests come at once, and stay."""
TOO_MANY = 429
_SHOWN = 200
"""Characters of a message."""
_TIMED_OUT = ("timed_out", "timeout")


@dataclass(frozen=True, slots=True)
class Fit:
    """A straight line through values over time: how steep it is, and the standard error of that."""

    slope: float
    error: float


@dataclass(frozen=True, slots=True)
class Memory:
    """The resident set of a server over the time of the load, in bytes."""

    second_third: float
    last_third: float
    per_second: Fit
    """Over both of them."""

    @property
    def growth(self) -> float:
        """What the last third held more, as a share of the second."""
        return self.last_third / self.second_third - 1


def fit(times: Sequence[float], values: Sequence[float]) -> Fit:
    """Fit a line to the means of `BLOCKS` stretches."""
    size = max(len(times) // BLOCKS, 1)
    blocks = range(0, len(times) - size + 1, size)
    x = [statistics.fmean(times[at : at + size]) for at in blocks]
    y = [statistics.fmean(values[at : at + size]) for at in blocks]
    if len(x) < 3:
        return Fit(0.0, float("inf"))
    line = statistics.linear_regression(x, y)
    around = [b - line.slope * a - line.intercept for a, b in zip(x, y, strict=True)]
    mean = statistics.fmean(x)
    spread = sum((a - mean) ** 2 for a in x)
    error = (sum(rest**2 for rest in around) / (len(x) - 2) / spread) ** 0.5
    return Fit(line.slope, error)


def memory_of(samples: Sequence[Sample]) -> Memory:
    """Compare the thirds of a run."""
    third = len(samples) // 3
    later = samples[third:]
    resident = [float(sample.processes.resident) for sample in later]
    return Memory(
        second_third=statistics.fmean(resident[:third]),
        last_third=statistics.fmean(resident[-third:]),
        per_second=fit([sample.at for sample in later], resident),
    )


def refused(told: Sequence[Told]) -> int:
    """Return how many requests were refused for want of room."""
    return sum(one.status == TOO_MANY for one in told)


def faults(told: Sequence[Told], away: Sequence[Away]) -> int:
    """Return how many requests got a wrong answer."""
    return sum(_fault(one, away) is not None for one in told)


def not_asked_for(told: Sequence[Told], away: Sequence[Away]) -> list[str]:
    """Say of each kind of wrong answer how many there were, and what one of them said."""
    wrong = [(one, fault) for one in told if (fault := _fault(one, away))]
    counts = Counter((one.kind, one.status, _head(fault)) for one, fault in wrong)
    return [
        f"{count} times {kind}, status {status}: {next(f for o, f in wrong if _head(f) == head)}"
        for (kind, status, head), count in counts.most_common()
    ]


def failed_changes(changes: Sequence[Change]) -> list[str]:
    """Say which changes of the home were refused."""
    failed = (change for change in changes if change.code)
    return [f"{' '.join(one.words)}: exit {one.code}: {one.said[:_SHOWN]}" for one in failed]


def kept_at_end(before: Sample, after: Sample, told: Sequence[Told]) -> Iterator[str]:
    """Say what a server still has that it should have given back."""
    if not is_idle(after):
        live = {name: value for name, value in after.metrics.items() if "memory" not in name}
        yield f"the server is not idle: {live}"
    if after.processes.ids != before.processes.ids:
        yield f"other processes than before: {before.processes.ids}, now {after.processes.ids}"
    if after.processes.files > before.processes.files:
        yield f"{after.processes.files} open files, {before.processes.files} before"
    if after.processes.threads > before.processes.threads + SPARE_THREADS:
        yield f"{after.processes.threads} threads, {before.processes.threads} before"
    limit = after.metric("expertctl_memory_limit_bytes")
    if after.metric("expertctl_memory_peak_bytes") > limit:
        yield f"more was held than the budget of {limit:.0f} bytes"
    if stuck := sum(one.ended == 0.0 for one in told):
        yield f"{stuck} callers have no answer"


def _fault(one: Told, away: Sequence[Away]) -> str | None:
    """Return what is wrong with an answer, if anything is."""
    asked = one.asked
    if one.problem is not None:
        return one.problem
    if one.status == TOO_MANY or (one.is_left and one.status is None):
        return None
    if isinstance(asked, Mistake):
        got = f"{asked.method} {asked.path} {asked.content[:80]!r}: {one.error}"
        return None if one.status == asked.status else f"it must be {asked.status}: {got}"
    fine = one.status in {200, 202} and one.error is None
    return None if fine or _is_excused(one, asked, away) else f"{one.error}"[:_SHOWN]


def _is_excused(one: Told, asked: Request, away: Sequence[Away]) -> bool:
    """Tell whether an error was to be expected: a time limit, or an expert that was removed."""
    said = one.error or ""
    if asked.is_timed and (one.status == 408 or any(word in said for word in _TIMED_OUT)):
        return True
    if one.status != 404 and "not_found" not in said:
        return False
    gone = {span.name for span in away if span.overlaps(begun=one.begun, ended=one.ended)}
    return not gone.isdisjoint(asked.experts)


def _head(fault: str) -> str:
    """Return the beginning of a fault, which those of one kind share."""
    return fault[:30]
