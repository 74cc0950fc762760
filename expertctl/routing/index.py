"""`RoutingIndex`: the vectors of installed experts, kept beside ``index.db``.

An expert is as close to a prompt as the closest of its vectors (`expert_texts`). To add one costs
what its own texts cost. The files can be deleted at any time and are made again when the encoder
changes. Several processes may use one index: readers take what was published last, writers take
turns. Where nothing can be written, vectors are kept in memory and `notes` says so.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from expertctl.digest import Digest
from expertctl.errors import ExpertError, StoreError
from expertctl.routing.encoder import Encoder
from expertctl.routing.expert_texts import ExpertTexts
from expertctl.routing.found import Allowed, Found
from expertctl.routing.graph import GRAPH_ROWS, build_graph, remove_graph, save_graph
from expertctl.routing.lesson import Learner, Lesson
from expertctl.routing.nearest import exactly
from expertctl.routing.searching import Searching
from expertctl.routing.vector_files import JOURNAL_FILE, VectorFiles
from expertctl.routing.vector_table import Rows, Vectors, VectorTable, parts_of
from expertctl.schema.manifest import Manifest
from expertctl.store.disk import disk_errors

LOCK_FILE = "vectors.lock"
LOCK_SECONDS = 10.0
FOUND = 64
"""How many experts a search returns at most, unless told otherwise."""
DEAD = 0.3
"""The share of rows that may belong to forgotten experts before all is written anew."""
BATCH = 64
"""How many experts are encoded and published at once."""

Texts = Mapping[Digest, Manifest]
"""Content digest → manifest."""


@dataclass(frozen=True, slots=True)
class Similarity:
    """How close an expert is to a prompt, and which of its vectors is closest."""

    cosine: float
    text: int  # see `expert_texts.described`


class RoutingIndex:
    """The owner of the vectors in one folder."""

    def __init__(self, folder: Path, encoder: Encoder, learner: Learner | None = None) -> None:
        """Remember where and with what; nothing is read yet."""
        self.folder = folder
        self.encoder = encoder
        self.learner = learner
        self.notes: list[str] = []
        self._files = VectorFiles(folder, dimensions=encoder.dimensions)
        self._table: VectorTable | None = None
        self._searching = Searching(folder)
        self._last: tuple[str, Vectors] | None = None

    def add(self, experts: Texts) -> None:
        """Make sure that these experts have vectors, on disk where possible."""
        missing = self._missing(self._current(), experts)
        if missing and self._files.changed():
            self._table = self._read()
            missing = self._missing(self._table, missing)
        for batch in _batches(missing):
            self._extend(self._encoded(batch))

    def remove(self, digests: Iterable[Digest]) -> None:
        """Forget experts.

        Raises:
            StoreError: when the folder cannot be written.
        """
        gone = list(digests)
        if not len(self.positions(gone)):
            return
        with self._writing():
            table = self._read()
            at = table.positions(gone)
            self._table = self._bury(table, at[at >= 0])
        if self.learner is not None:
            self.learner.forget(gone)

    def rebuild(self, experts: Texts) -> None:
        """Make all vectors again, and the graph where the index is large enough for one.

        Raises:
            StoreError: when the folder cannot be written.
        """
        if self.learner is not None:
            self.learner.restart()
        rows = dict(chain.from_iterable(self._encoded(b).items() for b in _batches(experts)))
        with self._writing():
            self._table = self._files.replace(self._empty().with_entries(rows))
        self._build_graph(self._table)

    def prepare(self) -> None:
        """Do now what only pays in a process that searches often: load the graph, if any."""
        self._searching.load(self._current())

    @property
    def table(self) -> VectorTable:
        """The vectors of now; a value, which later changes leave alone."""
        return self._current()

    @property
    def revision(self) -> str:
        """What changes whenever positions may mean others, or there are more or fewer."""
        table = self._current()
        return f"{table.generation}:{len(table)}:{table.dead_rows}"

    @property
    def digests(self) -> list[Digest]:
        """The content digest of every position, of those that were forgotten too."""
        table = self._current()
        return [table.digest(position) for position in range(len(table))]

    def digest(self, position: int) -> Digest:
        """Return the content digest of the expert at a position."""
        return self._current().digest(position)

    def rows(self, digest: Digest) -> Vectors | None:
        """Return the rows of an expert, see `expert_texts`; ``None`` when it is not here."""
        table = self._current()
        at = table.positions([digest])
        return None if at[0] < 0 else table.rows[table.rows_of(at)]

    def positions(self, digests: Iterable[Digest]) -> Rows:
        """Return where experts are; those that are not in the index are left out."""
        found = self._current().positions(list(digests))
        return found[found >= 0]

    def allow(self, digests: Iterable[Digest]) -> Allowed:
        """Return a filter that lets these experts through; made once, used for many searches."""
        table = self._current()
        mask = np.zeros(len(table), np.bool_)
        mask[self.positions(digests)] = True
        return Allowed(table, mask)

    def search(
        self, query: Vectors, *, count: int = FOUND, allowed: Allowed | None = None
    ) -> Found:
        """Return the experts closest to a unit vector, at most ``count``, of those allowed.

        With a graph they are the owners of the ``count`` closest rows.
        """
        table = self._current()
        return self._searching.run(table, query, count=count, allowed=_filter(table, allowed))

    def measure(self, query: Vectors, experts: Rows) -> Found:
        """Return how close the experts at these positions are, whatever else is closer."""
        table = self._current()
        mask = np.zeros(len(table), np.bool_)
        mask[experts] = True
        return exactly(table, query, count=len(table), allowed=Allowed(table, mask))

    def vector(self, prompt: str) -> Vectors:
        """Return the unit vector of a prompt; the last one is kept, as it meets many bases."""
        if self._last is None or self._last[0] != prompt:
            self._last = (prompt, self.encoder.encode([prompt])[0])
        return self._last[1]

    def similarities(
        self, prompt: str, *, always: Iterable[Digest] = ()
    ) -> dict[Digest, Similarity]:
        """Return how close the experts are: all, or with a graph the closest and ``always``."""
        table = self._current()
        if not table.alive.any():
            return {}
        query = self.vector(prompt)
        near = self.search(query, count=len(table))
        return self._meant(self.measure(query, self.positions(always))) | self._meant(near)

    def check_integrity(self) -> None:
        """Check what the class promises about its state.

        Raises:
            StoreError: naming what does not hold.
        """
        table = self._current()
        where = self.folder / JOURNAL_FILE
        for start in range(0, len(table.rows), 1 << 14):
            norms = np.linalg.norm(table.rows[start : start + (1 << 14)], axis=1)
            if not (np.isclose(norms, 1, atol=1e-3) | (norms == 0)).all():
                raise StoreError(f"{where}: a row has not unit length")
        if table.counts.sum() != len(table.rows):
            raise StoreError(f"{where}: rows without an expert")
        if table.encoder != self.encoder.digest():
            raise StoreError(f"{where}: made by another encoder")
        if table.generation and not self._files.check():
            raise StoreError(f"{where}: rows that are not those that were written")

    def _meant(self, found: Found) -> dict[Digest, Similarity]:
        """Return what was found, the closest first, with cosines that thresholds hold for."""
        meant = self.encoder.calibrate(found.cosines).tolist()
        told = zip(found.experts.tolist(), meant, found.texts.tolist(), strict=True)
        return {self.digest(at): Similarity(cosine, text) for at, cosine, text in told}

    def _missing(self, table: VectorTable, experts: Texts) -> Texts:
        """Return the experts that have no vectors here, or that the learner knows nothing of."""
        digests = list(experts)
        missing = {digests[n] for n in np.flatnonzero(table.positions(digests) < 0)}
        if self.learner is not None:
            missing |= set(self.learner.lacking(digests))
        return {digest: experts[digest] for digest in digests if digest in missing}

    def _encoded(self, experts: Texts) -> dict[Digest, Vectors]:
        """Encode all texts in one go, teach the learner, and cut the rows apart."""
        texts = {digest: ExpertTexts.of(manifest) for digest, manifest in experts.items()}
        counts = np.array([len(each.all) for each in texts.values()], np.int64)
        encoded = self.encoder.encode_deep([t for each in texts.values() for t in each.all])
        if self.learner is not None:
            deep = zip(experts.items(), parts_of(encoded.deep, counts), strict=True)
            self.learner.learn(
                [Lesson(d, m, rows[: 1 + len(m.routing.examples)]) for (d, m), rows in deep]
            )
        parts = zip(texts.items(), parts_of(encoded.rows, counts), strict=True)
        return {digest: each.rows(rows) for (digest, each), rows in parts}

    def _current(self) -> VectorTable:
        if self._table is None:
            self._table = self._read()
        return self._table

    def _read(self) -> VectorTable:
        """Return the published table, an empty one where it is absent, damaged or another's."""
        table = self._files.read()
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
                self._table = self._appended(self._read(), added)
        except ExpertError as error:
            self.notes.append(f"the routing index was not saved: {error.message}")
            self._table = self._current().with_entries(added)

    def _appended(self, table: VectorTable, added: Mapping[Digest, Vectors]) -> VectorTable:
        new = table.lacking(added)
        if not table.generation:
            return self._files.replace(table.with_entries(new))
        self._files.restamp(table.stamp)
        return self._files.append(new) if new else table

    def _bury(self, table: VectorTable, positions: Rows) -> VectorTable:
        """Bury entries; write all anew when too much is dead."""
        if not len(positions):
            return table
        left = self._files.bury(positions)
        if left.dead_rows <= DEAD * len(left.rows):
            return left
        remove_graph(self.folder)
        return self._files.replace(left)

    def _build_graph(self, table: VectorTable) -> None:
        """Build the graph of a table that is on disk, without keeping writers out meanwhile."""
        graph = build_graph(table) if len(table.rows) >= GRAPH_ROWS else None
        with self._writing():
            if graph is None:
                remove_graph(self.folder)
            elif self._read().generation == table.generation:
                save_graph(self.folder, graph, table)
                self._searching.take(table, graph)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep other writers out.

        Raises:
            StoreError: when the folder cannot be written, or is locked for too long.
            DiskFullError: when there is no space left.
        """
        with disk_errors(self.folder / JOURNAL_FILE):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                with FileLock(self.folder / LOCK_FILE, timeout=LOCK_SECONDS):
                    yield
            except Timeout as error:
                raise StoreError(f"{self.folder / LOCK_FILE} has been held for too long") from error


def _batches(experts: Texts) -> Iterator[Texts]:
    rest = iter(experts.items())
    while batch := dict(islice(rest, BATCH)):
        yield batch


def _filter(table: VectorTable, allowed: Allowed | None) -> Allowed | None:
    """Return the filter for this table; none where all may be found."""
    if allowed is not None:
        return allowed.of(table)
    return Allowed(table, table.alive) if table.dead_rows else None
