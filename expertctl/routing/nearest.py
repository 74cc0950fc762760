"""Which experts are closest to a query: exactly, or through a graph where that costs less.

A filter keeps recall. Where it lets few rows through, just these are compared. Where it lets many
through, the graph is asked for so many more rows that enough of them pass, and for more again when
they do not, until comparing all that may pass would cost less.
"""

import numpy as np

from expertctl.routing.found import Allowed, Found, best_of_each
from expertctl.routing.graph import Graph
from expertctl.routing.vector_table import Rows, Vectors, VectorTable

ROWS_PER_LINK = 48
"""How many rows are compared in the time that one more of width costs a graph."""
ROWS_PER_EXPERT = 16
"""Where experts found have more rows than this on the average, more rows are asked for."""

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

    With a graph they are the owners of the ``count`` closest rows, and of more rows where one
    expert has so many of them that it hides the others.
    """
    found = None if graph is None else _enough(table, graph, query, count, allowed)
    return exactly(table, query, count=count, allowed=allowed) if found is None else found


def _enough(
    table: VectorTable, graph: Graph, query: Vectors, count: int, allowed: Allowed | None
) -> Found | None:
    """Return what a graph finds; ``None`` where exact search costs less, or finds more experts."""
    fewest = min(count // ROWS_PER_EXPERT, len(table if allowed is None else allowed.positions))
    for asked in (count, 4 * count, 16 * count):
        rows = _through_graph(table, graph, query, asked, allowed)
        if rows is None:
            return None
        found = best_of_each(table, rows, table.rows[rows] @ query)
        if len(found) >= fewest:
            return found.first(count)
    return None


def exactly(
    table: VectorTable, query: Vectors, *, count: int, allowed: Allowed | None = None
) -> Found:
    """Return what `nearest` does, having compared every row that may be found."""
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
) -> Rows | None:
    """Return the closest rows that may be found; ``None`` where exact search costs less."""
    if allowed is None:
        rows = graph.nearest(query, min(count, graph.rows))
        return rows if rows is None else _with_later(rows, table, graph, query, count, None)
    sparsity = graph.rows / max(allowed.row_count, 1)
    asked, width = int(count * sparsity * _SPARE) + 1, int(graph.width * sparsity)
    while max(asked, width) * ROWS_PER_LINK < min(allowed.row_count, graph.rows):
        rows = graph.nearest(query, asked, width=width)
        if rows is None:
            return None
        passing = rows[allowed.mask[table.owners[rows]]]
        if len(passing) >= count:
            return _with_later(passing[:count], table, graph, query, count, allowed)
        asked *= 2
    return None


def _with_later(
    rows: Rows,
    table: VectorTable,
    graph: Graph,
    query: Vectors,
    count: int,
    allowed: Allowed | None,
) -> Rows:
    """Add the closest of the rows that the graph does not cover."""
    if graph.rows == len(table.rows):
        return rows
    later = np.arange(graph.rows, len(table.rows))
    if allowed is not None:
        later = later[allowed.mask[table.owners[later]]]
    if len(later) > count:
        later = later[np.argpartition(-(table.rows[later] @ query), count)[:count]]
    return np.concatenate([rows, later])


def _spans(starts: Rows, counts: Rows) -> Rows:
    """Return the numbers of several spans, one span after the other."""
    before = np.cumsum(counts) - counts
    spans: Rows = np.repeat(starts - before, counts) + np.arange(counts.sum())
    return spans
