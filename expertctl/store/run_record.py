"""`SuccessRates`: how well experts did of late, by task, from evidence that fades with its age.

Evidence halves every `HALF_LIFE_DAYS`. An expert begins at `PRIOR`, as if it had been judged
`STRENGTH` times; at a new task it begins at its rate over the others. Evidence from the form of
answers counts for `STRENGTH` judgements at most, however much of it there is.

`Job`: one remembered run: which experts answered, how long it took, how it was judged.

It never contains the prompt or the answer.

`PairGain`: what a chain of two experts was measured to gain over the better one of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from expertctl.digest import Digest

HALF_LIFE_DAYS = 30.0
PRIOR = 0.5
STRENGTH = 4.0
"""How many judgements the prior counts for."""

_DAY = 86_400.0
StoredEvidence = tuple[str, float, float, float, float, float]
"""A task, and the numbers of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
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

    def decay_to(self, now: float) -> Self:
        """Return what is left of it; a clock that was set back changes nothing."""
        return replace(self._scale(decay_factor(self.at, now)), at=now)

    def divide(self, count: int) -> Self:
        """Return the share of one of several experts in it."""
        return self._scale(1 / count)

    def add(self, other: Self) -> Self:
        """Return it with more evidence of the same time."""
        return self._combine(other, 1)

    def subtract(self, other: Self) -> Self:
        """Return it with less evidence of the same time; never less than none."""
        return self._combine(other, -1)

    def _combine(self, other: Self, sign: int) -> Self:
        return replace(
            self,
            good=max(0.0, self.good + sign * other.good),
            bad=max(0.0, self.bad + sign * other.bad),
            well_formed=max(0.0, self.well_formed + sign * other.well_formed),
            malformed=max(0.0, self.malformed + sign * other.malformed),
        )

    def _scale(self, factor: float) -> Self:
        return replace(
            self,
            good=self.good * factor,
            bad=self.bad * factor,
            well_formed=self.well_formed * factor,
            malformed=self.malformed * factor,
        )


def decay_factor(then: float, now: float) -> float:
    """Return the share of evidence that is left after a while."""
    return float(2.0 ** (-max(0.0, now - then) / (HALF_LIFE_DAYS * _DAY)))


class SuccessRates:
    """The rates of all experts with evidence; each rate is computed when it is asked for.

    Of thousands of experts few are candidates, so evidence is read fast and weighed late.
    """

    def __init__(self, kept: Mapping[str, Sequence[StoredEvidence]], *, now: float) -> None:
        """Take the stored evidence by content digest as text, weighed at one time."""
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
    """Read the numbers of one row: good, bad, well formed, malformed, time."""
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
"""That of an answer that had no room to end; the experts are not to blame for its form."""

RATING_WEIGHT = 1.0
"""What a user's judgement counts as evidence."""
PASSED_WEIGHT = 0.25
FAILED_WEIGHT = 0.5
"""Form counts less than a judgement: an answer may be well-formed and wrong."""


@dataclass(frozen=True, slots=True)
class UsedExpert:
    """An expert that took part in a run."""

    ref: str
    content_digest: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """Milliseconds of the steps of a run; `None` for one that was not reached."""

    route: float | None = None
    load: float | None = None
    ttft: float | None = None
    decode: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What a run read and how fast it was; sizes are bytes."""

    prefill_ms: float
    prefill_tokens: int
    """Tokens that were read, virtual ones included, those reused from the KV cache excluded."""
    kv_reused_tokens: int
    decode_steps: int
    threads: int
    ssd_bytes: int
    """The bytes read from files into memory."""
    ram_bytes: int
    """The bytes made from them for the device to compute with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run, named by its ``job_id`` or the beginning of it."""

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
    """None for a run that failed, or that took place before figures were kept."""
    blamed: bool = False
    """Whether it ended with an error that the experts are to blame for."""

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """How fast the prompt was read, where that is known."""
        if self.figures is None:
            return None
        return _rate_per_second(self.figures.prefill_tokens, self.figures.prefill_ms)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """How fast the answer was written, where that is known; a single token gives no rate."""
        if self.figures is None or self.times.decode is None:
            return None
        return _rate_per_second(self.figures.decode_steps, self.times.decode)

    @property
    def evidence(self) -> RunEvidence:
        """What the run says of its experts together; a user's judgement replaces all else."""
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
        """Whether the run went well, as far as is known."""
        found = self.evidence
        if not found:
            return None
        return "good" if found.good or found.well_formed else "bad"


def _rate_per_second(count: int, ms: float) -> float | None:
    return count / ms * 1e3 if count and ms > 0 else None


SIGNIFICANCE = 0.05
"""A gain counts where chance alone would give it less often than this."""


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
    """McNemar's: how likely such a difference is where there is none."""
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
