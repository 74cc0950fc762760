"""`RoutingIndex`: the vectors of installed experts, kept beside ``index.db``.

An expert is as close to a prompt as the closest of its vectors: its description, its examples and,
where there are enough of them, their mean, in which what the examples ask for outweighs what each
is about (ADR 4).
The files can be deleted at any time and are made again when the encoder changes. Several processes
may use one index: readers take what was published last, writers take turns. Where nothing can be
written, vectors are kept in memory and `notes` says so.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from expertctl.digest import Digest
from expertctl.errors import ExpertError, StoreError
from expertctl.routing.encoder import Encoder
from expertctl.routing.found import Allowed, Found, best_of_each
from expertctl.routing.graph import GRAPH_ROWS, Graph, build_graph, load_graph
from expertctl.routing.vector_table import Rows, Vectors, VectorTable, read_table, write_table
from expertctl.schema.manifest import Manifest
from expertctl.store.disk import disk_errors

TABLE_FILE = "vectors.safetensors"
LOCK_FILE = "vectors.lock"
LOCK_SECONDS = 10.0
FOUND = 64
"""How many experts a search returns at most, unless told otherwise."""
MEAN_FROM = 4
"""How many texts an expert must have for their mean to count."""

Texts = Mapping[Digest, Manifest]
"""Content digest → manifest."""


@dataclass(frozen=True, slots=True)
class Similarity:
    """How close an expert is to a prompt, and which of its vectors is closest."""

    cosine: float
    text: int  # 0 is the description, n the nth example, one more the mean of all


class RoutingIndex:
    """The owner of the vectors in one folder."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        """Remember where and with what; nothing is read yet."""
        self.folder = folder
        self.encoder = encoder
        self.notes: list[str] = []
        self._table: VectorTable | None = None
        self._graph: Graph | None = None
        self._searched = False
        self._last: tuple[str, Vectors] | None = None

    def add(self, experts: Texts) -> None:
        """Make sure that these experts have vectors, on disk where possible."""
        table = self._current()
        missing = {digest: m for digest, m in experts.items() if digest not in table.entries}
        if missing:
            self._extend(self._encoded(missing))

    def remove(self, digests: Iterable[Digest]) -> None:
        """Forget experts.

        Raises:
            StoreError: when the folder cannot be written.
        """
        gone = set(digests)
        if gone & set(self._current().entries):
            with self._writing():
                table = self._load()
                self._publish(table.only(d for d in table.entries if d not in gone))

    def rebuild(self, experts: Texts) -> None:
        """Make all vectors again, and the graph where the index is large enough for one.

        Raises:
            StoreError: when the folder cannot be written.
        """
        table = self._empty().with_entries(self._encoded(experts))
        with self._writing():
            self._publish(table)
        if len(table.rows) >= GRAPH_ROWS:
            self._graph = build_graph(self.folder, table)

    @property
    def revision(self) -> str:
        """What changes whenever positions or rows do."""
        return str(self._current().contents)

    @property
    def digests(self) -> Sequence[Digest]:
        """The content digest of every position."""
        return list(self._current().entries)

    def positions(self, digests: Iterable[Digest]) -> Rows:
        """Return where experts are; those that are not in the index are left out."""
        at = {digest: position for position, digest in enumerate(self._current().entries)}
        return np.array([at[digest] for digest in digests if digest in at], np.int64)

    def allow(self, digests: Iterable[Digest]) -> Allowed:
        """Return a filter that lets these experts through; made once, used for many searches."""
        mask = np.zeros(len(self._current().entries), np.bool_)
        mask[self.positions(digests)] = True
        return mask

    def search(
        self, query: Vectors, *, count: int = FOUND, allowed: Allowed | None = None
    ) -> Found:
        """Return the experts closest to a unit vector, at most ``count``, of those allowed.

        With a graph they are the owners of the ``count`` closest rows.
        """
        table = self._current()
        graph = self._graph_of(table)
        starts = np.array(table.starts, np.int64)
        rows = np.arange(len(table.rows))
        if graph is not None and allowed is None:
            rows = graph.nearest(query)[:count]
        owners = np.searchsorted(starts, rows, side="right") - 1
        if allowed is not None:
            rows, owners = rows[allowed[owners]], owners[allowed[owners]]
        found = best_of_each(rows, table.rows[rows] @ query, owners=owners, starts=starts)
        return found.first(count)

    def measure(self, query: Vectors, experts: Rows) -> Found:
        """Return how close the experts at these positions are, whatever else is closer."""
        mask = np.zeros(len(self._current().entries), np.bool_)
        mask[experts] = True
        return self.search(query, count=len(mask), allowed=mask)

    def vector(self, prompt: str) -> Vectors:
        """Return the unit vector of a prompt; the last one is remembered."""
        return self._vector_of(prompt)

    def similarities(
        self, prompt: str, *, always: Iterable[Digest] = ()
    ) -> dict[Digest, Similarity]:
        """Return how close the experts are: all, or with a graph the closest and ``always``."""
        table = self._current()
        if not table.entries:
            return {}
        query = self._vector_of(prompt)
        graph = self._graph_of(table)
        if graph is None:
            return self._nearest(table, np.arange(len(table.rows)), table.rows @ query)
        rows = np.union1d(graph.nearest(query), table.rows_of(always))
        return self._nearest(table, rows, table.rows[rows] @ query)

    def check_integrity(self) -> None:
        """Check what the class promises about its state.

        Raises:
            StoreError: naming what does not hold.
        """
        table = self._current()
        norms = np.linalg.norm(table.rows, axis=1)
        if not (np.isclose(norms, 1, atol=1e-3) | (norms == 0)).all():
            raise StoreError(f"{self.folder / TABLE_FILE}: a row has not unit length")
        if sum(table.entries.values()) != len(table.rows):
            raise StoreError(f"{self.folder / TABLE_FILE}: rows without an expert")
        if table.encoder != self.encoder.digest():
            raise StoreError(f"{self.folder / TABLE_FILE}: made by another encoder")

    def _vector_of(self, prompt: str) -> Vectors:
        """Return the vector of a prompt; the last one is kept, as one prompt meets many bases."""
        if self._last is None or self._last[0] != prompt:
            self._last = (prompt, self.encoder.encode([prompt])[0])
        return self._last[1]

    def _graph_of(self, table: VectorTable) -> Graph | None:
        """Return the graph from the second search on: loading one costs more than it saves once."""
        if self._searched and self._graph is None and len(table.rows) >= GRAPH_ROWS:
            self._graph = load_graph(self.folder, table)
        self._searched = True
        return self._graph

    def _nearest(
        self, table: VectorTable, rows: Rows, cosines: Vectors
    ) -> dict[Digest, Similarity]:
        """Return the best row of every entry that has one among ``rows``."""
        digests, starts = list(table.entries), np.array(table.starts)
        meant = self.encoder.calibrate(cosines)
        found: dict[Digest, Similarity] = {}
        owners = np.searchsorted(starts, rows, side="right") - 1
        for i in np.lexsort((rows, -meant)):  # the closest first, the earliest of equals
            owner = int(owners[i])
            text = int(rows[i] - starts[owner])
            found.setdefault(digests[owner], Similarity(float(meant[i]), text))
        return found

    def _encoded(self, experts: Texts) -> dict[Digest, Vectors]:
        """Encode all texts in one go, then cut the rows apart."""
        texts = {d: [m.description, *m.routing.examples] for d, m in experts.items()}
        rows = self.encoder.encode([text for listed in texts.values() for text in listed])
        ends = list(accumulate(len(listed) for listed in texts.values()))
        return {d: _with_mean(part) for d, part in zip(texts, np.split(rows, ends), strict=False)}

    def _current(self) -> VectorTable:
        if self._table is None:
            self._table = self._load()
        return self._table

    def _load(self) -> VectorTable:
        """Return the published table, an empty one where it is absent, damaged or another's."""
        table = read_table(self.folder / TABLE_FILE, dimensions=self.encoder.dimensions)
        if table is None:
            return self._empty()
        if table.stamp == self.encoder.stamp:
            return table
        if table.encoder == self.encoder.digest():  # the same weights in another place
            return replace(table, stamp=self.encoder.stamp)
        return self._empty()

    def _empty(self) -> VectorTable:
        return VectorTable.empty(
            encoder=self.encoder.digest(),
            stamp=self.encoder.stamp,
            dimensions=self.encoder.dimensions,
        )

    def _extend(self, added: Mapping[Digest, Vectors]) -> None:
        """Publish what is on disk by now and these entries; in memory where that fails."""
        try:
            with self._writing():
                self._publish(self._load().with_entries(added))
        except ExpertError as error:
            self.notes.append(f"the routing index was not saved: {error.message}")
            self._table = self._current().with_entries(added)

    def _publish(self, table: VectorTable) -> None:
        write_table(self.folder / TABLE_FILE, table)
        self._table, self._graph = table, None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep other writers out.

        Raises:
            StoreError: when the folder cannot be written, or is locked for too long.
            DiskFullError: when there is no space left.
        """
        with disk_errors(self.folder / TABLE_FILE):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                with FileLock(self.folder / LOCK_FILE, timeout=LOCK_SECONDS):
                    yield
            except Timeout as error:
                raise StoreError(f"{self.folder / LOCK_FILE} has been held for too long") from error


def _with_mean(rows: Vectors) -> Vectors:
    """Return the rows and, of several, their mean as one more unit row."""
    mean = rows.mean(0, keepdims=True)
    norm = np.linalg.norm(mean)
    if len(rows) < MEAN_FROM or norm == 0:
        return rows
    both: Vectors = np.concatenate([rows, mean / norm])
    return both
