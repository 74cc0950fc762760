"""From which size on an hnswlib graph answers faster than exact search in numpy.

Rows are unit vectors in clusters of seven, as the texts of one expert are. Both sides return the
best row of every expert they looked at; the graph also costs a build and a larger file, told in
``note``. The rival is ours in another shape, so there is no target.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.harness import Row, Run, absent, compare, main
from expertctl.digest import Digest
from expertctl.routing.graph import GRAPH_FILE, NEAREST, build_graph
from expertctl.routing.vector_table import Vectors, VectorTable

SIZES = (3_500, 14_000, 49_000)
DIMENSIONS, CLUSTER, QUERIES = 384, 7, 50


def measure(rounds: int) -> Sequence[Row]:
    """Time one search at several sizes, exact against graph."""
    if find_spec("hnswlib") is None:
        install = "pip install 'expertctl[ann]'"
        return [absent(f"{n} rows", rival="hnswlib", install=install) for n in SIZES]
    return [_row(size, rounds) for size in SIZES]


def _row(size: int, rounds: int) -> Row:
    table = _table(size)
    queries = _queries(table.rows)
    with TemporaryDirectory() as folder:
        start = time.perf_counter()
        graph = build_graph(Path(folder), table)
        built = time.perf_counter() - start
        assert graph is not None
        graph_bytes = Path(folder, GRAPH_FILE).stat().st_size
        row = compare(
            f"{size} rows of {DIMENSIONS}",
            _each(queries, lambda query: np.argpartition(-(table.rows @ query), NEAREST)[:NEAREST]),
            _each(queries, graph.nearest),
            rival="hnswlib",
            rounds=rounds,
        )
    found = np.mean([np.argmax(table.rows @ q) in graph.nearest(q) for q in queries])
    note = f"build {built:.1f} s, {graph_bytes >> 20} MiB, recall of the best {found:.2f}"
    return replace(row, note=note)


def _table(size: int) -> VectorTable:
    rng = np.random.default_rng(0)
    centres = np.repeat(rng.standard_normal((size // CLUSTER, DIMENSIONS)), CLUSTER, axis=0)
    rows = _unit(centres + 0.7 * rng.standard_normal(centres.shape))
    entries = {Digest.of(str(n).encode()): CLUSTER for n in range(size // CLUSTER)}
    return VectorTable(Digest.of(b"benchmark"), "benchmark", entries, rows)


def _queries(rows: Vectors) -> Vectors:
    rng = np.random.default_rng(1)
    near = rows[rng.integers(0, len(rows), QUERIES)]
    return _unit(near + 0.02 * rng.standard_normal(near.shape))


def _unit(rows: np.ndarray) -> Vectors:
    scaled: Vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return scaled


def _each(queries: Vectors, search: Callable[[Vectors], object]) -> Run:
    """Return a run that gives the mean seconds of one search."""

    def run() -> float:
        start = time.perf_counter()
        for query in queries:
            search(query)
        return (time.perf_counter() - start) / len(queries)

    return run


if __name__ == "__main__":
    main("ann", measure, rounds=9)
