"""Leaving out experts that are not at hand, without changing the total weight of a token.

Mass is what the router gave: the sum of the weights of a token. The experts that are there take
over the mass of those that are missed, in proportion; where all are missed nothing is left. An
expert that was not asked for never stands in. How much of its mass a token may lose to skipping is
capped: tokens above the cap are to be computed in full.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float32]
Flags = NDArray[np.bool_]


def effective_weights(weights: Weights, hits: NDArray[np.generic]) -> Weights:
    """Return weights [tokens, used] with the mass of what is missed given to what is hit.

    ``effective = w * h * (sum(w) / sum(w * h))``, and zeros where all is missed. Where all is hit
    the weights are unchanged, to the bit.
    """
    given, kept = _given_and_kept(weights, hits)
    mass, left = given.sum(-1, keepdims=True), kept.sum(-1, keepdims=True)
    return (kept * _divide(mass, left)).astype(np.float32)


def skipped_share(weights: Weights, hits: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return how much of each token's mass is missed: 0 to 1, [tokens]."""
    given, kept = _given_and_kept(weights, hits)
    return _divide((given - kept).sum(-1), given.sum(-1))


def over_cap(weights: Weights, hits: NDArray[np.generic], cap: float) -> Flags:
    """Tell which tokens would lose more than the cap, and must be computed in full.

    So must tokens whose weights are not numbers: skipping would hide that.
    """
    return ~(skipped_share(weights, hits) <= cap)


def capped_weights(weights: Weights, hits: NDArray[np.generic], cap: float) -> Weights:
    """Return the weights to compute with: tokens above the cap keep theirs, hit or missed."""
    full = over_cap(weights, hits, cap)
    return np.where(full[:, None], weights, effective_weights(weights, hits))


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipTotals:
    """What was missed, and what of it was left out, over layers and tokens; they add up."""

    requests: int = 0
    """Experts that were asked for, each once for a window."""
    misses: int = 0
    """Those of them that were not at hand."""
    mass: float = 0.0
    """The weights that routers gave."""
    skipped: float = 0.0
    """What of them was left out."""
    most: float = 0.0
    """The largest share that a token lost in a layer."""

    @property
    def fallback_rate(self) -> float:
        """How many of the experts that were asked for were missed, 0 to 1."""
        return self.misses / self.requests if self.requests else 0.0

    @property
    def skipped_mass(self) -> float:
        """How much of all mass was left out, 0 to 1."""
        return self.skipped / self.mass if self.mass else 0.0

    def __add__(self, other: "SkipTotals") -> "SkipTotals":
        """Return the totals of both."""
        return SkipTotals(
            requests=self.requests + other.requests,
            misses=self.misses + other.misses,
            mass=self.mass + other.mass,
            skipped=self.skipped + other.skipped,
            most=max(self.most, other.most),
        )


def skip_totals(
    requests: NDArray[np.integer],
    hits: NDArray[np.generic],
    *,
    mass: NDArray[np.floating],
    skipped: NDArray[np.floating],
) -> SkipTotals:
    """Return the totals of one window.

    ``requests`` [layers, experts] says how often each expert was chosen and ``hits`` which of them
    were at hand then; ``mass`` and ``skipped`` [layers, tokens] are the weights that routers gave
    and those that were left out in the end, for what is missed may be computed all the same.
    """
    given, lost = mass.astype(np.float64), skipped.astype(np.float64)
    return SkipTotals(
        requests=int(np.count_nonzero(requests)),
        misses=int(np.count_nonzero((requests > 0) & (hits == 0))),
        mass=float(given.sum()),
        skipped=float(lost.sum()),
        most=float(_divide(lost, given).max(initial=0.0)),
    )


def _given_and_kept(
    weights: Weights, hits: NDArray[np.generic]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return all weights and those that are hit; in float64, as one may be tiny beside another."""
    given = weights.astype(np.float64)
    return given, given * hits.astype(np.float64)


def _divide(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the quotients, 0 where there is nothing to divide by."""
    return np.divide(part, whole, out=np.zeros_like(whole), where=whole != 0)
