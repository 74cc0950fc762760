"""Routed experts that have a block of memory and no slot: which of them is evicted next.

The least valuable expert goes; of equals, the one that was used longest ago. That is asked once for
each expert that is read, and worths change for a whole layer at a time, so no order is kept: numpy
looks at all of them.
"""

from collections.abc import Collection, Iterable

import numpy as np

Expert = tuple[int, int]
"""A routed layer, counted from 0, and the number of an expert there."""


class ExpertPool:
    """The one owner of its members and when each was used; others set what each is worth."""

    def __init__(self, *, layers: int, experts: int) -> None:
        """Begin with no expert in it."""
        self.worths = np.zeros((layers, experts))
        """What each expert is worth to keep, in the pool or not."""
        self._used = np.zeros((layers, experts), np.int64)
        self._is_in = np.zeros((layers, experts), np.bool_)
        self._uses = 0

    def __len__(self) -> int:
        """How many experts are in it."""
        return int(np.count_nonzero(self._is_in))

    def __contains__(self, expert: Expert) -> bool:
        """Whether an expert is in it."""
        return bool(self._is_in[expert])

    @property
    def members(self) -> set[Expert]:
        """All experts in it."""
        layers, experts = self._is_in.nonzero()
        return set(zip(layers.tolist(), experts.tolist(), strict=True))

    def add(self, expert: Expert) -> None:
        """Add an expert, as used last."""
        self._is_in[expert] = True
        self.use([expert])

    def remove(self, expert: Expert) -> None:
        """Remove an expert."""
        assert self._is_in[expert]
        self._is_in[expert] = False

    def use(self, experts: Iterable[Expert]) -> None:
        """Record that experts were used, one after the other; they need not be in the pool."""
        for expert in experts:
            self._uses += 1
            self._used[expert] = self._uses

    def least(self, spared: Collection[Expert] = ()) -> Expert | None:
        """Return the expert to evict next, never a spared one; None where there is none."""
        able = self._is_in
        if spared:
            able = able.copy()
            for expert in spared:
                able[expert] = False
        there = np.flatnonzero(able)
        if not len(there):
            return None
        worths = self.worths.ravel()[there]
        equals = there[worths == worths.min()]
        oldest = equals[self._used.ravel()[equals].argmin()]
        return divmod(int(oldest), self._is_in.shape[1])
