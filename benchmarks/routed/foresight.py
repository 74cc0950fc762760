"""A cache that foresees no better than trained models let it.

In a base whose tokens say which experts they ask for, every layer's requests are known from the
first; in trained ones the next layer's router is sometimes wrong when it is asked early.
"""

from typing import Any

import numpy as np

from expertctl.engine.moe.choices import Choices
from expertctl.engine.moe.expert_cache import ExpertCache

RIGHT = 0.8
"""The share of guesses that are left as they are."""
_DRAWS, _AT_ONCE = 4096, 4096
"""So many are drawn beforehand and reused, since drawing would be timed; a pass takes at most so
many, in one piece."""


class MisledCache(ExpertCache):
    """A cache some of whose guesses are replaced by other experts, drawn evenly."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Take what its base takes."""
        super().__init__(*arguments, **named)
        chance = np.random.default_rng(0)
        wrong = chance.random(_DRAWS) >= RIGHT
        others = chance.integers(len(self.places(0)), size=_DRAWS)
        self._wrong, self._others = (np.resize(each, _DRAWS + _AT_ONCE) for each in (wrong, others))
        self._next = 0

    def ask(self, layer: int, room: Choices, tokens: int, *, foresees: bool = True) -> bool:
        """Have the chosen experts read, and ahead those that are said to be likely."""
        if foresees and layer + 1 < len(self.slots):
            likely = room.likely[layer + 1, :tokens]
            begin, end = self._next, self._next + likely.size
            self._next = end % _DRAWS
            wrong = self._wrong[begin:end].reshape(likely.shape)
            np.copyto(likely, self._others[begin:end].reshape(likely.shape), where=wrong)
        return super().ask(layer, room, tokens, foresees=foresees)
