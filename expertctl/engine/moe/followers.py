"""Whom the next token is likely to ask for, learnt from whom those before it were followed by.

For each expert of a layer it is kept who was asked for there one token later:

    chance[s, e] += 0.02 * ((1 if e was asked for else 0) - chance[s, e])

whenever a token asked for ``s`` and ``e`` is any expert of the layer. So a chance is the share of
such tokens of late: what was so 34 of them before counts half. What a token's experts say of the
next is the mean of their rows. That is the predictor of D. Joseph and
D. Grunwald, "Prefetching using Markov predictors" (ISCA 1997), with chances instead of the last few
followers. At first nobody is likely. Where tokens do not depend on each other, all that is learnt
is how often each is asked for.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.layer_slots import Ids, Worths

RATE = 0.02
"""How much of a chance the next token decides."""
_CHANCE = np.dtype(np.float32)
MOST_TEXTS = 16
"""A pass of no more tokens is of as many texts, or guesses; of more it is of one text."""
MOST_PAIRS = 64
"""Of a prompt so many of its last tokens are learnt from."""


def followers_bytes(*, layers: int, experts: int) -> int:
    """Return the bytes of `Followers`."""
    return layers * experts * experts * _CHANCE.itemsize


class Followers:
    """The one owner of the chances of all layers; a pass at a time tells it what was asked for."""

    def __init__(self, *, layers: int, experts: int) -> None:
        """Begin with nobody who is likely."""
        self._layers, self._experts = layers, experts
        self._chances = np.zeros((layers * experts, experts), _CHANCE)
        self._before: NDArray[np.int64] | None = None
        """What the last tokens asked for, [tokens, layers, used] in rows of chances."""

    @property
    def nbytes(self) -> int:
        """Bytes of all chances."""
        return self._chances.nbytes

    def chances(self, layer: int, selected: Ids) -> Worths:
        """Return how likely the next tokens ask for each expert, after ``selected`` [tokens, used].

        With several texts the chances of all are added up.
        """
        last = selected if len(selected) <= MOST_TEXTS else selected[-1:]
        rows = self._chances.take(last.ravel() + layer * self._experts, axis=0)
        found: Worths = np.add.reduce(rows, axis=0, dtype=np.float64)
        found /= last.shape[1]
        return found

    def passed(self, asked: Sequence[Ids], tokens: int) -> None:
        """Learn from a pass over so many tokens; ``asked`` is [tokens, k] of each layer.

        Of a prompt the last layer may be asked for its last token alone, which follows nobody then.
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
        """Learn what tokens are followed by, where each has its own text."""
        if before is not None and len(before) == len(after):
            for one, next_one in zip(before, after, strict=True):
                self._learn(one, next_one)

    def _learn(self, before: NDArray[np.int64], after: NDArray[np.int64]) -> None:
        rows, used = before.ravel(), before.shape[1]
        found = self._chances[rows] * _CHANCE.type(1 - RATE)
        asked = (after % self._experts).repeat(used, axis=0)  # [layers * used, used]
        found[np.arange(len(rows))[:, None], asked] += _CHANCE.type(RATE)
        self._chances[rows] = found
