"""Which experts the next token is likely to ask for, learnt from what followed earlier tokens.

For each expert ``s`` and each expert ``e`` of a layer the chance is kept that ``e`` is asked for
one token after ``s``. It is updated after each token that asked for ``s``:

    chance[s, e] += 0.02 * ((1 if e was asked for else 0) - chance[s, e])

So a chance is the share of recent such tokens with ``e`` asked for next; one that was 34 of them
ago counts half. The prediction after a token is the mean of the rows of its experts. That is the
predictor of D. Joseph and D. Grunwald, "Prefetching using Markov predictors" (ISCA 1997), with
chances instead of the last few followers. All chances begin at 0. Where tokens do not depend on
each other, all that is learnt is how often each expert is asked for.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.layer_slots import Ids, Worths

RATE = 0.02
"""The weight of the next token in a chance."""
_CHANCE = np.dtype(np.float32)
MOST_TEXTS = 16
"""Up to so many tokens of a pass each have their own text, or are guesses; more are of one text."""
MOST_PAIRS = 64
"""How many of the last tokens of a prompt are learnt from."""


def followers_bytes(*, layers: int, experts: int) -> int:
    """Return the bytes of `Followers`."""
    return layers * experts * experts * _CHANCE.itemsize


class Followers:
    """The one owner of the chances of all layers; one pass at a time reports what it asked for."""

    def __init__(self, *, layers: int, experts: int) -> None:
        """Begin with all chances at 0."""
        self._layers, self._experts = layers, experts
        self._chances = np.zeros((layers * experts, experts), _CHANCE)
        self._before: NDArray[np.int64] | None = None
        """What the last tokens asked for, [tokens, layers, used] in rows of chances."""

    @property
    def nbytes(self) -> int:
        """Bytes of all chances."""
        return self._chances.nbytes

    def chances(self, layer: int, selected: Ids) -> Worths:
        """Return how likely each expert is asked for next, after ``selected`` [tokens, used].

        With several texts the chances of all are added up.
        """
        last = selected if len(selected) <= MOST_TEXTS else selected[-1:]
        rows = self._chances.take(last.ravel() + layer * self._experts, axis=0)
        found: Worths = np.add.reduce(rows, axis=0, dtype=np.float64)
        found /= last.shape[1]
        return found

    def passed(self, asked: Sequence[Ids], tokens: int) -> None:
        """Learn from a pass over so many tokens; ``asked`` is [tokens, k] of each layer.

        The last layer may be asked for a prompt's last token alone; then nothing is learnt for it.
        """
        base = np.arange(self._layers)[:, None] * self._experts
        last = np.array([ids[-1] for ids in asked]) + base  # [layers, used]
        layers = len(asked) - (len(asked[-1]) < tokens)
        shape = layers, tokens, last.shape[1]
        rows = np.array(asked[:layers], np.int64).reshape(shape).swapaxes(0, 1) + base[:layers]
        if tokens <= MOST_TEXTS and layers == len(asked):
            self._follow(self._before, rows)
            self._before = rows
            return
        for before, after in pairwise(rows[-MOST_PAIRS - 1 :]):
            self._learn(before, after)
        self._before = last[None]

    def _follow(self, before: NDArray[np.int64] | None, after: NDArray[np.int64]) -> None:
        """Learn what followed each token, where each is of its own text."""
        if before is not None and len(before) == len(after):
            for one, next_one in zip(before, after, strict=True):
                self._learn(one, next_one)

    def _learn(self, before: NDArray[np.int64], after: NDArray[np.int64]) -> None:
        rows, used = before.ravel(), before.shape[1]
        found = self._chances[rows] * _CHANCE.type(1 - RATE)
        asked = (after % self._experts).repeat(used, axis=0)  # [layers * used, used]
        found[np.arange(len(rows))[:, None], asked] += _CHANCE.type(RATE)
        self._chances[rows] = found
