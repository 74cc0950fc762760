"""The report on half an hour of load: wrong answers, growth of memory, resources not freed.

A run can be saved as a file, with a line for each sample and for each request, and plotted: memory,
the queue, and the time to the first token.
"""

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.soak.caller import CallRecord
from benchmarks.soak.home import Absence, HomeChange
from benchmarks.soak.monitor import ServerSample, is_idle
from benchmarks.soak.requests import InvalidRequest, SoakRequest

FIT_BLOCKS = 20
"""A line is fitted to the means of this many intervals: neighbouring samples are correlated, so a
line through single samples would seem more certain than it is.
"""
GROWTH = 0.01
"""By how much the last third of the time may exceed the second."""
SPARE_THREADS = 8
"""Threads of pools that start when many requests come at once, and stay."""
TOO_MANY = 429
_MAX_CHARACTERS = 200
"""Characters of a message."""
_TIMED_OUT = ("timed_out", "timeout")


@dataclass(frozen=True, slots=True)
class LineFit:
    """A straight line through values over time: its slope, and the standard error of that."""

    slope: float
    error: float


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """The resident set of a server over the time of the load, in bytes."""

    second_third: float
    last_third: float
    per_second: LineFit
    """Over both of them."""

    @property
    def growth(self) -> float:
        """By how much the last third exceeds the second, as a share of the second."""
        return self.last_third / self.second_third - 1


