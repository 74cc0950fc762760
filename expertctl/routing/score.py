"""Scores and their order, and the risk-coverage figures of an evaluation.

The score of an expert for a prompt is the reranker's calibrated evidence. Nothing raises it: bad
ratings lower it, and everything else that is known only breaks ties.

A `Prediction` is the expert that ranks first for a prompt, whether or not it reaches the threshold.
At a threshold, prompts whose prediction has at least that confidence are answered by it; *coverage*
is their share of all prompts, *risk* the share of wrong ones among them (El-Yaniv and Wiener 2010,
*J. Mach. Learn. Res.* 11:1605-1641).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

THRESHOLD = 0.5
"""The least score of an expert that is used; if none reaches it, the base answers alone."""
DEFAULT_SUCCESS_RATE = 0.5
"""The success rate of an expert without ratings."""

_MIB = 1 << 20
_MIN_PROBABILITY = 1e-12


def discount_by_success(score: float, *, success: float) -> float:
    """Return a score reduced by bad ratings: by half when all were bad."""
    return score * min(1.0, 0.5 + success)


def compute_log_odds(score: float) -> float:
    """Return the log-odds of a score, clamped."""
    return math.log(max(score, _MIN_PROBABILITY) / max(1 - score, _MIN_PROBABILITY))


def to_mebibytes(size: int) -> float:
    """Convert bytes to MiB."""
    return size / _MIB


def format_score(figure: float) -> str:
    """Format a figure with two decimals; never -0.00."""
    return f"{round(figure, 2) + 0.0:.2f}"


CandidateSortKey = tuple[float, bool, float, float, float, str]
"""The sort key of candidates."""

_TIE_REASONS = ("its score", "a flag", "success", "priority", "size", "name")


def build_sort_key(
    *, score: float, flagged: bool, success: float, priority: float, vram_mb: float, name: str
) -> CandidateSortKey:
    """Build a sort key, best first: by the log-odds of the score, since near 1 scores saturate.

    Ties are broken by: not flagged, better rated, the manifest's priority, smaller, name.
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
    """Return what decided between two equal scores; empty when the scores differ."""
    differs = next(n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    return _TIE_REASONS[differs] if differs else ""


BIN_COUNT = 10
_MAX_POINTS = 100


@dataclass(frozen=True, slots=True)
class Prediction:
    """The top candidate for one prompt; ``confidence`` is None when there is no candidate."""

    confidence: float | None
    is_correct: bool  # False for a prompt that no expert should answer
    in_scope: bool


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The figures at one threshold; a share of nothing is ``None``."""

    threshold: float | None  # None: no expert ever answers
    answered: int
    coverage: float
    risk: float | None
    accuracy: float  # of all prompts; the base alone is right where no expert is expected
    in_scope: float | None
    out_of_scope: float | None


@dataclass(frozen=True, slots=True)
class ConfidenceBin:
    """The predictions with ``low`` <= confidence < ``high``."""

    low: float
    high: float
    n: int
    correct: int
    confidence: float  # mean; 0 for an empty bin


def compute_risk_coverage(predictions: Sequence[Prediction]) -> list[OperatingPoint]:
    """Return one point for each distinct threshold, the strictest first."""
    counter = _PredictionCounter(predictions)
    points = [counter.build_point(None)]
    able = (prediction for prediction in predictions if prediction.confidence is not None)
    for confidence, group in groupby(
        sorted(able, key=_sort_confidence, reverse=True), key=_sort_confidence
    ):
        for prediction in group:
            counter.add(prediction)
        points.append(counter.build_point(confidence))
    return points


def thin_points(points: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """Return at most about 100 points, evenly spaced over coverage, including both ends."""
    if len(points) <= _MAX_POINTS + 1:
        return list(points)
    kept: dict[int, OperatingPoint] = {}
    for point in points:
        kept[round(point.coverage * _MAX_POINTS)] = point
    kept[-1] = points[0]
    return sorted(set(kept.values()), key=lambda point: point.answered)


def find_best_point(points: Sequence[OperatingPoint]) -> OperatingPoint:
    """Return the point with the highest accuracy, the strictest of equals."""
    return max(points, key=lambda point: point.accuracy)


def compute_mean_risk(points: Sequence[OperatingPoint]) -> float | None:
    """Return the area under the risk-coverage curve: the mean risk over all coverages reached."""
    area, before = 0.0, 0
    for point in points:
        area += (point.risk or 0.0) * (point.answered - before)
        before = point.answered
    return area / before if before else None


def find_point_at(points: Sequence[OperatingPoint], coverage: float) -> OperatingPoint | None:
    """Return the strictest point with at least this coverage; ``None`` if there is none."""
    return next((point for point in points if point.coverage >= coverage - 1e-9), None)


def bin_by_confidence(guesses: Sequence[Prediction]) -> list[ConfidenceBin]:
    """Return the accuracy of the predictions in each tenth of confidence."""
    bins = []
    for i in range(BIN_COUNT):
        within = [(g.confidence, g.is_correct) for g in guesses if _bin_index(g) == i]
        total = sum(confidence or 0.0 for confidence, _ in within)
        right = sum(right for _, right in within)
        mean = total / len(within) if within else 0.0
        bins.append(ConfidenceBin(i / BIN_COUNT, (i + 1) / BIN_COUNT, len(within), right, mean))
    return bins


def compute_calibration_error(found: Sequence[ConfidenceBin]) -> float | None:
    """Return the expected calibration error: the mean gap between confidence and accuracy."""
    n = sum(each.n for each in found)
    far = sum(abs(each.confidence * each.n - each.correct) for each in found)
    return far / n if n else None


class _PredictionCounter:
    """The figures if exactly the predictions added so far were answered."""

    def __init__(self, guesses: Sequence[Prediction]) -> None:
        self._n, self._n_in = len(guesses), sum(guess.in_scope for guess in guesses)
        self._answered = self._right = self._strays = 0

    def add(self, guess: Prediction) -> None:
        """Count one more answered prompt."""
        self._answered += 1
        self._right += guess.is_correct
        self._strays += not guess.in_scope

    def build_point(self, threshold: float | None) -> OperatingPoint:
        """Return the figures at this point."""
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
    if guess.confidence is None:
        return -1
    return min(BIN_COUNT - 1, max(0, int(guess.confidence * BIN_COUNT)))
