"""Vector search: exact, or approximate with an hnswlib graph where that costs less.

The graph is used from a measured size on (ADR 3), and only if hnswlib is installed (extra ``ann``).
Below that size, without the library, or if the graph does not belong to the table, search is exact.
hnswlib reads its file unchecked, so a graph is loaded only if its digest is the recorded one. A
graph may cover only the first rows of its table: later ones are searched exactly.

A filter keeps recall. If few rows pass it, only these are compared. If many pass, the graph is
asked for so many more rows that enough should pass, and for more again if too few did, until
comparing all rows that may pass would cost less.

A process that routes one prompt pays more for loading a graph than for comparing all rows; a server
does not. `VectorSearcher` loads the graph once exact searches have taken as long as loading takes,
so the cost is never more than twice the best.
"""

import os
import threading
import time
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import numpy as np

from expertctl.errors import InvalidPackageError
from expertctl.files import remove_tree, write_atomic
from expertctl.reference import Digest, hash_file
from expertctl.routing.vector_table import (
    Rows,
    SearchFilter,
    SearchHits,
    Vectors,
    VectorTable,
    expand_spans,
    group_by_expert,
)
from expertctl.schema.strict_json import encode_canonical, load_object
from expertctl.schema.validation import convert_document

GRAPH_ROWS = 8_000
"""The number of rows from which a graph is built."""
RECALL = 0.99
"""The share of the ten closest rows that a graph must find."""

GRAPH_FILE = "index.hnsw"
RECORD_FILE = "index.hnsw.json"
_HNSW_M, _EF_CONSTRUCTION, _SEED = 16, 200, 7
_FINE_WIDTHS, _COARSE_WIDTHS = (
    range(40, 64, 4),
    (64, 72, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768),
)
_WIDTHS = (*_FINE_WIDTHS, *_COARSE_WIDTHS, 1024, 1536, 2048, 3072, 4096, 6144)
_RECALL_QUERIES, _RECALL_NEIGHBOURS = 1000, 9
_COSINE_TOLERANCE = 1e-5
_PARALLEL_ROWS = 200_000
_CHUNK = 10_000
_MAX_RECORD = 4096
_TEMPORARY_PREFIX = ".hnsw-"
_BYTES_LOADED_PER_SECOND = 500e6


class GraphRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The metadata of the graph on disk."""

    contents: str  # digest of the entries whose rows it covers
    rows: int
    width: int  # hnswlib's ef
    recall: float  # at that width, measured with held-out rows
    size: int
    graph: str

    @property
    def load_seconds(self) -> float:
        """The estimated time to hash and load it."""
        return self.size / _BYTES_LOADED_PER_SECOND


class ClosestRows(NamedTuple):
    """The rows of a table closest to a query, closest first, and their cosines."""

    rows: Rows
    cosines: Vectors


@dataclass(frozen=True, slots=True)
class HnswGraph:
    """A loaded graph over the first ``rows`` rows of a table; ``index`` is hnswlib's."""

    index: Any
    rows: int
    width: int
    recall: float

    def find_closest(self, query: Vectors, count: int, *, width: int = 0) -> ClosestRows | None:
        """Return the closest rows; ``None`` when the graph finds fewer than ``count``.

        ``width`` widens the search beyond the graph's own width.
        """
        self.index.set_ef(max(self.width, count, width))
        try:
            labels, distances = self.index.knn_query(query, k=count)
        except RuntimeError:
            return None
        return ClosestRows(labels[0].view(np.int64), 1 - distances[0])

    def absorb(self, table: VectorTable) -> "HnswGraph":
        """Insert the rows of the table that were added after the graph was built."""
        self.index.resize_index(max(len(table.rows), self.index.get_max_elements()))
        _insert_rows(self.index, table, np.arange(self.rows, len(table.rows)))
        return replace(self, rows=len(table.rows))


