"""Approximate search for large indexes: an hnswlib graph over the rows of a vector table.

Used from a measured size on (ADR 3) and only when hnswlib is installed (extra ``ann``). Below that
size, without the library, or when the graph does not belong to the table, search is exact. hnswlib
reads its file without checks, so a graph is loaded only when its digest is the recorded one.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from expertctl.digest import hash_file
from expertctl.durable import write_atomic
from expertctl.errors import InvalidPackageError
from expertctl.routing.vector_table import Rows, Vectors, VectorTable
from expertctl.schema.strict_json import canonical, load_object

GRAPH_ROWS = 50_000
"""The size from which a graph is built."""
NEAREST = 256
"""How many rows a graph returns."""

GRAPH_FILE = "index.hnsw"
RECORD_FILE = "index.hnsw.json"
_LINKS, _BUILD_WIDTH, _SEARCH_WIDTH, _SEED = 16, 200, 512, 7
_MAX_RECORD = 4096


@dataclass(frozen=True, slots=True)
class Graph:
    """A loaded graph; ``index`` is hnswlib's."""

    index: Any
    rows: int

    def nearest(self, query: Vectors) -> Rows:
        """Return which rows are closest."""
        labels, _ = self.index.knn_query(query[None], k=min(NEAREST, self.rows))
        rows: Rows = labels[0].astype(np.int64)
        return rows


def build_graph(folder: Path, table: VectorTable) -> Graph | None:
    """Build and publish the graph of a table; ``None`` without hnswlib."""
    if find_spec("hnswlib") is None:
        return None
    index = import_module("hnswlib").Index(space="ip", dim=table.rows.shape[1])
    index.init_index(len(table.rows), M=_LINKS, ef_construction=_BUILD_WIDTH, random_seed=_SEED)
    index.set_num_threads(1)  # with more, the same rows give another graph every time
    index.add_items(table.rows, np.arange(len(table.rows)))
    index.set_ef(_SEARCH_WIDTH)
    _publish(folder, index, table)
    return Graph(index, len(table.rows))


def load_graph(folder: Path, table: VectorTable) -> Graph | None:
    """Load the graph of this very table; ``None`` unless it is the recorded one."""
    if find_spec("hnswlib") is None or not _is_recorded(folder, table):
        return None
    index = import_module("hnswlib").Index(space="ip", dim=table.rows.shape[1])
    index.load_index(str(folder / GRAPH_FILE), max_elements=len(table.rows))
    index.set_num_threads(1)
    index.set_ef(_SEARCH_WIDTH)
    return Graph(index, len(table.rows))


def _publish(folder: Path, index: Any, table: VectorTable) -> None:
    """Save the graph beside its place, then rename it, then record its digest."""
    with TemporaryDirectory(prefix=".hnsw-", dir=folder) as temporary:
        path = Path(temporary, GRAPH_FILE)
        index.save_index(str(path))
        size, digest = hash_file(path)
        path.replace(folder / GRAPH_FILE)
    record = {"rows": str(table.contents), "size": size, "graph": str(digest)}
    write_atomic(folder / RECORD_FILE, canonical(record), mode=0o600)


def _is_recorded(folder: Path, table: VectorTable) -> bool:
    """Tell whether the file is the one that was recorded for these rows."""
    try:
        data = (folder / RECORD_FILE).read_bytes()
        record = load_object(data, what=RECORD_FILE, max_bytes=_MAX_RECORD)
        size, digest = hash_file(folder / GRAPH_FILE)
    except (OSError, InvalidPackageError):
        return False
    return record == {"rows": str(table.contents), "size": size, "graph": str(digest)}
