"""Approximate search for large indexes: an hnswlib graph over the rows of a vector table.

Used from a measured size on (ADR 3) and only when hnswlib is installed (extra ``ann``). Below that
size, without the library, or when the graph does not belong to the table, search is exact. hnswlib
reads its file without checks, so a graph is loaded only when its digest is the recorded one. A
graph may cover only the first rows of its table: those that came later are searched exactly.
"""

import os
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import numpy as np

from expertctl.digest import Digest, hash_file
from expertctl.durable import remove_tree, write_atomic
from expertctl.errors import InvalidPackageError
from expertctl.routing.vector_table import Rows, Vectors, VectorTable
from expertctl.schema.shape import shape
from expertctl.schema.strict_json import canonical, load_object

GRAPH_ROWS = 8_000
"""The size from which a graph is built."""
RECALL = 0.99
"""The share of the ten closest rows that a graph must find."""

GRAPH_FILE = "index.hnsw"
RECORD_FILE = "index.hnsw.json"
_LINKS, _BUILD_WIDTH, _SEED = 16, 200, 7
_FINELY, _COARSELY = range(40, 64, 4), (64, 72, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768)
_WIDTHS = (*_FINELY, *_COARSELY, 1024, 1536, 2048, 3072, 4096, 6144)
_HELD_OUT, _CLOSEST = 1000, 9
_SAME = 1e-5
_PARALLEL_ROWS = 200_000
_CHUNK = 10_000
_MAX_RECORD = 4096
_BESIDE = ".hnsw-"
_LOADED_PER_SECOND = 500e6


class GraphRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of the graph on the disk."""

    contents: str  # digest of the entries whose rows it covers
    rows: int
    width: int  # hnswlib's ef
    recall: float  # at that width, measured with held-out rows
    size: int
    graph: str

    @property
    def load_seconds(self) -> float:
        """About how long hashing and loading it takes."""
        return self.size / _LOADED_PER_SECOND


class Closest(NamedTuple):
    """The closest rows of a table, the closest first, and how close they are to a query."""

    rows: Rows
    cosines: Vectors


@dataclass(frozen=True, slots=True)
class Graph:
    """A loaded graph over the first ``rows`` rows of a table; ``index`` is hnswlib's."""

    index: Any
    rows: int
    width: int
    recall: float

    def nearest(self, query: Vectors, count: int, *, width: int = 0) -> Closest | None:
        """Return the closest rows; ``None`` when it does not find so many.

        A larger ``width`` searches more widely than it takes for the ten closest.
        """
        self.index.set_ef(max(self.width, count, width))
        try:
            labels, distances = self.index.knn_query(query, k=count)
        except RuntimeError:
            return None
        return Closest(labels[0].view(np.int64), 1 - distances[0])

    def absorb(self, table: VectorTable) -> "Graph":
        """Take in the rows of the table that came after the graph was made."""
        self.index.resize_index(max(len(table.rows), self.index.get_max_elements()))
        _insert(self.index, table, np.arange(self.rows, len(table.rows)))
        return replace(self, rows=len(table.rows))


