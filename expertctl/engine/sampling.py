"""Sample one token from logits, in a fixed order of steps.

The steps are: mask, repetition, presence and frequency penalty, temperature, top-k, softmax, top-p,
min-p, draw. Penalties count generated tokens only, the repetition penalty only the last
`REPETITION_WINDOW` of them; greedy decoding takes the best score after the penalties. Each step is
a separate function on float32 arrays. The draw inverts the cumulative distribution in order of
token ids, with numbers from Philox, whose bits are the same on every platform.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from expertctl.errors import IncompatibleError, UsageError
from expertctl.routing.plan import SamplingParams

Scores = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
TokenCounts = Mapping[int, int]
"""How often each token was generated."""

REPETITION_WINDOW = 64
"""Number of recent tokens that the repetition penalty covers: over a whole answer it would forbid
the commonest words, and lists and stories would drift into symbols."""
_ARRAYS = 12
"""Arrays of scores alive at once in the worst case (all scores alike), some of them in 64 bits."""
_MAX_SEED = 2**64 - 1
_MANTISSA_BITS = 23
"""Of a float32."""


class UniformGenerator:
    """Uniform numbers in [0, 1) from a seed; one owner per generation."""

    def __init__(self, seed: int) -> None:
        """Start the sequence of a seed.

        Raises:
            UsageError: for a seed that is not an unsigned 64-bit integer.
        """
        if not 0 <= seed <= _MAX_SEED:
            raise UsageError(f"seed {seed} is out of range", hint="it must be 0 to 2^64-1")
        self._bits = np.random.Philox(seed)

    def draw_uniform(self) -> float:
        """Return the next number, made from 53 bits."""
        return (int(self._bits.random_raw()) >> 11) * 2.0**-53


def sample_token(
    logits: Scores,
    counts: TokenCounts,
    params: SamplingParams,
    generator: UniformGenerator,
    *,
    recent: Collection[int] = (),
    allowed: Mask | None = None,
) -> int:
    """Return the next token; ``recent`` are the tokens that the repetition penalty covers.

    Raises:
        IncompatibleError: when the scores are not numbers or no token is allowed.
    """
    scores = apply_allowed_mask(_check_scores(logits), allowed)
    scores = apply_repetition_penalty(scores, recent, params.repetition_penalty)
    scores = apply_penalties(scores, counts, params)
    if params.is_greedy:
        return int(scores.argmax())  # the lowest id among equal scores
    return draw_token(compute_probabilities(scores, params), generator.draw_uniform())


def estimate_sample_bytes(vocabulary: int) -> int:
    """Estimate the maximum bytes that `sample_token` needs for a vocabulary."""
    return _ARRAYS * vocabulary * np.dtype(np.float32).itemsize


def compute_probabilities(scores: Scores, params: SamplingParams) -> Scores:
    """Return the distribution to draw from: temperature to min-p, summing to 1."""
    scores = apply_top_k(apply_temperature(scores, params.temperature), params.top_k)
    chances = apply_min_p(apply_top_p(softmax(scores), params.top_p), params.min_p)
    return _normalise(chances)


def apply_allowed_mask(scores: Scores, allowed: Mask | None) -> Scores:
    """Set the scores of tokens that are not allowed to minus infinity.

    Raises:
        IncompatibleError: when no token is left.
    """
    if allowed is not None:
        scores = np.where(allowed, scores, _get_lowest_score())
    if scores.max() == -np.inf:
        raise IncompatibleError("no token is allowed at this position")
    return scores


def apply_repetition_penalty(scores: Scores, recent: Collection[int], penalty: float) -> Scores:
    """Reduce the scores of recent tokens by a factor, however often each occurred."""
    if not recent or penalty == 1.0:
        return scores
    ids = np.unique(np.fromiter(recent, dtype=np.int64, count=len(recent)))
    old, factor = scores[ids], np.float32(penalty)
    scores = scores.copy()
    scores[ids] = np.where(old < 0, old * factor, old / factor)
    return scores


def apply_penalties(scores: Scores, counts: TokenCounts, params: SamplingParams) -> Scores:
    """Reduce the scores of generated tokens by the presence and frequency penalties."""
    if not counts or not (params.presence_penalty or params.frequency_penalty):
        return scores
    ids = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
    numbers = np.fromiter(counts.values(), dtype=np.float32, count=len(counts))
    less = np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * numbers
    scores = scores.copy()
    scores[ids] -= less
    return scores


def apply_temperature(scores: Scores, temperature: float) -> Scores:
    """Divide by the temperature; the best score becomes 0, so that nothing overflows."""
    with np.errstate(over="ignore"):
        scaled: Scores = (scores - scores.max()) / np.float32(max(temperature, 1e-30))
    return scaled


def apply_top_k(scores: Scores, top_k: int) -> Scores:
    """Remove scores below the k-th best one; ties stay."""
    if top_k <= 0 or top_k >= len(scores):
        return scores
    threshold = np.partition(scores, -top_k)[-top_k]
    return np.where(scores >= threshold, scores, _get_lowest_score())


def softmax(scores: Scores) -> Scores:
    """Return probabilities."""
    with np.errstate(under="ignore"):
        weights: Scores = np.exp(scores - scores.max())
    return _normalise(weights)


def apply_top_p(chances: Scores, top_p: float) -> Scores:
    """Keep the smallest set of likeliest tokens that reaches ``top_p``; ties by lowest id.

    Only tokens about as likely as the last one kept are sorted.
    """
    if top_p >= 1.0:
        return chances
    likely = _select_top_p_candidates(chances, top_p)
    about = _quantise_likelihoods(likely)
    sums = np.bincount(about, weights=likely)[::-1].cumsum()[::-1]  # of a step and those above it
    if sums[0] < top_p:
        return chances  # rounded probabilities may sum to a little less than 1
    step = int(np.searchsorted(-sums, -top_p, side="right")) - 1
    above = sums[step + 1] if step + 1 < len(sums) else 0.0
    near = np.sort(likely[about == step])[::-1]
    before = above + np.cumsum(near, dtype=np.float64) - near
    count = max(int(np.searchsorted(before, top_p, side="left")), 1)
    threshold = near[count - 1]
    keep = chances > threshold
    equal = np.flatnonzero(chances == threshold)
    keep[equal[: count - int((near > threshold).sum())]] = True
    return np.where(keep, chances, np.float32(0))


def _select_top_p_candidates(chances: Scores, top_p: float) -> Scores:
    """Return a subset of the probabilities that suffices to reach ``top_p``.

    The tokens left out sum to less than ``1 - top_p``.
    """
    likely = chances[chances >= (1.0 - top_p) / len(chances)]
    return likely if likely.sum(dtype=np.float64) >= top_p else chances


def _quantise_likelihoods(chances: Scores) -> Any:
    """Return each likelihood in eighths of a power of two: larger means likelier.

    The bits of non-negative floats sort like the floats.
    """
    return chances.view(np.uint32) >> np.uint32(_MANTISSA_BITS - 3)


def apply_min_p(chances: Scores, min_p: float) -> Scores:
    """Keep tokens at least ``min_p`` times as likely as the likeliest one."""
    if min_p <= 0.0:
        return chances
    return np.where(chances >= np.float32(min_p) * chances.max(), chances, np.float32(0))


def draw_token(chances: Scores, uniform: float) -> int:
    """Return the token at ``uniform`` of the cumulative distribution, in order of ids."""
    ids = np.flatnonzero(chances)
    heights = np.cumsum(chances[ids], dtype=np.float64)
    place = np.searchsorted(heights, uniform * heights[-1], side="right")
    return int(ids[min(int(place), len(ids) - 1)])


def _normalise(weights: Scores) -> Scores:
    total: Any = weights.sum(dtype=np.float64)
    return weights / np.float32(total)


def _check_scores(scores: Scores) -> Scores:
    best = scores.max()  # NaN wins every maximum
    if np.isnan(best) or best == np.inf:
        raise IncompatibleError(
            "the model's scores are not numbers",
            hint="the weights of the base or of an expert are damaged, or the dtype is too narrow",
        )
    return scores


def _get_lowest_score() -> np.float32:
    return np.float32(-np.inf)