def fit_line(times: Sequence[float], values: Sequence[float]) -> LineFit:
    """Fit a line to the means of `FIT_BLOCKS` intervals."""
    size = max(len(times) // FIT_BLOCKS, 1)
    blocks = range(0, len(times) - size + 1, size)
    x = [statistics.fmean(times[at : at + size]) for at in blocks]
    y = [statistics.fmean(values[at : at + size]) for at in blocks]
    if len(x) < 3:
        return LineFit(0.0, float("inf"))
    line = statistics.linear_regression(x, y)
    around = [b - line.slope * a - line.intercept for a, b in zip(x, y, strict=True)]
    mean = statistics.fmean(x)
    spread = sum((a - mean) ** 2 for a in x)
    error = (sum(rest**2 for rest in around) / (len(x) - 2) / spread) ** 0.5
    return LineFit(line.slope, error)


def measure_memory(samples: Sequence[ServerSample]) -> MemoryGrowth:
    """Compare the thirds of a run."""
    third = len(samples) // 3
    later = samples[third:]
    resident = [float(sample.processes.resident) for sample in later]
    return MemoryGrowth(
        second_third=statistics.fmean(resident[:third]),
        last_third=statistics.fmean(resident[-third:]),
        per_second=fit_line([sample.at for sample in later], resident),
    )


def count_refused(told: Sequence[CallRecord]) -> int:
    """Return the number of requests that were refused for lack of capacity."""
    return sum(one.status == TOO_MANY for one in told)


def count_faults(told: Sequence[CallRecord], away: Sequence[Absence]) -> int:
    """Return the number of requests that got a wrong answer."""
    return sum(_find_fault(one, away) is not None for one in told)


def describe_faults(told: Sequence[CallRecord], away: Sequence[Absence]) -> list[str]:
    """Describe each kind of wrong answer: their number, and the message of one."""
    wrong = [(one, fault) for one in told if (fault := _find_fault(one, away))]
    counts = Counter((one.kind, one.status, _fault_prefix(fault)) for one, fault in wrong)
    examples = {_fault_prefix(fault): fault for _, fault in reversed(wrong)}
    return [
        f"{count} times {kind}, status {status}: {examples[prefix]}"
        for (kind, status, prefix), count in counts.most_common()
    ]


def list_failed_changes(changes: Sequence[HomeChange]) -> list[str]:
    """Describe the changes of the home that were refused."""
    failed = (change for change in changes if change.code)
    return [
        f"{' '.join(one.words)}: exit {one.code}: {one.output[:_MAX_CHARACTERS]}" for one in failed
    ]


def list_leaks(
    before: ServerSample, after: ServerSample, told: Sequence[CallRecord]
) -> Iterator[str]:
    """Describe resources that a server has not freed."""
    if not is_idle(after):
        live = {name: value for name, value in after.metrics.items() if "memory" not in name}
        yield f"the server is not idle: {live}"
    if after.processes.ids != before.processes.ids:
        yield f"other processes than before: {before.processes.ids}, now {after.processes.ids}"
    if after.processes.files > before.processes.files:
        yield f"{after.processes.files} open files, {before.processes.files} before"
    if after.processes.threads > before.processes.threads + SPARE_THREADS:
        yield f"{after.processes.threads} threads, {before.processes.threads} before"
    limit = after.sum_metric("expertctl_memory_limit_bytes")
    if after.sum_metric("expertctl_memory_peak_bytes") > limit:
        yield f"more was held than the budget of {limit:.0f} bytes"
    if stuck := sum(one.ended == 0.0 for one in told):
        yield f"{stuck} callers have no answer"


def _find_fault(one: CallRecord, away: Sequence[Absence]) -> str | None:
    """Return the error of an answer, if it has one."""
    asked = one.asked
    if one.problem is not None:
        return one.problem
    if one.status == TOO_MANY or (one.is_left and one.status is None):
        return None
    if isinstance(asked, InvalidRequest):
        got = f"{asked.method} {asked.path} {asked.content[:80]!r}: {one.error}"
        return None if one.status == asked.status else f"it must be {asked.status}: {got}"
    fine = one.status in {200, 202} and one.error is None
    return None if fine or _is_excused(one, asked, away) else f"{one.error}"[:_MAX_CHARACTERS]


def _is_excused(one: CallRecord, asked: SoakRequest, away: Sequence[Absence]) -> bool:
    """Return whether an error was expected: a time limit, or an expert that was removed."""
    said = one.error or ""
    if asked.is_timed and (one.status == 408 or any(word in said for word in _TIMED_OUT)):
        return True
    if one.status != 404 and "not_found" not in said:
        return False
    gone = {span.name for span in away if span.overlaps(started=one.begun, ended=one.ended)}
    return not gone.isdisjoint(asked.experts)


def _fault_prefix(fault: str) -> str:
    """Return the beginning of a message, which is the same for errors of one kind."""
    return fault[:30]


def write_record(samples: Sequence[ServerSample], told: Sequence[CallRecord], path: Path) -> None:
    """Write lines of JSON; times are seconds since the first sample."""
    begun = samples[0].at
    lines = (*_iterate_samples(samples, begun), *_iterate_calls(told, begun))
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def _iterate_samples(samples: Sequence[ServerSample], begun: float) -> Iterator[dict[str, object]]:
    for sample in samples:
        seen = {"processes": asdict(sample.processes), "metrics": dict(sample.metrics)}
        yield {"at": round(sample.at - begun, 3), **seen}


def _iterate_calls(told: Sequence[CallRecord], begun: float) -> Iterator[dict[str, object]]:
    for one in told:
        yield {
            "at": round(one.begun - begun, 3),
            "asked": one.kind,
            "status": one.status,
            "error": one.error,
            "problem": one.problem,
            "left": one.is_left,
            "first": one.first,
            "seconds": round(one.seconds, 4),
        }


INTERVALS = 60
"""Percentiles are computed over this many intervals of the time."""
_QUEUES = {
    "expertctl_queue_jobs": "wait",
    "expertctl_preparing_jobs": "prepared",
    "expertctl_batch_texts": "written",
}


def draw_soak(samples: Sequence[ServerSample], told: Sequence[CallRecord], path: Path) -> None:
    """Plot three curves one above the other, over minutes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    begun = samples[0].at
    minutes = [(sample.at - begun) / 60 for sample in samples]
    figure, (memory, queue, first) = pyplot.subplots(3, 1, sharex=True, figsize=(8, 8))
    memory.plot(minutes, [sample.processes.resident / 1e6 for sample in samples])
    memory.set_ylabel("MB resident")
    for name, label in _QUEUES.items():
        jobs = [sample.sum_metric(name) for sample in samples]
        queue.plot(minutes, jobs, linewidth=0.6, label=label)
    queue.set_ylabel("jobs and texts")
    queue.legend(loc="upper right")
    for share in (0.5, 0.99):
        at, seconds = _compute_percentiles(told, begun=begun, end=samples[-1].at, share=share)
        first.plot(at, seconds, label=f"p{share * 100:.0f}")
    first.set_ylabel("seconds to the first token")
    first.set_yscale("log")
    first.set_xlabel("minutes")
    first.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _compute_percentiles(
    told: Sequence[CallRecord], *, begun: float, end: float, share: float
) -> tuple[list[float], list[float]]:
    """Return the middle of each interval, in minutes, and the percentile in it."""
    length = (end - begun) / INTERVALS
    at, seconds = list[float](), list[float]()
    for number in range(INTERVALS):
        since = begun + number * length
        firsts = sorted(
            one.first for one in told if one.first and since <= one.begun < since + length
        )
        if firsts:
            at.append((number + 0.5) * length / 60)
            seconds.append(firsts[min(int(share * len(firsts)), len(firsts) - 1)])
    return at, seconds