def build_graph(table: VectorTable) -> Graph | None:
    """Build the graph of what is alive; ``None`` without hnswlib, or where it finds too little.

    Some rows are held out at first and used as prompts: the graph is searched as widely as it
    takes to find what exact search finds for them. Of ten rows that is nine, as the first would be
    the held-out row itself.
    """
    if find_spec("hnswlib") is None:
        return None
    rows = np.flatnonzero(table.alive[table.owners])
    index = _hnswlib_index(table)
    index.init_index(len(table.rows), M=_LINKS, ef_construction=_BUILD_WIDTH, random_seed=_SEED)
    index.set_num_threads(_threads(len(rows)))
    held_out = _spread_out(table, rows)[: min(_HELD_OUT, len(rows) // 4)]
    inserted = np.setdiff1d(rows, held_out, assume_unique=True)
    _insert(index, table, inserted)
    width, recall = _sufficient_width(index, table, inserted, table.rows[held_out])
    if recall < RECALL:
        return None
    _insert(index, table, held_out)
    index.set_num_threads(1)
    return Graph(index, len(table.rows), width, recall)


def save_graph(folder: Path, graph: Graph, table: VectorTable) -> None:
    """Save the graph beside its place, then rename it, then record its digest."""
    for left in folder.glob(f"{_BESIDE}*"):  # by a process that was killed
        remove_tree(left)
    with TemporaryDirectory(prefix=_BESIDE, dir=folder) as temporary:
        path = Path(temporary, GRAPH_FILE)
        graph.index.save_index(str(path))
        path.chmod(0o600)
        size, digest = hash_file(path)
        path.replace(folder / GRAPH_FILE)
    record = GraphRecord(
        contents=str(contents(table, graph.rows)),
        rows=graph.rows,
        width=graph.width,
        recall=round(graph.recall, 4),
        size=size,
        graph=str(digest),
    )
    data = canonical(msgspec.to_builtins(record))
    write_atomic(folder / RECORD_FILE, data, mode=0o600)


def read_record(folder: Path, table: VectorTable) -> GraphRecord | None:
    """Return what is known of the graph of this table; ``None`` where there is none."""
    if find_spec("hnswlib") is None:
        return None
    try:
        data = (folder / RECORD_FILE).read_bytes()
        record = shape(load_object(data, what=RECORD_FILE, max_bytes=_MAX_RECORD), GraphRecord)
    except (OSError, InvalidPackageError, msgspec.ValidationError):
        return None
    fits = 0 < record.rows <= len(table.rows) and record.width > 0
    return record if fits and record.contents == str(contents(table, record.rows)) else None


def load_graph(folder: Path, table: VectorTable) -> Graph | None:
    """Load the graph of this very table; ``None`` unless it is the recorded one."""
    record = read_record(folder, table)
    if record is None or not _is_recorded(folder, record):
        return None
    index = _hnswlib_index(table)
    index.load_index(str(folder / GRAPH_FILE), max_elements=record.rows)
    index.set_num_threads(1)
    return Graph(index, record.rows, record.width, record.recall)


def remove_graph(folder: Path) -> None:
    """Remove the graph of a table that is no more."""
    for name in (RECORD_FILE, GRAPH_FILE):
        (folder / name).unlink(missing_ok=True)


def contents(table: VectorTable, rows: int) -> Digest:
    """Return the digest of the entries that the first ``rows`` rows belong to."""
    entries = int(np.searchsorted(table.starts, rows))
    parts = [str(table.encoder).encode(), table.keys[:entries], table.counts[:entries]]
    return Digest.of(b"".join(bytes(part) for part in parts))


def _hnswlib_index(table: VectorTable) -> Any:
    return import_module("hnswlib").Index(space="ip", dim=table.rows.shape[1])


def _spread_out(table: VectorTable, rows: Rows) -> Rows:
    """Shuffle rows: one of every entry, then a second of every entry, and so on.

    An entry that loses several rows at once no longer has the rows that a prompt would find.
    """
    shuffled = np.random.default_rng(_SEED).permutation(rows)
    owners = table.owners[shuffled]
    by_owner = np.argsort(owners, kind="stable")
    first = np.searchsorted(owners[by_owner], owners[by_owner])
    turns = np.empty_like(by_owner)
    turns[by_owner] = np.arange(len(rows)) - first
    spread: Rows = shuffled[np.argsort(turns, kind="stable")]
    return spread


def _insert(index: Any, table: VectorTable, rows: Rows) -> None:
    """Insert rows under their own numbers, a part at a time."""
    for start in range(0, len(rows), _CHUNK):
        part = rows[start : start + _CHUNK]
        index.add_items(table.rows[part], part)


def _threads(rows: int) -> int:
    """Return 1 except for large graphs: with more threads, the same rows give varying graphs."""
    return 1 if rows < _PARALLEL_ROWS else os.cpu_count() or 1


def _sufficient_width(
    index: Any, table: VectorTable, rows: Rows, queries: Vectors
) -> tuple[int, float]:
    """Return the smallest width of search that finds enough, and what it finds."""
    if not len(queries):
        return _WIDTHS[0], 1.0
    count = min(_CLOSEST, len(rows))
    enough = _least_cosines(table, rows, queries, count) - _SAME
    for width in _WIDTHS:
        index.set_ef(max(width, count))
        distances = index.knn_query(queries, k=count)[1]
        recall = float((1 - distances >= enough[:, None]).mean())
        if recall >= RECALL:
            break
    return width, recall


def _least_cosines(table: VectorTable, rows: Rows, queries: Vectors, count: int) -> Vectors:
    """Return, for each query, the cosine of the last of its closest rows."""
    best = np.zeros((len(queries), 0), np.float32)
    for start in range(0, len(rows), _CHUNK):
        part = table.rows[rows[start : start + _CHUNK]]
        cosines = np.concatenate([best, queries @ part.T], axis=1)
        kept = min(count, cosines.shape[1])
        best = -np.partition(-cosines, kept - 1, axis=1)[:, :kept]
    least: Vectors = best.min(axis=1)
    return least


def _is_recorded(folder: Path, record: GraphRecord) -> bool:
    """Tell whether the file is the recorded one."""
    try:
        size, digest = hash_file(folder / GRAPH_FILE)
    except OSError:
        return False
    return (size, str(digest)) == (record.size, record.graph)
