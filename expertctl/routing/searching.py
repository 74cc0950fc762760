"""`Searching`: the owner of a loaded graph, and when loading one pays.

A process that routes one prompt and ends pays more for loading a graph than comparing all rows
costs; a server does not. No setting says which it is: a graph is loaded once exact searches have
taken as long as loading it takes, so the cost is never more than twice the best.
"""

import threading
import time
from pathlib import Path

from expertctl.routing.found import Allowed, Found
from expertctl.routing.graph import GRAPH_ROWS, Graph, load_graph, read_record
from expertctl.routing.nearest import exactly, nearest
from expertctl.routing.vector_table import Vectors, VectorTable

ABSORBED = 5_000
"""How many rows a loaded graph absorbs at most; more are searched exactly until `reindex`."""


class Searching:
    """Searches tables, by the graph in a folder where that pays; safe for several threads."""

    def __init__(self, folder: Path) -> None:
        """Remember the folder; nothing is loaded yet."""
        self.folder = folder
        self._graph: Graph | None = None
        self._generation = ""  # of the table that the graph belongs to
        self._saving = 0.0  # seconds until loading would have paid
        self._asked: VectorTable | None = None  # the table that `_saving` is about
        self._turn = threading.Lock()

    def run(
        self, table: VectorTable, query: Vectors, *, count: int, allowed: Allowed | None
    ) -> Found:
        """Return what `nearest` finds."""
        if len(table.rows) < GRAPH_ROWS:
            return exactly(table, query, count=count, allowed=allowed)
        with self._turn:
            graph = self._graph if self._generation == table.generation else None
            if graph is not None:
                return nearest(table, query, count=count, allowed=allowed, graph=graph)
        start = time.perf_counter()
        found = exactly(table, query, count=count, allowed=allowed)
        self._count(table, time.perf_counter() - start)
        return found

    def load(self, table: VectorTable) -> None:
        """Load the graph of a table, if it has one, and absorb the rows that came later."""
        if len(table.rows) < GRAPH_ROWS:
            return
        graph = load_graph(self.folder, table)
        if graph is not None and graph.rows < len(table.rows) <= graph.rows + ABSORBED:
            graph = graph.absorb(table)
        self.take(table, graph)

    def take(self, table: VectorTable, graph: Graph | None) -> None:
        """Search this table by this graph from now on."""
        with self._turn:
            self._graph, self._generation = graph, table.generation if graph else ""

    def _count(self, table: VectorTable, seconds: float) -> None:
        """Count the time of an exact search; load the graph once loading would have paid."""
        if self._asked is None or self._asked.generation != table.generation:
            record = read_record(self.folder, table)
            self._asked = table
            self._saving = float("inf") if record is None else record.load_seconds
        self._saving -= seconds
        if self._saving <= 0:
            self._saving = float("inf")
            self.load(table)
