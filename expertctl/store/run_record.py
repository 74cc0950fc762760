"""Records of past runs, and the success rates and gains that follow from them.

`RunRecord` says which experts answered, how long it took and how the user rated it; it never
contains the prompt or the answer. `SuccessRates` weighs the evidence by its age: it halves every
`HALF_LIFE_DAYS`. An expert begins at `PRIOR`, as if it had been rated `STRENGTH` times; at a new
task it begins at its rate over the others. Evidence from the form of answers counts for `STRENGTH`
ratings at most, however much of it there is. `PairGain` is the measured gain of a chain of two
experts over the better one of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from expertctl.reference import Digest

HALF_LIFE_DAYS = 30.0
PRIOR = 0.5
STRENGTH = 4.0
"""How many ratings the prior counts for."""

_DAY = 86_400.0
_WEIGHTS = ("good", "bad", "well_formed", "malformed")
StoredEvidence = tuple[str, float, float, float, float, float]
"""A task, and the numbers of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """Evidence for and against one expert at one task, weighted as of one time."""

    at: float
    """Seconds since the epoch."""
    good: float = 0.0
    bad: float = 0.0
    well_formed: float = 0.0
    malformed: float = 0.0

    def __bool__(self) -> bool:
        """Tell whether there is any."""
        return any(getattr(self, name) for name in _WEIGHTS)

    def decay_to(self, now: float) -> Self:
        """Return the evidence as of ``now``; a clock that was set back changes nothing."""
        return replace(self._scale(decay_factor(self.at, now)), at=now)

    def divide(self, count: int) -> Self:
        """Return the share of one of several experts."""
        return self._scale(1 / count)

    def add(self, other: Self) -> Self:
        """Return the sum with other evidence of the same time."""
        return self._combine(other, 1)

    def subtract(self, other: Self) -> Self:
        """Return the difference to other evidence of the same time, at least 0."""
        return self._combine(other, -1)

    def _combine(self, other: Self, sign: int) -> Self:
        sums = ((name, getattr(self, name) + sign * getattr(other, name)) for name in _WEIGHTS)
        return replace(self, **{name: max(0.0, value) for name, value in sums})

    def _scale(self, factor: float) -> Self:
        return replace(self, **{name: getattr(self, name) * factor for name in _WEIGHTS})


def decay_factor(then: float, now: float) -> float:
    """Return the share of evidence that is left after a while."""
    return float(2.0 ** (-max(0.0, now - then) / (HALF_LIFE_DAYS * _DAY)))


class SuccessRates:
    """The success rates of all experts with evidence; each is computed on first use.

    Few of thousands of experts are candidates, so all rows are read but only those needed are
    weighed.
    """

    def __init__(self, kept: Mapping[str, Sequence[StoredEvidence]], *, now: float) -> None:
        """Take the stored evidence, by content digest as text; rates are as of ``now``."""
        self._kept, self._now = kept, now
        self._rates: dict[tuple[Digest, str | None], float | None] = {}

    def find_rate(self, digest: Digest, *, task: str | None = None) -> float | None:
        """Return the rate of an expert at a task, else at any; None without evidence."""
        key = (digest, task)
        if key not in self._rates:
            self._rates[key] = self._weighted_rate(digest, task)
        return self._rates[key]

    def _weighted_rate(self, digest: Digest, task: str | None) -> float | None:
        kept = self._kept.get(str(digest))
        if kept is None:
            return None
        aged = {name: parse_evidence(row).decay_to(self._now) for name, *row in kept}
        if task not in aged:
            return _compute_rate(aged.values(), PRIOR)
        others = [found for name, found in aged.items() if name != task]
        return _compute_rate([aged[task]], _compute_rate(others, PRIOR))


def parse_evidence(numbers: Sequence[float]) -> RunEvidence:
    """Parse the numbers of one row: good, bad, well formed, malformed, time."""
    good, bad, well_formed, malformed, at = numbers
    return RunEvidence(at=at, good=good, bad=bad, well_formed=well_formed, malformed=malformed)


def _compute_rate(evidence: Iterable[RunEvidence], prior: float) -> float:
    found = list(evidence)
    good, bad = sum(e.good for e in found), sum(e.bad for e in found)
    formed, malformed = sum(e.well_formed for e in found), sum(e.malformed for e in found)
    part = min(1.0, STRENGTH / (formed + malformed)) if formed + malformed else 0.0
    good, bad = good + part * formed, bad + part * malformed
    return (good + STRENGTH * prior) / (good + bad + STRENGTH)


