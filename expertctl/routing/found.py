"""`Found`: what a search of the index returns, as arrays that are grouped without a loop."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from expertctl.routing.vector_table import Rows, Vectors

Allowed = npt.NDArray[np.bool_]
"""A filter: which positions of the index may be found."""


@dataclass(frozen=True, slots=True)
class Found:
    """Experts close to a query, the closest first, each with the best of its rows.

    The three arrays are as long as each other. ``experts`` are positions in the index, which stay
    what they are until `RoutingIndex.revision` changes; ``cosines`` are raw.
    """

    experts: Rows
    cosines: Vectors
    texts: Rows  # 0 is the first row of the expert

    @classmethod
    def nothing(cls) -> Self:
        """Return what a search of an empty index finds."""
        none = np.zeros(0, np.int64)
        return cls(none, np.zeros(0, np.float32), none)

    def first(self, count: int) -> Self:
        """Return the closest ``count``."""
        return replace(
            self,
            experts=self.experts[:count],
            cosines=self.cosines[:count],
            texts=self.texts[:count],
        )

    def __len__(self) -> int:
        """How many experts were found."""
        return len(self.experts)


def best_of_each(rows: Rows, cosines: Vectors, *, owners: Rows, starts: Rows) -> Found:
    """Group rows by the expert that owns them; of equal rows the first counts.

    ``owners`` says who owns each of ``rows``, ``starts`` where the rows of every expert begin.
    """
    order = np.lexsort((rows, -cosines))
    _, first = np.unique(owners[order], return_index=True)
    best = order[np.sort(first)]
    experts = owners[best]
    return Found(experts, cosines[best], rows[best] - starts[experts])
