"""Predict which experts are chosen next, and which predictions are worth reading.

`TransitionModel` predicts the next token of a sequence. For each expert ``s`` and each expert ``e``
of a layer it keeps the chance that ``e`` is chosen one token after ``s``, updated after each token
that chose ``s``:

    chance[s, e] += 0.02 * ((1 if e was chosen else 0) - chance[s, e])

So a chance is the share of recent such tokens with ``e`` chosen next; one that was 34 of them ago
counts half. The prediction after a token is the mean of the rows of its experts. This is the
predictor of D. Joseph and D. Grunwald, "Prefetching using Markov predictors" (ISCA 1997), with
chances instead of the last few successors. All chances start at 0. If tokens do not depend on each
other, all it learns is how often each expert is chosen.

`PredictionFilter` judges predictions of the next layer. The router of a layer is applied early, to
what the layer before it reads, and names as many experts as a token uses, the likeliest first: each
has a *rank*. How often a prediction is right differs: with a small trained base from 98 % for the
first rank of a late layer to 22 % in the second layer. For each layer and rank it keeps the share
of absent experts that were in fact chosen, updated once per pass with its share ``right``:

    share += 0.02 * (right - share)

A rank that is right in less than half of all cases is not read: half of what it reads would evict
other experts for nothing. It is judged all the same, so it may be read again later. At first all
ranks are read.

Passes of more than 16 tokens, which are prompts, are neither filtered nor judged: that many tokens
choose nearly every expert.
"""

from collections.abc import Sequence, Set
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.layer_slots import Ids, Worths

LEARNING_RATE = 0.02
"""The weight of the next token in a chance."""
_CHANCE_DTYPE = np.dtype(np.float32)
MAX_SEQUENCES = 16
"""Up to this many tokens of a pass are of different sequences, or guesses; more are of one."""
MAX_LEARNT_PAIRS = 64
"""How many of the last tokens of a prompt are learnt from."""


def estimate_transition_bytes(*, layers: int, experts: int) -> int:
    """Return the bytes of a `TransitionModel`."""
    return layers * experts * experts * _CHANCE_DTYPE.itemsize


class TransitionModel:
    """Owner of the chances of all layers, float32; one pass at a time reports its choices."""

    def __init__(self, *, layers: int, experts: int) -> None:
        """Start with all chances at 0."""
        self._layers, self._experts = layers, experts
        self._chances = np.zeros((layers * experts, experts), _CHANCE_DTYPE)
        self._previous: NDArray[np.int64] | None = None
        """The choices of the last tokens, [tokens, layers, used] as rows of chances."""

    @property
    def nbytes(self) -> int:
        """Bytes of all chances."""
        return self._chances.nbytes

    def predict(self, layer: int, selected: Ids) -> Worths:
        """Return the chance of each expert to be chosen next, after ``selected`` [tokens, used].

        With several sequences the chances of all are summed.
        """
        last = selected if len(selected) <= MAX_SEQUENCES else selected[-1:]
        rows = self._chances.take(last.ravel() + layer * self._experts, axis=0)
        found: Worths = np.add.reduce(rows, axis=0, dtype=np.float64)
        found /= last.shape[1]
        return found

    def observe_pass(self, asked: Sequence[Ids], tokens: int) -> None:
        """Learn from a pass over ``tokens``; ``asked`` holds the choices [tokens, k] of each layer.

        The last layer may be computed for a prompt's last token only; then nothing is learnt for
        it.
        """
        base = np.arange(self._layers)[:, None] * self._experts
        last = np.array([ids[-1] for ids in asked]) + base  # [layers, used]
        layers = len(asked) - (len(asked[-1]) < tokens)
        shape = layers, tokens, last.shape[1]
        rows = np.array(asked[:layers], np.int64).reshape(shape).swapaxes(0, 1) + base[:layers]
        if tokens <= MAX_SEQUENCES and layers == len(asked):
            self._learn_sequences(self._previous, rows)
            self._previous = rows
            return
        for before, after in pairwise(rows[-MAX_LEARNT_PAIRS - 1 :]):
            self._learn_transition(before, after)
        self._previous = last[None]

    def _learn_sequences(self, before: NDArray[np.int64] | None, after: NDArray[np.int64]) -> None:
        """Learn from one token of each of several sequences, if the pass before had as many."""
        if before is not None and len(before) == len(after):
            for one, next_one in zip(before, after, strict=True):
                self._learn_transition(one, next_one)

    def _learn_transition(self, before: NDArray[np.int64], after: NDArray[np.int64]) -> None:
        rows, used = before.ravel(), before.shape[1]
        found = self._chances[rows] * _CHANCE_DTYPE.type(1 - LEARNING_RATE)
        asked = (after % self._experts).repeat(used, axis=0)  # [layers * used, used]
        found[np.arange(len(rows))[:, None], asked] += _CHANCE_DTYPE.type(LEARNING_RATE)
        self._chances[rows] = found


HIT_RATE_STEP = 0.02
"""The weight of the next pass in a share."""
MIN_HIT_RATE = 0.5
"""The share from which a rank is read."""
_INITIAL_HIT_RATE = 1.0


class PredictionFilter:
    """Owner of the shares of all layers; a layer is predicted before its experts are chosen."""

    def __init__(self) -> None:
        """Start by trusting all ranks."""
        self._hit_rates: dict[int, list[float]] = {}
        self._pending: tuple[int, Sequence[list[int]]] | None = None
        """The last layer that was predicted, and the experts that were absent there, by rank."""

    def hit_rates(self, layer: int) -> Sequence[float]:
        """Return the share of each rank of a layer; empty before its first prediction."""
        return tuple(self._hit_rates.get(layer, ()))

    def select(self, layer: int, likely: Ids, absent: NDArray[np.bool_]) -> list[int]:
        """Return which experts of a layer to read, the first ranks first, each once.

        ``likely`` is [tokens, used], and ``absent`` says which of them are not in memory.
        """
        if len(likely) > MAX_SEQUENCES:
            self._pending = None
            return list(dict.fromkeys(likely.T[absent.T].tolist()))
        pairs = zip(likely.T.tolist(), absent.T.tolist(), strict=True)
        ranks = [[e for e, is_absent in zip(*pair, strict=True) if is_absent] for pair in pairs]
        self._pending = layer, ranks
        shares = self._hit_rates.setdefault(layer, [_INITIAL_HIT_RATE] * len(ranks))
        trusted = (rank for rank, share in zip(ranks, shares, strict=True) if share >= MIN_HIT_RATE)
        return list(dict.fromkeys(expert for rank in trusted for expert in rank))

    def record_outcome(self, layer: int, asked: Set[int]) -> None:
        """Update the shares of the last prediction with the experts that were in fact chosen."""
        guess, self._pending = self._pending, None
        if guess is None or guess[0] != layer:
            return  # there was no prediction, or that pass failed
        shares = self._hit_rates[layer]
        for number, rank in enumerate(guess[1]):
            if rank:
                right = sum(expert in asked for expert in rank) / len(rank)
                shares[number] += HIT_RATE_STEP * (right - shares[number])
