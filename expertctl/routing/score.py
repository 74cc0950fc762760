"""The score of an expert for a prompt, its threshold, and the order of candidates.

The score is the head's calibrated evidence. Nothing lifts it: an expert whose answers were judged
bad loses some of it, and what else is known only decides between equals.

What another threshold would have given: risk, coverage and confidence of routing decisions.

A *best guess* is the expert that comes first for a prompt, whether or not it reaches the threshold.
At a threshold, prompts whose guess has at least that confidence are answered by it; *coverage* is
their share of all prompts, *risk* the share of wrong ones among them (El-Yaniv and Wiener 2010,
*J. Mach. Learn. Res.* 11:1605-1641).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

THRESHOLD = 0.5
"""An expert is used only from this score on; below it the base answers alone."""
DEFAULT_SUCCESS_RATE = 0.5
"""The success rate of an expert without judgements."""

_MIB = 1 << 20
_MIN_PROBABILITY = 1e-12


def discount_by_success(score: float, *, success: float) -> float:
    """Return a score reduced by bad answers: half of it when all were bad."""
    return score * min(1.0, 0.5 + success)


def compute_log_odds(score: float) -> float:
    """Return the logarithm of the odds that a score stands for, which is bounded."""
    return math.log(max(score, _MIN_PROBABILITY) / max(1 - score, _MIN_PROBABILITY))


def to_mebibytes(size: int) -> float:
    """Return bytes in MiB, the unit of what experts take in memory."""
    return size / _MIB


def format_score(figure: float) -> str:
    """Return a figure as a person reads it; there is no -0.00."""
    return f"{round(figure, 2) + 0.0:.2f}"


CandidateSortKey = tuple[float, bool, float, float, float, str]
"""What candidates are sorted by."""

_TIE_REASONS = ("its score", "a flag", "success", "priority", "size", "name")


def build_sort_key(
    *, score: float, flagged: bool, success: float, priority: float, vram_mb: float, name: str
) -> CandidateSortKey:
    """Sort key: the best score first, by its odds: near 1 scores differ by less than they mean.

    Equals are ordered by: not suspicious, judged better, the manifest's priority, smaller, name.
    """
    return (
        -round(compute_log_odds(score), 1),
        flagged,
        -round(success, 2),
        -priority,
        vram_mb,
        name,
    )


def explain_tie(first: CandidateSortKey, second: CandidateSortKey) -> str:
    """Say what put one of two equal scores first; empty when the scores are not equal."""
    differs = next(n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    return _TIE_REASONS[differs] if differs else ""


BIN_COUNT = 10
_MAX_POINTS = 100


@dataclass(frozen=True, slots=True)
class Prediction:
    """The first candidate of one prompt; a prompt without any has the confidence ``None``."""

    confidence: float | None
    is_correct: bool  # never for a prompt that no expert should answer
    in_scope: bool


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """What a threshold gives; a share of nothing is ``None``."""

    threshold: float | None  # None: no expert ever answers
    answered: int
    coverage: float
    risk: float | None
    accuracy: float  # of all prompts, the base alone being right where no expert is wanted
    in_scope: float | None
    out_of_scope: float | None


@dataclass(frozen=True, slots=True)
class ConfidenceBin:
    """The guesses whose confidence is from ``low`` up to ``high``."""

    low: float
    high: float
    n: int
    correct: int
    confidence: float  # their mean; 0 where there are none


def compute_risk_coverage(guesses: Sequence[Prediction]) -> list[OperatingPoint]:
    """Return a point for each threshold that makes a difference, the strictest first."""
    tally = _PredictionCounter(guesses)
    points = [tally.build_point(None)]
    able = (guess for guess in guesses if guess.confidence is not None)
    for confidence, group in groupby(
        sorted(able, key=_sort_confidence, reverse=True), key=_sort_confidence
    ):
        for guess in group:
            tally.add(guess)
        points.append(tally.build_point(confidence))
    return points


def thin_points(points: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """Return about a hundred of the points, evenly spread over coverage, both ends among them."""
    if len(points) <= _MAX_POINTS + 1:
        return list(points)
    kept: dict[int, OperatingPoint] = {}
    for point in points:
        kept[round(point.coverage * _MAX_POINTS)] = point
    kept[-1] = points[0]
    return sorted(set(kept.values()), key=lambda point: point.answered)


def find_best_point(points: Sequence[OperatingPoint]) -> OperatingPoint:
    """Return the point of the highest accuracy; of equal ones the strictest."""
    return max(points, key=lambda point: point.accuracy)


def compute_mean_risk(points: Sequence[OperatingPoint]) -> float | None:
    """Return the area under the curve: the mean of the risk over all coverages reached."""
    area, before = 0.0, 0
    for point in points:
        area += (point.risk or 0.0) * (point.answered - before)
        before = point.answered
    return area / before if before else None


def find_point_at(points: Sequence[OperatingPoint], coverage: float) -> OperatingPoint | None:
    """Return the strictest point that answers at least that share; ``None`` if none does."""
    return next((point for point in points if point.coverage >= coverage - 1e-9), None)


def bin_by_confidence(guesses: Sequence[Prediction]) -> list[ConfidenceBin]:
    """Return how often guesses of each tenth of confidence are right."""
    made = []
    for i in range(BIN_COUNT):
        within = [(g.confidence, g.is_correct) for g in guesses if _bin_index(g) == i]
        total = sum(confidence or 0.0 for confidence, _ in within)
        right = sum(right for _, right in within)
        mean = total / len(within) if within else 0.0
        made.append(ConfidenceBin(i / BIN_COUNT, (i + 1) / BIN_COUNT, len(within), right, mean))
    return made


def compute_calibration_error(found: Sequence[ConfidenceBin]) -> float | None:
    """Return the expected calibration error: how far confidence is from the share of right ones."""
    n = sum(each.n for each in found)
    far = sum(abs(each.confidence * each.n - each.correct) for each in found)
    return far / n if n else None


class _PredictionCounter:
    """The figures if the guesses added so far were answered and no others."""

    def __init__(self, guesses: Sequence[Prediction]) -> None:
        self._n, self._n_in = len(guesses), sum(guess.in_scope for guess in guesses)
        self._answered = self._right = self._strays = 0

    def add(self, guess: Prediction) -> None:
        """Answer one more prompt."""
        self._answered += 1
        self._right += guess.is_correct
        self._strays += not guess.in_scope

    def build_point(self, threshold: float | None) -> OperatingPoint:
        """Return the figures."""
        n_out = self._n - self._n_in
        return OperatingPoint(
            threshold=threshold,
            answered=self._answered,
            coverage=self._answered / self._n,
            risk=1 - self._right / self._answered if self._answered else None,
            accuracy=(self._right + n_out - self._strays) / self._n,
            in_scope=self._right / self._n_in if self._n_in else None,
            out_of_scope=1 - self._strays / n_out if n_out else None,
        )


def _sort_confidence(guess: Prediction) -> float:
    assert guess.confidence is not None
    return guess.confidence


def _bin_index(guess: Prediction) -> int:
    """Return the tenth of a guess, -1 for none."""
    if guess.confidence is None:
        return -1
    return min(BIN_COUNT - 1, max(0, int(guess.confidence * BIN_COUNT)))