UserVerdict = Literal["good", "bad"]
ValidationResult = Literal["passed", "failed"]
FINISH_ERROR = "error"
"""The ``finish_reason`` of a run that ended with an error."""
FINISH_LENGTH = "length"
"""The ``finish_reason`` of a truncated answer; its form says nothing about the experts."""

RATING_WEIGHT = 1.0
"""The weight of a user's rating as evidence."""
PASSED_WEIGHT = 0.25
FAILED_WEIGHT = 0.5
"""Form counts less than a rating: an answer may be well-formed and wrong."""


@dataclass(frozen=True, slots=True)
class UsedExpert:
    """An expert that took part in a run."""

    ref: str
    content_digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """Durations of the steps of a run in milliseconds; None for a step that was not reached."""

    route: float | None = None
    load: float | None = None
    ttft: float | None = None
    decode: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Amounts of data and speed of a run; sizes in bytes."""

    prefill_ms: float
    prefill_tokens: int
    """Tokens computed, virtual ones included, those reused from the KV cache excluded."""
    kv_reused_tokens: int
    decode_steps: int
    threads: int
    ssd_bytes: int
    """Bytes read from files into memory."""
    ram_bytes: int
    """Bytes prepared from them for the device to compute with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run, named by its ``job_id`` or a prefix of it."""

    job_id: str
    at: float
    """Seconds since the epoch, at its end."""
    task: str
    base: str
    experts: tuple[UsedExpert, ...]
    finish_reason: str
    validation: ValidationResult | None = None
    verdict: UserVerdict | None = None
    judged_at: float | None = None
    prompt_tokens: int = 0
    generated_tokens: int = 0
    times: RunTimes = RunTimes()
    figures: RunFigures | None = None
    """None for a run that failed, or that took place before figures were stored."""
    blamed: bool = False
    """Whether it ended with an error that the experts caused."""

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The prefill speed, where it is known."""
        if self.figures is None:
            return None
        return _rate_per_second(self.figures.prefill_tokens, self.figures.prefill_ms)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """The decoding speed, where it is known; a single token gives none."""
        if self.figures is None or self.times.decode is None:
            return None
        return _rate_per_second(self.figures.decode_steps, self.times.decode)

    @property
    def evidence(self) -> RunEvidence:
        """The evidence for all experts of the run; a user's rating replaces everything else."""
        at = self.at if self.judged_at is None else self.judged_at
        if self.verdict == "good":
            return RunEvidence(at=at, good=RATING_WEIGHT)
        if self.verdict == "bad" or self.blamed:
            return RunEvidence(at=at, bad=RATING_WEIGHT)
        if self.validation == "passed":
            return RunEvidence(at=at, well_formed=PASSED_WEIGHT)
        if self.validation == "failed" and self.finish_reason != FINISH_LENGTH:
            return RunEvidence(at=at, malformed=FAILED_WEIGHT)
        return RunEvidence(at=at)

    @property
    def outcome(self) -> UserVerdict | None:
        """Whether the run went well, as far as that is known."""
        found = self.evidence
        if not found:
            return None
        return "good" if found.good or found.well_formed else "bad"


def _rate_per_second(count: int, ms: float) -> float | None:
    return count / ms * 1e3 if count and ms > 0 else None


SIGNIFICANCE = 0.05
"""A gain counts where chance alone would produce it less often than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairGain:
    """One measurement: the difference of the shares of right answers, on one base."""

    first: Digest
    second: Digest
    base: str
    gain: float
    low: float
    high: float
    """The 95 % interval of the gain."""
    p: float
    """McNemar's test: the probability of such a difference where there is none."""
    n: int
    at: float
    """Seconds since the epoch."""

    @property
    def pair(self) -> tuple[Digest, Digest]:
        """The experts in the order of the chain."""
        return self.first, self.second

    @property
    def is_significant(self) -> bool:
        """Whether chance does not explain it."""
        return self.low > 0 and self.p < SIGNIFICANCE

    def to_row(self) -> list[object]:
        """Return the row of the table ``gains``."""
        digests = [str(self.first), str(self.second)]
        return [*digests, self.base, self.gain, self.low, self.high, self.p, self.n, self.at]

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Read a row back."""
        first, second = Digest.parse(row["first"]), Digest.parse(row["second"])
        names = ("base", "gain", "low", "high", "p", "n", "at")
        return cls(first=first, second=second, **{name: row[name] for name in names})
