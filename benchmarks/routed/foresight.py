"""A cache that foresees no better than trained models let it.

In a base whose tokens say whom they ask for, every layer's requests are known from the first; in
trained ones the router of the next layer is wrong now and then when it judges early.
"""

from functools import cached_property

import numpy as np

from expertctl.engine.moe.choices import Choices
from expertctl.engine.moe.expert_cache import ExpertCache

RIGHT = 0.8
"""How often what is foreseen is left as it is."""


class MisledCache(ExpertCache):
    """Experts of which some that are foreseen are others, drawn evenly."""

    def ask(self, layer: int, room: Choices, tokens: int) -> bool:
        """Have read what was chosen, and ahead what is said to be likely."""
        if layer + 1 < len(self.slots):
            likely = room.likely[layer + 1, :tokens]
            wrong = self._chance.random(likely.shape) >= RIGHT
            likely[wrong] = self._chance.integers(len(self.places(layer)), size=int(wrong.sum()))
        return super().ask(layer, room, tokens)

    @cached_property
    def _chance(self) -> np.random.Generator:
        return np.random.default_rng(0)
