"""How rows of routed experts become rows of tokens: the plain formulas.

Kernels do the same faster and are tested against these. Sums are in the type of the rows, and in
the stated order; so what depends on the order of a sum can be told from what does not.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.worklist import Ids, Worklist

Rows = NDArray[np.floating]


def reduce_rows(worklist: Worklist, rows: Sequence[Rows]) -> Rows:
    """Merge the rows of all lanes, [entries, width] each, into [tokens, width].

    Each token adds its weighted rows in the order of their sources, whatever lane and entry they
    came from: where a row was computed leaves no trace, not even in the last bit.
    """
    width = rows[-1].shape[1]
    grid = np.zeros((worklist.capacity, width), rows[-1].dtype)
    for lane, of_lane in zip(worklist, rows, strict=True):
        weighted = of_lane * lane.weights[:, None].astype(grid.dtype)
        grid[lane.sources[lane.filled]] = weighted[lane.filled]
    merged = np.zeros((worklist.tokens, width), grid.dtype)
    for choice in range(worklist.used):
        merged += grid[choice :: worklist.used]
    return merged


def multiply_routed(matrices: Rows, rows: Rows, experts: Ids) -> Rows:
    """Multiply each row [width] by the matrix [out, width] of its expert; -1 gives zeros."""
    products = np.zeros((experts.size, matrices.shape[1]), rows.dtype)
    for position in np.flatnonzero(experts >= 0):
        products[position] = matrices[experts[position]] @ rows[position]
    return products


def multiply_indirect(matrices: Rows, rows: Rows, experts: Ids, sources: Ids) -> Rows:
    """Multiply rows that are looked up by number, without making a copy of them first."""
    products = np.zeros((experts.size, matrices.shape[1]), rows.dtype)
    for position in np.flatnonzero(experts >= 0):
        products[position] = matrices[experts[position]] @ rows[sources[position]]
    return products


def multiply_reduced(
    matrices: Rows, rows: Rows, experts: Ids, *, tokens: Ids, weights: Rows, count: int
) -> Rows:
    """Add the weighted products straight into the rows of ``count`` tokens, in their order."""
    merged = np.zeros((count, matrices.shape[1]), rows.dtype)
    for position in np.flatnonzero(experts >= 0):
        product = matrices[experts[position]] @ rows[position]
        merged[tokens[position]] += weights[position] * product
    return merged
