"""Results of an evaluation: answers, scores with confidence intervals, and gains between scores."""

from collections.abc import Iterable
from dataclasses import dataclass

from expertctl.engine.moe.counters import RoutedExpertStats
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
    """One answer; ``is_cut`` is True where it ended at the token limit."""

    sample: EvaluationSample
    text: str
    is_right: bool
    is_cut: bool


@dataclass(frozen=True, slots=True)
class AccuracyScore:
    """Accuracy of one set of experts; without experts, of the base alone."""

    experts: tuple[PlannedExpert, ...]
    answers: tuple[ScoredAnswer, ...]
    """In the order of the data."""

    @property
    def name(self) -> str:
        """The chain as users write it, or ``base``."""
        return " + ".join(map(_weighted_ref, self.experts)) or "base"

    @property
    def right_count(self) -> int:
        """Number of right answers."""
        return sum(answer.is_right for answer in self.answers)

    @property
    def share(self) -> float:
        """Share of right answers."""
        return self.right_count / len(self.answers)

    @property
    def interval(self) -> Interval:
        """Confidence interval of the share."""
        return wilson_interval(self.right_count, len(self.answers))

    @property
    def wrong_answers(self) -> list[ScoredAnswer]:
        """The wrong answers."""
        return [answer for answer in self.answers if not answer.is_right]

    @property
    def empty_count(self) -> int:
        """Number of blank answers."""
        return sum(not answer.text.strip() for answer in self.answers)

    @property
    def truncated_count(self) -> int:
        """Number of answers that ended at the token limit."""
        return sum(answer.is_cut for answer in self.answers)


@dataclass(frozen=True, slots=True)
class AccuracyGain:
    """Difference between two scores on the same prompts."""

    score: AccuracyScore
    over: AccuracyScore

    @property
    def gained(self) -> int:
        """Number of prompts that only ``score`` answers right."""
        return sum(a.is_right and not b.is_right for a, b in self._answer_pairs())

    @property
    def lost(self) -> int:
        """Number of prompts that only ``over`` answers right."""
        return sum(b.is_right and not a.is_right for a, b in self._answer_pairs())

    @property
    def value(self) -> float:
        """The difference of the shares."""
        return (self.gained - self.lost) / len(self.score.answers)

    @property
    def interval(self) -> Interval:
        """Confidence interval of the difference."""
        return paired_difference_interval(self.gained, self.lost, len(self.score.answers))

    @property
    def p_value(self) -> float:
        """Probability of such a difference where there is none (McNemar's test)."""
        return mcnemar_p_value(self.gained, self.lost)

    def _answer_pairs(self) -> Iterable[tuple[ScoredAnswer, ScoredAnswer]]:
        return zip(self.score.answers, self.over.answers, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """All scores on one file of samples; with a ``chain``, also of its later experts alone."""

    data: EvaluationData
    base_name: str
    dtype: str
    """Data type of the base weights."""
    max_tokens: int
    base: AccuracyScore
    expert: AccuracyScore
    others: tuple[AccuracyScore, ...] = ()
    chain: AccuracyScore | None = None
    warnings: tuple[str, ...] = ()
    moe: RoutedExpertStats | None = None
    """Routed-expert statistics of all answers; None where the base has no such experts."""

    @property
    def scores(self) -> tuple[AccuracyScore, ...]:
        """All scores, in the order in which they are reported."""
        return (self.base, self.expert, *self.others, *((self.chain,) if self.chain else ()))

    @property
    def gains(self) -> tuple[AccuracyGain, ...]:
        """Gain of the expert over the base, and of the chain over the best of all others."""
        first = AccuracyGain(self.expert, self.base)
        if self.chain is None:
            return (first,)
        best = max((self.expert, *self.others, self.base), key=lambda score: score.right_count)
        return (first, AccuracyGain(self.chain, best))


def _weighted_ref(expert: PlannedExpert) -> str:
    return expert.ref if expert.weight == 1 else f"{expert.ref}:{expert.weight:g}"
