"""Calibration: from the head's evidence to a score, of which 0.5 or more is enough.

The examples of installed experts are asked again as if they were prompts. With the row of the
example itself hidden they say what evidence a prompt has that belongs to an expert; with its whole
expert left out, what evidence one has that belongs to none. No other text is needed.

The threshold turns away three in a hundred of the prompts that are rightly answered (split conformal
prediction: Vovk, Gammerman and Shafer, 2005). The score is the posterior probability of two normal
distributions with one variance, at the odds that put 0.5 at that threshold.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from expertctl.routing.found import Found
from expertctl.routing.head import judge
from expertctl.routing.vector_table import Rows, Vectors, VectorTable

THRESHOLD = 0.5
"""An expert is used only from this score on."""
TURNED_AWAY = 0.03
MOST_ASKED = 400
"""How many examples are asked again at most."""
_SEED = 7
_PRIOR = 20
_FLAT, _STEEP = 4.0, 40.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """The evidence of which half is enough, and how fast the score rises around it."""

    threshold: float
    slope: float
    experts: int = 0  # how many there were

    def score(self, evidence: Vectors) -> Vectors:
        """Return scores between 0 and 1."""
        exponents = np.clip(self.slope * (evidence - self.threshold), -30, 30)
        scores: Vectors = (1 / (1 + np.exp(-exponents))).astype(np.float32)
        return scores


@dataclass(frozen=True, slots=True)
class Evidence:
    """What examples had when they were asked again."""

    inside: tuple[float, ...]  # rightly answered
    outside: tuple[float, ...]  # without their expert
    asked: int

    @property
    def right(self) -> float:
        """The share that was answered rightly."""
        return len(self.inside) / self.asked if self.asked else math.nan


def calibrated(evidence: Evidence, prior: Calibration, *, experts: int) -> Calibration:
    """Return what examples say; with few of them, more of what is assumed of any."""
    inside, outside = np.array(evidence.inside), np.array(evidence.outside)
    trust = len(inside) / (len(inside) + _PRIOR)
    if len(inside) == 0:
        return Calibration(prior.threshold, prior.slope, experts)
    threshold = float(np.quantile(inside, TURNED_AWAY))
    slope = _slope(inside, outside) if min(len(inside), len(outside)) > 1 else prior.slope
    return Calibration(
        threshold=trust * threshold + (1 - trust) * prior.threshold,
        slope=trust * slope + (1 - trust) * prior.slope,
        experts=experts,
    )


def _slope(inside: Vectors, outside: Vectors) -> float:
    """Return by how much the log-odds rise with the evidence."""
    squares = ((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum()
    variance = squares / (len(inside) + len(outside) - 2)
    apart = float(inside.mean() - outside.mean())
    return min(max(apart / max(float(variance), 1e-6), _FLAT), _STEEP)
