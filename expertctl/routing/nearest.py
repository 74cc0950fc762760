"""Which experts are closest to a query: exactly, or through a graph where that costs less.

A filter keeps recall. Where few rows pass it, just these are compared. Where many pass it, the
graph is asked for so many more rows that enough should pass, and for more again when too few did,
until comparing all that may pass would cost less.
"""

import numpy as np

from expertctl.routing.found import Allowed, Found, best_of_each
from expertctl.routing.graph import Closest, Graph
from expertctl.routing.vector_table import Rows, Vectors, VectorTable

ROWS_PER_LINK = 48
"""How many rows are compared in the time by which one more of width slows a graph search."""
ROWS_PER_EXPERT = 16
"""Where the experts found have more rows than this on average, more rows are asked for."""

_MOST = 0.3
_SPARE = 1.2
_BLOCK = 4096


def nearest(
    table: VectorTable,
    query: Vectors,
    *,
    count: int,
    allowed: Allowed | None = None,
    graph: Graph | None = None,
) -> Found:
    """Return at most ``count`` experts, the closest first, of those allowed.

    With a graph they are the owners of as many of the closest rows as it finds at its width, and of
    more rows where one expert has so many of the closest rows that it hides others.
    """
    found = None if graph is None else _enough(table, graph, query, count, allowed)
    return exactly(table, query, count=count, allowed=allowed) if found is None else found


def _enough(
    table: VectorTable, graph: Graph, query: Vectors, count: int, allowed: Allowed | None
) -> Found | None:
    """Return what a graph finds; ``None`` where exact search costs less, or finds more experts."""
    fewest = min(count // ROWS_PER_EXPERT, len(table if allowed is None else allowed.positions))
    for asked in (min(count, graph.width), 4 * count, 16 * count):
        closest = _through_graph(table, graph, query, asked, allowed)
        if closest is None:
            return None
        found = best_of_each(table, closest.rows, closest.cosines)
        if len(found) >= fewest:
            return found.first(count)
    return None


def exactly(
    table: VectorTable, query: Vectors, *, count: int, allowed: Allowed | None = None
) -> Found:
    """Do as `nearest`, by comparing every row that may be found."""
    positions = np.arange(len(table)) if allowed is None else allowed.positions
    if len(positions) == 0 or count == 0:
        return Found.nothing()
    rows, cosines = _compared(table, query, allowed)
    counts = table.counts[positions]
    starts = np.cumsum(counts) - counts
    if len(positions) > count:
        best = np.maximum.reduceat(cosines, starts)
        kept = np.sort(np.argpartition(-best, count)[:count])
        own = _spans(starts[kept], counts[kept])
        rows, cosines = rows[own], cosines[own]
    return best_of_each(table, rows, cosines)


def _compared(table: VectorTable, query: Vectors, allowed: Allowed | None) -> tuple[Rows, Vectors]:
    """Return all rows that may be found, in order, and their cosines."""
    if allowed is None:
        return np.arange(len(table.rows)), table.rows @ query
    if allowed.row_count > _MOST * len(table.rows):  # reading on is faster than picking
        return allowed.rows, (table.rows @ query)[allowed.rows]
    blocks = range(0, allowed.row_count, _BLOCK)
    parts = [table.rows[allowed.rows[at : at + _BLOCK]] @ query for at in blocks]
    return allowed.rows, np.concatenate(parts)


def _through_graph(
    table: VectorTable, graph: Graph, query: Vectors, count: int, allowed: Allowed | None
) -> Closest | None:
    """Return the closest rows that may be found; ``None`` where exact search costs less."""
    if allowed is None:
        closest = graph.nearest(query, min(count, graph.rows))
        return closest and _with_later(closest, table, graph, query, count, None)
    sparsity = graph.rows / max(allowed.row_count, 1)
    asked, width = int(count * sparsity * _SPARE) + 1, int(graph.width * sparsity)
    while max(asked, width) * ROWS_PER_LINK < min(allowed.row_count, graph.rows):
        closest = graph.nearest(query, asked, width=width)
        if closest is None:
            return None
        passing = np.flatnonzero(allowed.mask[table.owners[closest.rows]])[:count]
        if len(passing) == count:
            passed = Closest(closest.rows[passing], closest.cosines[passing])
            return _with_later(passed, table, graph, query, count, allowed)
        asked *= 2
    return None


def _with_later(
    closest: Closest,
    table: VectorTable,
    graph: Graph,
    query: Vectors,
    count: int,
    allowed: Allowed | None,
) -> Closest:
    """Add the closest of the rows that the graph does not cover."""
    if graph.rows == len(table.rows):
        return closest
    later = np.arange(graph.rows, len(table.rows))
    if allowed is not None:
        later = later[allowed.mask[table.owners[later]]]
    cosines = table.rows[later] @ query
    if len(later) > count:
        best = np.argpartition(-cosines, count)[:count]
        later, cosines = later[best], cosines[best]
    return Closest(
        np.concatenate([closest.rows, later]), np.concatenate([closest.cosines, cosines])
    )


def _spans(starts: Rows, counts: Rows) -> Rows:
    """Return the numbers of several spans, one span after the other."""
    before = np.cumsum(counts) - counts
    spans: Rows = np.repeat(starts - before, counts) + np.arange(counts.sum())
    return spans