def build_graph(table: VectorTable) -> HnswGraph | None:
    """Build the graph of the live rows; ``None`` without hnswlib, or if its recall is too low.

    Some rows are held out at first and used as queries: the search width is increased until the
    graph finds what exact search finds for them. Of ten rows that is nine, as the first would be
    the held-out row itself.
    """
    if find_spec("hnswlib") is None:
        return None
    rows = np.flatnonzero(table.alive[table.owners])
    index = _create_index(table)
    index.init_index(
        len(table.rows), M=_HNSW_M, ef_construction=_EF_CONSTRUCTION, random_seed=_SEED
    )
    index.set_num_threads(_choose_thread_count(len(rows)))
    held_out = _interleave_rows(table, rows)[: min(_RECALL_QUERIES, len(rows) // 4)]
    inserted = np.setdiff1d(rows, held_out, assume_unique=True)
    _insert_rows(index, table, inserted)
    width, recall = _find_sufficient_width(index, table, inserted, table.rows[held_out])
    if recall < RECALL:
        return None
    _insert_rows(index, table, held_out)
    index.set_num_threads(1)
    return HnswGraph(index, len(table.rows), width, recall)


def save_graph(folder: Path, graph: HnswGraph, table: VectorTable) -> None:
    """Save the graph to a temporary file, rename it, then record its digest."""
    for left in folder.glob(f"{_TEMPORARY_PREFIX}*"):  # left by a killed process
        remove_tree(left)
    with TemporaryDirectory(prefix=_TEMPORARY_PREFIX, dir=folder) as temporary:
        path = Path(temporary, GRAPH_FILE)
        graph.index.save_index(str(path))
        path.chmod(0o600)
        size, digest = hash_file(path)
        path.replace(folder / GRAPH_FILE)
    record = GraphRecord(
        contents=str(digest_contents(table, graph.rows)),
        rows=graph.rows,
        width=graph.width,
        recall=round(graph.recall, 4),
        size=size,
        graph=str(digest),
    )
    data = encode_canonical(msgspec.to_builtins(record))
    write_atomic(folder / RECORD_FILE, data, mode=0o600)


def read_record(folder: Path, table: VectorTable) -> GraphRecord | None:
    """Return the metadata of the graph of this table; ``None`` when there is none."""
    if find_spec("hnswlib") is None:
        return None
    try:
        data = (folder / RECORD_FILE).read_bytes()
        record = convert_document(
            load_object(data, what=RECORD_FILE, max_bytes=_MAX_RECORD), GraphRecord
        )
    except (OSError, InvalidPackageError, msgspec.ValidationError):
        return None
    fits = 0 < record.rows <= len(table.rows) and record.width > 0
    return record if fits and record.contents == str(digest_contents(table, record.rows)) else None


def load_graph(folder: Path, table: VectorTable) -> HnswGraph | None:
    """Load the graph of this table; ``None`` unless the file is the recorded one."""
    record = read_record(folder, table)
    if record is None or not _is_recorded(folder, record):
        return None
    index = _create_index(table)
    index.load_index(str(folder / GRAPH_FILE), max_elements=record.rows)
    index.set_num_threads(1)
    return HnswGraph(index, record.rows, record.width, record.recall)


def remove_graph(folder: Path) -> None:
    """Remove the graph of a table that no longer exists."""
    for name in (RECORD_FILE, GRAPH_FILE):
        (folder / name).unlink(missing_ok=True)


def digest_contents(table: VectorTable, rows: int) -> Digest:
    """Return the digest of the entries that the first ``rows`` rows belong to."""
    entries = int(np.searchsorted(table.starts, rows))
    parts = [str(table.encoder).encode(), table.keys[:entries], table.counts[:entries]]
    return Digest.compute(b"".join(bytes(part) for part in parts))


def _create_index(table: VectorTable) -> Any:
    return import_module("hnswlib").Index(space="ip", dim=table.rows.shape[1])


def _interleave_rows(table: VectorTable, rows: Rows) -> Rows:
    """Shuffle rows: one row of every entry, then a second of every entry, and so on.

    An entry from which several rows are held out would lack the rows that a prompt should find.
    """
    shuffled = np.random.default_rng(_SEED).permutation(rows)
    owners = table.owners[shuffled]
    by_owner = np.argsort(owners, kind="stable")
    first = np.searchsorted(owners[by_owner], owners[by_owner])
    turns = np.empty_like(by_owner)
    turns[by_owner] = np.arange(len(rows)) - first
    spread: Rows = shuffled[np.argsort(turns, kind="stable")]
    return spread


def _insert_rows(index: Any, table: VectorTable, rows: Rows) -> None:
    for start in range(0, len(rows), _CHUNK):
        part = rows[start : start + _CHUNK]
        index.add_items(table.rows[part], part)


def _choose_thread_count(rows: int) -> int:
    """Return 1 except for large graphs: with more threads, the same rows give varying graphs."""
    return 1 if rows < _PARALLEL_ROWS else os.cpu_count() or 1


def _find_sufficient_width(
    index: Any, table: VectorTable, rows: Rows, queries: Vectors
) -> tuple[int, float]:
    """Return the smallest search width with enough recall, and that recall."""
    if not len(queries):
        return _WIDTHS[0], 1.0
    count = min(_RECALL_NEIGHBOURS, len(rows))
    enough = _find_farthest_cosines(table, rows, queries, count) - _COSINE_TOLERANCE
    for width in _WIDTHS:
        index.set_ef(max(width, count))
        distances = index.knn_query(queries, k=count)[1]
        recall = float((1 - distances >= enough[:, None]).mean())
        if recall >= RECALL:
            break
    return width, recall


def _find_farthest_cosines(table: VectorTable, rows: Rows, queries: Vectors, count: int) -> Vectors:
    """Return, for each query, the cosine of the last of its ``count`` closest rows."""
    best = np.zeros((len(queries), 0), np.float32)
    for start in range(0, len(rows), _CHUNK):
        part = table.rows[rows[start : start + _CHUNK]]
        cosines = np.concatenate([best, queries @ part.T], axis=1)
        kept = min(count, cosines.shape[1])
        best = -np.partition(-cosines, kept - 1, axis=1)[:, :kept]
    least: Vectors = best.min(axis=1)
    return least


def _is_recorded(folder: Path, record: GraphRecord) -> bool:
    try:
        size, digest = hash_file(folder / GRAPH_FILE)
    except OSError:
        return False
    return (size, str(digest)) == (record.size, record.graph)


ROWS_PER_LINK = 48
"""How many rows can be compared in the time by which one more of width slows a graph search."""
ROWS_PER_EXPERT = 16
"""More rows are asked for if the experts found have more rows than this on average."""

_MAX_GATHERED_SHARE = 0.3
_OVERSAMPLING = 1.2
_ROWS_PER_BLOCK = 4096


def find_nearest(
    table: VectorTable,
    query: Vectors,
    *,
    count: int,
    allowed: SearchFilter | None = None,
    graph: HnswGraph | None = None,
) -> SearchHits:
    """Return at most ``count`` allowed experts, closest first.

    With a graph they are the owners of as many of the closest rows as it finds at its width, and of
    more rows if one expert has so many of the closest rows that it hides others.
    """
    found = None if graph is None else _search_graph(table, graph, query, count, allowed)
    return (
        find_nearest_exact(table, query, count=count, allowed=allowed) if found is None else found
    )


def _search_graph(
    table: VectorTable, graph: HnswGraph, query: Vectors, count: int, allowed: SearchFilter | None
) -> SearchHits | None:
    """Search a graph; ``None`` when exact search costs less or finds more experts."""
    fewest = min(count // ROWS_PER_EXPERT, len(table if allowed is None else allowed.positions))
    for requested in (min(count, graph.width), 4 * count, 16 * count):
        closest = _search_graph_filtered(table, graph, query, requested, allowed)
        if closest is None:
            return None
        found = group_by_expert(table, closest.rows, closest.cosines)
        if len(found) >= fewest:
            return found.take(count)
    return None


def find_nearest_exact(
    table: VectorTable, query: Vectors, *, count: int, allowed: SearchFilter | None = None
) -> SearchHits:
    """Return at most ``count`` allowed experts, by comparing every allowed row."""
    positions = np.arange(len(table)) if allowed is None else allowed.positions
    if len(positions) == 0 or count == 0:
        return SearchHits.empty()
    rows, cosines = _compare_rows(table, query, allowed)
    counts = table.counts[positions]
    starts = np.cumsum(counts) - counts
    if len(positions) > count:
        best = np.maximum.reduceat(cosines, starts)
        kept = np.sort(np.argpartition(-best, count)[:count])
        own = expand_spans(starts[kept], counts[kept])
        rows, cosines = rows[own], cosines[own]
    return group_by_expert(table, rows, cosines)


def _compare_rows(
    table: VectorTable, query: Vectors, allowed: SearchFilter | None
) -> tuple[Rows, Vectors]:
    """Return all allowed rows, in order, and their cosines."""
    if allowed is None:
        return np.arange(len(table.rows)), table.rows @ query
    if allowed.row_count > _MAX_GATHERED_SHARE * len(
        table.rows
    ):  # reading on is faster than picking
        return allowed.rows, (table.rows @ query)[allowed.rows]
    blocks = range(0, allowed.row_count, _ROWS_PER_BLOCK)
    parts = [table.rows[allowed.rows[at : at + _ROWS_PER_BLOCK]] @ query for at in blocks]
    return allowed.rows, np.concatenate(parts)


def _search_graph_filtered(
    table: VectorTable, graph: HnswGraph, query: Vectors, count: int, allowed: SearchFilter | None
) -> ClosestRows | None:
    """Return the closest allowed rows; ``None`` when exact search costs less."""
    if allowed is None:
        closest = graph.find_closest(query, min(count, graph.rows))
        return closest and _add_later_rows(closest, table, graph, query, count, None)
    sparsity = graph.rows / max(allowed.row_count, 1)
    requested, width = int(count * sparsity * _OVERSAMPLING) + 1, int(graph.width * sparsity)
    while max(requested, width) * ROWS_PER_LINK < min(allowed.row_count, graph.rows):
        closest = graph.find_closest(query, requested, width=width)
        if closest is None:
            return None
        passing = np.flatnonzero(allowed.mask[table.owners[closest.rows]])[:count]
        if len(passing) == count:
            passed = ClosestRows(closest.rows[passing], closest.cosines[passing])
            return _add_later_rows(passed, table, graph, query, count, allowed)
        requested *= 2
    return None


def _add_later_rows(
    closest: ClosestRows,
    table: VectorTable,
    graph: HnswGraph,
    query: Vectors,
    count: int,
    allowed: SearchFilter | None,
) -> ClosestRows:
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
    return ClosestRows(
        np.concatenate([closest.rows, later]), np.concatenate([closest.cosines, cosines])
    )


MAX_ABSORBED_ROWS = 5_000
"""How many later rows a loaded graph absorbs; if there are more, all are searched exactly."""


class VectorSearcher:
    """Searches tables, with the graph in a folder if that pays; thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Remember the folder; nothing is loaded yet."""
        self.folder = folder
        self._graph: HnswGraph | None = None
        self._generation = ""  # of the table that the graph belongs to
        self._seconds_until_load = 0.0  # seconds until loading would have paid
        self._counted_table: VectorTable | None = (
            None  # the table that `_seconds_until_load` is about
        )
        self._lock = threading.Lock()

    def search(
        self, table: VectorTable, query: Vectors, *, count: int, allowed: SearchFilter | None
    ) -> SearchHits:
        """Return what `find_nearest` finds."""
        if len(table.rows) < GRAPH_ROWS:
            return find_nearest_exact(table, query, count=count, allowed=allowed)
        with self._lock:
            graph = self._graph if self._generation == table.generation else None
            if graph is not None:
                return find_nearest(table, query, count=count, allowed=allowed, graph=graph)
        start = time.perf_counter()
        found = find_nearest_exact(table, query, count=count, allowed=allowed)
        self._count_exact_search(table, time.perf_counter() - start)
        return found

    def load(self, table: VectorTable) -> None:
        """Load the graph of a table, if any, and absorb the rows that were added later."""
        if len(table.rows) < GRAPH_ROWS:
            return
        graph = load_graph(self.folder, table)
        if graph is not None and graph.rows < len(table.rows) <= graph.rows + MAX_ABSORBED_ROWS:
            graph = graph.absorb(table)
        self.use_graph(table, graph)

    def use_graph(self, table: VectorTable, graph: HnswGraph | None) -> None:
        """Use this graph for this table from now on."""
        with self._lock:
            self._graph, self._generation = graph, table.generation if graph else ""

    def _count_exact_search(self, table: VectorTable, seconds: float) -> None:
        """Count the time of an exact search; load the graph once loading would have paid."""
        if self._counted_table is None or self._counted_table.generation != table.generation:
            record = read_record(self.folder, table)
            self._counted_table = table
            self._seconds_until_load = float("inf") if record is None else record.load_seconds
        self._seconds_until_load -= seconds
        if self._seconds_until_load <= 0:
            self._seconds_until_load = float("inf")
            self.load(table)
