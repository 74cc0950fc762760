"""What an evaluation found: answers, scores with their intervals, and gains of one over another."""

from collections.abc import Iterable
from dataclasses import dataclass

from expertctl.engine.moe.stats import RoutedExpertStats
from expertctl.package.evaluation import (
    EvaluationData,
    EvaluationSample,
    Interval,
    mcnemar_p_value,
    paired_difference_interval,
    wilson_interval,
)
from expertctl.routing.plan import PlannedExpert


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """One answer; ``is_cut`` tells that it ended at the limit of tokens."""

    sample: EvaluationSample
    text: str
    is_right: bool
    is_cut: bool


@dataclass(frozen=True, slots=True)
class AccuracyScore:
    """How often one way of answering was right; without experts it is the base alone."""

    experts: tuple[PlannedExpert, ...]
    answers: tuple[ScoredAnswer, ...]
    """In the order of the data."""

    @property
    def name(self) -> str:
        """The chain as people write it, or ``base``."""
        return " + ".join(map(_weighted_ref, self.experts)) or "base"

    @property
    def right_count(self) -> int:
        """How many answers are right."""
        return sum(answer.is_right for answer in self.answers)

    @property
    def share(self) -> float:
        """The share of right answers."""
        return self.right_count / len(self.answers)

    @property
    def interval(self) -> Interval:
        """Where the share may really lie."""
        return wilson_interval(self.right_count, len(self.answers))

    @property
    def wrong_answers(self) -> list[ScoredAnswer]:
        """The wrong answers."""
        return [answer for answer in self.answers if not answer.is_right]

    @property
    def empty_count(self) -> int:
        """How many answers say nothing."""
        return sum(not answer.text.strip() for answer in self.answers)

    @property
    def truncated_count(self) -> int:
        """How many answers ended at the limit of tokens."""
        return sum(answer.is_cut for answer in self.answers)


@dataclass(frozen=True, slots=True)
class AccuracyGain:
    """What one score has over another on the same prompts."""

    score: AccuracyScore
    over: AccuracyScore

    @property
    def gained(self) -> int:
        """How many prompts only the first answers right."""
        return sum(a.is_right and not b.is_right for a, b in self._answer_pairs())

    @property
    def lost(self) -> int:
        """How many prompts only the other answers right."""
        return sum(b.is_right and not a.is_right for a, b in self._answer_pairs())

    @property
    def value(self) -> float:
        """The difference of the shares."""
        return (self.gained - self.lost) / len(self.score.answers)

    @property
    def interval(self) -> Interval:
        """Where the difference may really lie."""
        return paired_difference_interval(self.gained, self.lost, len(self.score.answers))

    @property
    def p_value(self) -> float:
        """How likely such a difference is where there is none."""
        return mcnemar_p_value(self.gained, self.lost)

    def _answer_pairs(self) -> Iterable[tuple[ScoredAnswer, ScoredAnswer]]:
        return zip(self.score.answers, self.over.answers, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """All scores on one file of samples; with a ``chain``, those of its later experts alone too."""

    data: EvaluationData
    base_name: str
    dtype: str
    """What the weights of the base were held in."""
    max_tokens: int
    base: AccuracyScore
    expert: AccuracyScore
    others: tuple[AccuracyScore, ...] = ()
    chain: AccuracyScore | None = None
    warnings: tuple[str, ...] = ()
    moe: RoutedExpertStats | None = None
    """What became of routed experts in all answers; None where the base has none."""

    @property
    def scores(self) -> tuple[AccuracyScore, ...]:
        """Every score, in the order in which they are told."""
        return (self.base, self.expert, *self.others, *((self.chain,) if self.chain else ()))

    @property
    def gains(self) -> tuple[AccuracyGain, ...]:
        """What the expert has over the base, and the chain over the best of all the others."""
        first = AccuracyGain(self.expert, self.base)
        if self.chain is None:
            return (first,)
        best = max((self.expert, *self.others, self.base), key=lambda score: score.right_count)
        return (first, AccuracyGain(self.chain, best))


def _weighted_ref(expert: PlannedExpert) -> str:
    return expert.ref if expert.weight == 1 else f"{expert.ref}:{expert.weight:g}"
