"""`Found`: what a search of the index returns, as arrays that are grouped without a loop."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from expertctl.routing.vector_table import Mask, Rows, Vectors, VectorTable

DECIMALS = 6
"""To how many decimal places cosines are rounded."""


@dataclass(frozen=True, eq=False)
class Allowed:
    """A filter: which positions of a table may be found; made once, used for many searches."""

    table: VectorTable
    mask: Mask

    @cached_property
    def positions(self) -> Rows:
        """The positions that may be found."""
        return np.flatnonzero(self.mask)

    @cached_property
    def row_count(self) -> int:
        """How many rows they have."""
        return int(self.table.counts[self.positions].sum())

    @cached_property
    def is_open(self) -> bool:
        """Whether it lets all rows through."""
        return self.row_count == len(self.table.rows)

    @cached_property
    def rows(self) -> Rows:
        """Their rows."""
        return self.table.rows_of(self.positions)

    def of(self, table: VectorTable) -> "Allowed":
        """Return the filter for the table with entries added since; these do not pass.

        For the same table it is the same filter.
        """
        if table is self.table:
            return self
        assert table.generation == self.table.generation, "a filter of positions that are no more"
        mask = np.zeros(len(table), np.bool_)
        mask[: len(self.mask)] = self.mask
        return Allowed(table, mask & table.alive)


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Experts close to a query, the closest first, each with the best of its rows.

    The three arrays have one length. ``experts`` are positions in the index, valid until
    `RoutingIndex.revision` changes; ``cosines`` are raw.
    """

    experts: Rows
    cosines: Vectors
    texts: Rows  # 0 is the first row of the expert

    @classmethod
    def nothing(cls) -> Self:
        """Return what a search of an empty index finds."""
        none = np.zeros(0, np.int64)
        return cls(none, np.zeros(0, np.float32), none)

    def first(self, count: int) -> "Found":
        """Return the closest ``count``."""
        if len(self) <= count:
            return self
        return Found(self.experts[:count], self.cosines[:count], self.texts[:count])

    def __len__(self) -> int:
        """How many experts were found."""
        return len(self.experts)


def best_of_each(table: VectorTable, rows: Rows, cosines: Vectors) -> Found:
    """Group rows by the expert that owns them; of equal rows the first counts.

    Cosines are rounded, as the last bits of a product depend on which other rows are multiplied
    with it: no order may depend on that.
    """
    cosines = cosines.round(DECIMALS)
    order = np.lexsort((rows, -cosines))
    first: dict[int, int] = {}
    keep = first.setdefault
    for at, owner in zip(order.tolist(), table.owners[rows[order]].tolist(), strict=True):
        keep(owner, at)
    best = np.fromiter(first.values(), np.int64, len(first))
    experts = np.fromiter(first, np.int64, len(first))
    return Found(experts, cosines[best], rows[best] - table.starts[experts])
