"""What an evaluation found: answers, scores with their intervals, and gains of one over another."""

from collections.abc import Iterable
from dataclasses import dataclass

from expertctl.engine.moe.report import RoutedReport
from expertctl.package.evaluation_data import EvaluationData, Sample
from expertctl.package.proportion import Interval, gain_interval, mcnemar, share_interval
from expertctl.routing.plan import PlannedExpert


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; ``is_cut`` tells that it ended at the limit of tokens."""

    sample: Sample
    text: str
    is_right: bool
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Score:
    """How often one way of answering was right; without experts it is the base alone."""

    experts: tuple[PlannedExpert, ...]
    answers: tuple[Answer, ...]
    """In the order of the data."""

    @property
    def name(self) -> str:
        """The chain as people write it, or ``base``."""
        return " + ".join(map(_weighted, self.experts)) or "base"

    @property
    def right(self) -> int:
        """How many answers are right."""
        return sum(answer.is_right for answer in self.answers)

    @property
    def share(self) -> float:
        """The share of right answers."""
        return self.right / len(self.answers)

    @property
    def interval(self) -> Interval:
        """Where the share may really lie."""
        return share_interval(self.right, len(self.answers))

    @property
    def wrong(self) -> list[Answer]:
        """The wrong answers."""
        return [answer for answer in self.answers if not answer.is_right]

    @property
    def empty(self) -> int:
        """How many answers say nothing."""
        return sum(not answer.text.strip() for answer in self.answers)

    @property
    def cut(self) -> int:
        """How many answers ended at the limit of tokens."""
        return sum(answer.is_cut for answer in self.answers)


@dataclass(frozen=True, slots=True)
class Gain:
    """What one score has over another on the same prompts."""

    score: Score
    over: Score

    @property
    def gained(self) -> int:
        """How many prompts only the first answers right."""
        return sum(a.is_right and not b.is_right for a, b in self._pairs())

    @property
    def lost(self) -> int:
        """How many prompts only the other answers right."""
        return sum(b.is_right and not a.is_right for a, b in self._pairs())

    @property
    def value(self) -> float:
        """The difference of the shares."""
        return (self.gained - self.lost) / len(self.score.answers)

    @property
    def interval(self) -> Interval:
        """Where the difference may really lie."""
        return gain_interval(self.gained, self.lost, len(self.score.answers))

    @property
    def p(self) -> float:
        """How likely such a difference is where there is none."""
        return mcnemar(self.gained, self.lost)

    def _pairs(self) -> Iterable[tuple[Answer, Answer]]:
        return zip(self.score.answers, self.over.answers, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """All scores on one file of samples; with a ``chain``, those of its later experts alone too."""

    data: EvaluationData
    base_name: str
    dtype: str
    """What the weights of the base were held in."""
    max_tokens: int
    base: Score
    expert: Score
    others: tuple[Score, ...] = ()
    chain: Score | None = None
    warnings: tuple[str, ...] = ()
    moe: RoutedReport | None = None
    """What became of routed experts in all answers; None where the base has none."""

    @property
    def scores(self) -> tuple[Score, ...]:
        """Every score, in the order in which they are told."""
        return (self.base, self.expert, *self.others, *((self.chain,) if self.chain else ()))

    @property
    def gains(self) -> tuple[Gain, ...]:
        """What the expert has over the base, and the chain over the best of all the others."""
        first = Gain(self.expert, self.base)
        if self.chain is None:
            return (first,)
        best = max((self.expert, *self.others, self.base), key=lambda score: score.right)
        return (first, Gain(self.chain, best))


def _weighted(expert: PlannedExpert) -> str:
    return expert.ref if expert.weight == 1 else f"{expert.ref}:{expert.weight:g}"
