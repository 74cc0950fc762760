"""Routed experts that have a block of memory and no slot: who of them gives way to the next.

Who is worth least goes; of equals it is who was used longest ago. There is one such question for
each expert that is read, and worths change for a whole layer at a time, so nothing is kept in
order: all are looked at, by numpy.
"""

from collections.abc import Collection, Iterable

import numpy as np

Expert = tuple[int, int]
"""A routed layer, counted from 0, and the number of an expert there."""


class ExpertPool:
    """The one owner of who is in it and when each was used; others say what each is worth."""

    def __init__(self, *, layers: int, experts: int) -> None:
        """Begin with nobody in it."""
        self.worths = np.zeros((layers, experts))
        """What each is worth to keep, in it or not."""
        self._used = np.zeros((layers, experts), np.int64)
        self._is_in = np.zeros((layers, experts), np.bool_)
        self._uses = 0

    def __len__(self) -> int:
        """How many are in it."""
        return int(np.count_nonzero(self._is_in))

    def __contains__(self, expert: Expert) -> bool:
        """Whether one is in it."""
        return bool(self._is_in[expert])

    @property
    def members(self) -> set[Expert]:
        """All who are in it."""
        layers, experts = self._is_in.nonzero()
        return set(zip(layers.tolist(), experts.tolist(), strict=True))

    def add(self, expert: Expert) -> None:
        """Take one in, as used last."""
        self._is_in[expert] = True
        self.use([expert])

    def remove(self, expert: Expert) -> None:
        """Take one out."""
        assert self._is_in[expert]
        self._is_in[expert] = False

    def use(self, experts: Iterable[Expert]) -> None:
        """Say that experts were used, one after the other; who is not in it is none the worse."""
        for expert in experts:
            self._uses += 1
            self._used[expert] = self._uses

    def least(self, spared: Collection[Expert] = ()) -> Expert | None:
        """Return who goes next of those that are not spared; None where there are none."""
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
