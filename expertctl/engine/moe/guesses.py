"""Which guesses at what the next layer asks for are worth reading: those that are mostly right.

The router of a layer judges early, by what the layer before it reads, and names as many experts as
a token uses, the likeliest first: each has a *rank*. How often a guess is right differs: with a
small trained base from 98 % for the first rank of a late layer to 22 % in the second layer. For
each layer and rank the share of absent experts that were in fact asked for is kept:

    share += 0.02 * (right - share)

once for a pass, ``right`` being the share in it. A rank that is right in less than half of all
cases is not read: half of what it brings would evict other experts for nothing. It is judged all
the same, so it may be read again. At first all ranks are read.

Passes of more than 16 tokens, which are prompts, are neither held back nor judged: so many tokens
ask for nearly every expert.
"""

from collections.abc import Sequence, Set

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.followers import MOST_TEXTS
from expertctl.engine.moe.layer_slots import Ids

RATE = 0.02
"""The weight of the next pass in a share."""
BOUND = 0.5
"""The least share with which a rank is read."""
_FIRST = 1.0


class Guesses:
    """The one owner of the shares of all layers; a layer is guessed at before it is asked for."""

    def __init__(self) -> None:
        """Begin by trusting all ranks."""
        self._shares: dict[int, list[float]] = {}
        self._open: tuple[int, Sequence[list[int]]] | None = None
        """The last layer that was guessed at, and the experts that were absent there, by rank."""

    def shares(self, layer: int) -> Sequence[float]:
        """Return how often each rank of a layer was right of late; none before its first guess."""
        return tuple(self._shares.get(layer, ()))

    def worth_reading(self, layer: int, likely: Ids, absent: NDArray[np.bool_]) -> list[int]:
        """Return which experts of a layer to read, the first ranks first, each once.

        ``likely`` is [tokens, used], and ``absent`` says which of them are not in memory.
        """
        if len(likely) > MOST_TEXTS:
            self._open = None
            return list(dict.fromkeys(likely.T[absent.T].tolist()))
        pairs = zip(likely.T.tolist(), absent.T.tolist(), strict=True)
        ranks = [[e for e, is_absent in zip(*pair, strict=True) if is_absent] for pair in pairs]
        self._open = layer, ranks
        shares = self._shares.setdefault(layer, [_FIRST] * len(ranks))
        trusted = (rank for rank, share in zip(ranks, shares, strict=True) if share >= BOUND)
        return list(dict.fromkeys(expert for rank in trusted for expert in rank))

    def judge(self, layer: int, asked: Set[int]) -> None:
        """Count how many of the last guesses were right, now that it is known who is asked for."""
        guess, self._open = self._open, None
        if guess is None or guess[0] != layer:
            return  # there was no guess, or that pass failed
        shares = self._shares[layer]
        for number, rank in enumerate(guess[1]):
            if rank:
                right = sum(expert in asked for expert in rank) / len(rank)
                shares[number] += RATE * (right - shares[number])
