"""`RunStatistics`: counts and rates over the stored runs, for each expert and for each day."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from statistics import median
from typing import Self

from expertctl.errors import NotFoundError
from expertctl.reference import Digest
from expertctl.store.catalogue import RunHistory, UsageCount
from expertctl.store.run_record import FINISH_ERROR, RunRecord, SuccessRates
from expertctl.store.store import find_similar_names

MAX_NEWEST_RUNS = 10
"""How many runs are listed one by one."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A set of runs, and counts over them."""

    jobs: tuple[RunRecord, ...]

    @property
    def good(self) -> int:
        """How many the user rated good."""
        return sum(job.verdict == "good" for job in self.jobs)

    @property
    def bad(self) -> int:
        """How many the user rated bad."""
        return sum(job.verdict == "bad" for job in self.jobs)

    @property
    def passed(self) -> int:
        """How many answers had the requested form."""
        return sum(job.validation == "passed" for job in self.jobs)

    @property
    def checked(self) -> int:
        """How many answers were checked for a form."""
        return sum(job.validation is not None for job in self.jobs)

    @property
    def errors(self) -> int:
        """How many runs ended with an error."""
        return sum(job.finish_reason == FINISH_ERROR for job in self.jobs)

    @property
    def success(self) -> float | None:
        """The share of good runs among those with a known outcome; None without any."""
        outcomes = [job.outcome for job in self.jobs if job.outcome]
        return outcomes.count("good") / len(outcomes) if outcomes else None

    @property
    def first_token_ms(self) -> float | None:
        """The median time to the first token."""
        return _median(job.times.ttft for job in self.jobs)

    @property
    def total_ms(self) -> float | None:
        """The median time of a whole run."""
        return _median(job.times.total for job in self.jobs)


@dataclass(frozen=True, slots=True)
class ExpertStatistics:
    """One expert: its stored runs, and the number of all uses ever."""

    ref: str
    content_digest: Digest
    """The content that was used last under this name and version."""
    uses: int
    last_used: float | None
    success: float | None
    """The recent success rate that the router uses, with the prior; None without evidence."""
    runs: RunSummary


@dataclass(frozen=True, slots=True)
class DayStatistics:
    """The runs of one day, in local time."""

    day: date
    runs: RunSummary


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """Everything that is shown of a history."""

    runs: RunSummary
    """The newest first."""
    base_only: RunSummary
    """Runs that the base answered without experts."""
    experts: tuple[ExpertStatistics, ...]
    """The most used first."""
    days: tuple[DayStatistics, ...]
    """Consecutive days, the last one today."""

    @classmethod
    def from_history(
        cls, history: RunHistory, *, days: int, today: date, only: str | None = None
    ) -> Self:
        """Count all runs of a history, or only those of one expert.

        ``only`` is its ref, or its name for all versions.

        Raises:
            NotFoundError: when no run of that expert is remembered.
        """
        jobs = history.list_runs()
        if only is not None:
            jobs = _select_runs(jobs, only)
        experts = _count_by_expert(jobs, history.read_usage_counts(), history.read_success_rates())
        return cls(
            runs=RunSummary(tuple(jobs)),
            base_only=RunSummary(tuple(job for job in jobs if not job.experts)),
            experts=tuple(each for each in experts if only is None or _matches_ref(each.ref, only)),
            days=_count_by_day(jobs, days, today),
        )


def _select_runs(jobs: Sequence[RunRecord], wanted: str) -> list[RunRecord]:
    found = [job for job in jobs if any(_matches_ref(used.ref, wanted) for used in job.experts)]
    if found:
        return found
    names = {used.ref.partition("@")[0] for job in jobs for used in job.experts}
    near = find_similar_names(wanted.partition("@")[0], names)
    hint = f"did you mean {' or '.join(near)}?" if near else "`expertctl stats` shows all experts"
    raise NotFoundError(f"no run of {wanted[:80]!r} is remembered", hint=hint)


def _matches_ref(ref: str, wanted: str) -> bool:
    return wanted in {ref, ref.partition("@")[0]}


def _count_by_expert(
    jobs: Sequence[RunRecord], usages: Mapping[Digest, UsageCount], rates: SuccessRates
) -> tuple[ExpertStatistics, ...]:
    """Count by name and version: a version that was built and installed again is one row."""
    contents: dict[str, dict[Digest, None]] = defaultdict(dict)
    by_ref: dict[str, list[RunRecord]] = defaultdict(list)
    for job in jobs:  # the newest first
        for used in job.experts:
            contents[used.ref][used.content_digest] = None
            by_ref[used.ref].append(job)
    found = [
        _expert_statistics(ref, list(digests), by_ref[ref], usages, rates)
        for ref, digests in contents.items()
    ]
    return tuple(sorted(found, key=lambda each: (-each.uses, each.ref)))


def _expert_statistics(
    ref: str,
    digests: Sequence[Digest],
    jobs: Sequence[RunRecord],
    usages: Mapping[Digest, UsageCount],
    rates: SuccessRates,
) -> ExpertStatistics:
    """Return the figures of all contents of a version; the rate is that of the newest one."""
    known = [usages[digest] for digest in digests if digest in usages]
    return ExpertStatistics(
        ref=ref,
        content_digest=digests[0],
        uses=sum(usage.uses for usage in known),
        last_used=max((u.last_used for u in known if u.last_used is not None), default=None),
        success=rates.find_rate(digests[0]),
        runs=RunSummary(tuple(jobs)),
    )


def _count_by_day(jobs: Sequence[RunRecord], count: int, today: date) -> tuple[DayStatistics, ...]:
    by_day: dict[date, list[RunRecord]] = defaultdict(list)
    for job in jobs:
        by_day[local_day(job.at)].append(job)
    days = (today - timedelta(days=back) for back in reversed(range(count)))
    return tuple(DayStatistics(day, RunSummary(tuple(by_day.get(day, ())))) for day in days)


def local_day(seconds: float) -> date:
    """Return the day of a time, in seconds since the epoch, in this machine's time zone."""
    return datetime.fromtimestamp(seconds).astimezone().date()


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
