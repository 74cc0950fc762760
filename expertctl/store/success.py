"""`SuccessRates`: how well experts did of late, by task, from evidence that fades with its age.

Evidence halves every `HALF_LIFE_DAYS`. Nobody starts from nothing: an expert begins at `PRIOR`, as
if it had been judged `STRENGTH` times, and at a task it begins at what it is worth at the others.
What the form of answers says counts for `STRENGTH` judgements at most, however often it is seen.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from expertctl.digest import Digest

HALF_LIFE_DAYS = 30.0
PRIOR = 0.5
STRENGTH = 4.0
"""How many judgements the prior counts for."""

_DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What speaks for and against one expert at one task, weighed at one time."""

    at: float
    """Seconds since the epoch."""
    good: float = 0.0
    bad: float = 0.0
    well_formed: float = 0.0
    malformed: float = 0.0

    def __bool__(self) -> bool:
        """Tell whether there is any."""
        return any((self.good, self.bad, self.well_formed, self.malformed))

    def aged(self, now: float) -> Self:
        """Return what of it is left; a clock that was set back takes and gives nothing."""
        return replace(self._times(fading(self.at, now)), at=now)

    def share(self, count: int) -> Self:
        """Return what one of so many experts has of it."""
        return self._times(1 / count)

    def plus(self, other: Self) -> Self:
        """Return it with more evidence of the same time."""
        return self._joined(other, 1)

    def minus(self, other: Self) -> Self:
        """Return it with less evidence of the same time; never less than none."""
        return self._joined(other, -1)

    def _joined(self, other: Self, sign: int) -> Self:
        return replace(
            self,
            good=max(0.0, self.good + sign * other.good),
            bad=max(0.0, self.bad + sign * other.bad),
            well_formed=max(0.0, self.well_formed + sign * other.well_formed),
            malformed=max(0.0, self.malformed + sign * other.malformed),
        )

    def _times(self, factor: float) -> Self:
        return replace(
            self,
            good=self.good * factor,
            bad=self.bad * factor,
            well_formed=self.well_formed * factor,
            malformed=self.malformed * factor,
        )


def fading(then: float, now: float) -> float:
    """Return the share of evidence that is left after a while."""
    return float(2.0 ** (-max(0.0, now - then) / (HALF_LIFE_DAYS * _DAY)))


@dataclass(frozen=True, slots=True)
class SuccessRates:
    """The rates of all experts that somebody or something has judged."""

    by_expert: Mapping[Digest, float]
    by_task: Mapping[tuple[Digest, str], float]

    @classmethod
    def weigh(cls, evidence: Iterable[tuple[Digest, str, Evidence]], *, now: float) -> Self:
        """Weigh evidence, one entry for each expert and task."""
        tasks: dict[Digest, dict[str, Evidence]] = defaultdict(dict)
        for digest, task, found in evidence:
            tasks[digest][task] = found.aged(now)
        return cls(
            {digest: _rate(each.values(), PRIOR) for digest, each in tasks.items()},
            {
                (digest, task): _rate([found], _rate(_others(each, task), PRIOR))
                for digest, each in tasks.items()
                for task, found in each.items()
            },
        )

    def of(self, digest: Digest, *, task: str | None = None) -> float | None:
        """Return the rate of an expert at a task, else at any; None when nobody has judged it."""
        overall = self.by_expert.get(digest)
        return overall if task is None else self.by_task.get((digest, task), overall)


def _others(tasks: Mapping[str, Evidence], task: str) -> list[Evidence]:
    return [found for name, found in tasks.items() if name != task]


def _rate(evidence: Iterable[Evidence], prior: float) -> float:
    found = list(evidence)
    good, bad = sum(e.good for e in found), sum(e.bad for e in found)
    formed, malformed = sum(e.well_formed for e in found), sum(e.malformed for e in found)
    part = min(1.0, STRENGTH / (formed + malformed)) if formed + malformed else 0.0
    good, bad = good + part * formed, bad + part * malformed
    return (good + STRENGTH * prior) / (good + bad + STRENGTH)
