"""What another threshold would have given: risk, coverage and confidence of routing decisions.

A *best guess* is the expert that comes first for a prompt, whether or not it reaches the threshold.
At a threshold, prompts whose guess has at least that confidence are answered by it; *coverage* is
their share of all prompts, *risk* the share of wrong ones among them (El-Yaniv and Wiener 2010,
*J. Mach. Learn. Res.* 11:1605-1641).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

BINS = 10
_POINTS = 100


@dataclass(frozen=True, slots=True)
class Guess:
    """The first candidate of one prompt; a prompt without any has the confidence ``None``."""

    confidence: float | None
    right: bool  # never for a prompt that no expert should answer
    in_scope: bool


@dataclass(frozen=True, slots=True)
class Point:
    """What a threshold gives; a share of nothing is ``None``."""

    threshold: float | None  # None: no expert ever answers
    answered: int
    coverage: float
    risk: float | None
    accuracy: float  # of all prompts, the base alone being right where no expert is wanted
    in_scope: float | None
    out_of_scope: float | None


@dataclass(frozen=True, slots=True)
class Bin:
    """The guesses whose confidence is from ``low`` up to ``high``."""

    low: float
    high: float
    n: int
    right: int
    confidence: float  # their mean; 0 where there are none


def curve(guesses: Sequence[Guess]) -> list[Point]:
    """Return a point for each threshold that makes a difference, the strictest first."""
    tally = _Tally(guesses)
    points = [tally.point(None)]
    able = (guess for guess in guesses if guess.confidence is not None)
    for confidence, group in groupby(sorted(able, key=_confidence, reverse=True), key=_confidence):
        for guess in group:
            tally.add(guess)
        points.append(tally.point(confidence))
    return points


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return about a hundred of the points, evenly spread over coverage, both ends among them."""
    if len(points) <= _POINTS + 1:
        return list(points)
    kept: dict[int, Point] = {}
    for point in points:
        kept[round(point.coverage * _POINTS)] = point
    kept[-1] = points[0]
    return sorted(set(kept.values()), key=lambda point: point.answered)


def best(points: Sequence[Point]) -> Point:
    """Return the point of the highest accuracy; of equal ones the strictest."""
    return max(points, key=lambda point: point.accuracy)


def mean_risk(points: Sequence[Point]) -> float | None:
    """Return the area under the curve: the mean of the risk over all coverages reached."""
    area, before = 0.0, 0
    for point in points:
        area += (point.risk or 0.0) * (point.answered - before)
        before = point.answered
    return area / before if before else None


def at_coverage(points: Sequence[Point], coverage: float) -> Point | None:
    """Return the strictest point that answers at least that share; ``None`` if none does."""
    return next((point for point in points if point.coverage >= coverage - 1e-9), None)


def bins(guesses: Sequence[Guess]) -> list[Bin]:
    """Return how often guesses of each tenth of confidence are right."""
    made = []
    for i in range(BINS):
        within = [(g.confidence, g.right) for g in guesses if _bin(g) == i]
        total = sum(confidence or 0.0 for confidence, _ in within)
        right = sum(right for _, right in within)
        mean = total / len(within) if within else 0.0
        made.append(Bin(i / BINS, (i + 1) / BINS, len(within), right, mean))
    return made


def calibration_error(found: Sequence[Bin]) -> float | None:
    """Return the expected calibration error: how far confidence is from the share of right ones."""
    n = sum(each.n for each in found)
    far = sum(abs(each.confidence * each.n - each.right) for each in found)
    return far / n if n else None


class _Tally:
    """The figures if the guesses added so far were answered and no others."""

    def __init__(self, guesses: Sequence[Guess]) -> None:
        self._n, self._n_in = len(guesses), sum(guess.in_scope for guess in guesses)
        self._answered = self._right = self._strays = 0

    def add(self, guess: Guess) -> None:
        """Answer one more prompt."""
        self._answered += 1
        self._right += guess.right
        self._strays += not guess.in_scope

    def point(self, threshold: float | None) -> Point:
        """Return the figures."""
        n_out = self._n - self._n_in
        return Point(
            threshold=threshold,
            answered=self._answered,
            coverage=self._answered / self._n,
            risk=1 - self._right / self._answered if self._answered else None,
            accuracy=(self._right + n_out - self._strays) / self._n,
            in_scope=self._right / self._n_in if self._n_in else None,
            out_of_scope=1 - self._strays / n_out if n_out else None,
        )


def _confidence(guess: Guess) -> float:
    assert guess.confidence is not None
    return guess.confidence


def _bin(guess: Guess) -> int:
    """Return the tenth of a guess, -1 for none."""
    if guess.confidence is None:
        return -1
    return min(BINS - 1, max(0, int(guess.confidence * BINS)))
