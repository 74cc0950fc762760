"""`SuccessRates`: how well experts did of late, by task, from evidence that fades with its age.

Evidence halves every `HALF_LIFE_DAYS`. An expert begins at `PRIOR`, as if it had been judged
`STRENGTH` times; at a new task it begins at its rate over the others. Evidence from the form of
answers counts for `STRENGTH` judgements at most, however much of it there is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from expertctl.digest import Digest

HALF_LIFE_DAYS = 30.0
PRIOR = 0.5
STRENGTH = 4.0
"""How many judgements the prior counts for."""

_DAY = 86_400.0
KeptEvidence = tuple[str, float, float, float, float, float]
"""A task, and the numbers of a row."""


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
        """Return what is left of it; a clock that was set back changes nothing."""
        return replace(self._times(fading(self.at, now)), at=now)

    def share(self, count: int) -> Self:
        """Return the share of one of several experts in it."""
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


class SuccessRates:
    """The rates of all experts with evidence; each rate is computed when it is asked for.

    Of thousands of experts few are candidates, so evidence is read fast and weighed late.
    """

    def __init__(self, kept: Mapping[str, Sequence[KeptEvidence]], *, now: float) -> None:
        """Take the stored evidence by content digest as text, weighed at one time."""
        self._kept, self._now = kept, now
        self._rates: dict[tuple[Digest, str | None], float | None] = {}

    def of(self, digest: Digest, *, task: str | None = None) -> float | None:
        """Return the rate of an expert at a task, else at any; None without evidence."""
        key = (digest, task)
        if key not in self._rates:
            self._rates[key] = self._weighed(digest, task)
        return self._rates[key]

    def _weighed(self, digest: Digest, task: str | None) -> float | None:
        kept = self._kept.get(str(digest))
        if kept is None:
            return None
        aged = {name: evidence_of(row).aged(self._now) for name, *row in kept}
        if task not in aged:
            return _rate(aged.values(), PRIOR)
        others = [found for name, found in aged.items() if name != task]
        return _rate([aged[task]], _rate(others, PRIOR))


def evidence_of(numbers: Sequence[float]) -> Evidence:
    """Read the numbers of one row: good, bad, well formed, malformed, time."""
    good, bad, well_formed, malformed, at = numbers
    return Evidence(at=at, good=good, bad=bad, well_formed=well_formed, malformed=malformed)


def _rate(evidence: Iterable[Evidence], prior: float) -> float:
    found = list(evidence)
    good, bad = sum(e.good for e in found), sum(e.bad for e in found)
    formed, malformed = sum(e.well_formed for e in found), sum(e.malformed for e in found)
    part = min(1.0, STRENGTH / (formed + malformed)) if formed + malformed else 0.0
    good, bad = good + part * formed, bad + part * malformed
    return (good + STRENGTH * prior) / (good + bad + STRENGTH)
