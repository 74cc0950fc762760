"""`RoutingIndex`: the vectors of installed experts, kept beside ``index.db``.

An expert is as close to a prompt as the closest of its vectors (`expert_texts`); the deep rows of
its description and examples, from the same pass of the encoder, are for the head. Adding an expert
costs only the encoding of its own texts. See `vector_store` for the files.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from expertctl.digest import Digest
from expertctl.errors import StoreError
from expertctl.routing.calibration import (
    CALIBRATION_FILE,
    NOTHING_ASKED,
    Calibration,
    ask_again,
    calibrated,
    prior_of,
    read_calibration,
    write_calibration,
)
from expertctl.routing.encoded import Encoded
from expertctl.routing.encoder import Encoder
from expertctl.routing.expert_texts import ExpertTexts
from expertctl.routing.found import Allowed, Found
from expertctl.routing.graph import GRAPH_ROWS, build_graph, remove_graph, save_graph
from expertctl.routing.nearest import exactly
from expertctl.routing.searching import Searching
from expertctl.routing.vector_files import JOURNAL_FILE
from expertctl.routing.vector_store import VectorStore
from expertctl.routing.vector_table import Rows, Vectors, VectorTable, parts_of
from expertctl.schema.manifest import Manifest

FOUND = 64
"""How many experts a search returns at most, unless told otherwise."""
BATCH = 64
"""How many experts are encoded and published at once."""
DEEP_FOLDER = "deep"

Texts = Mapping[Digest, Manifest]
"""Content digest → manifest."""

_Encoded = Mapping[Digest, tuple[Vectors, Vectors]]
"""Content digest → its rows and its deep rows."""


@dataclass(frozen=True, slots=True)
class Similarity:
    """How close an expert is to a prompt, and which of its vectors is closest."""

    cosine: float
    text: int  # see `expert_texts.described`


class RoutingIndex:
    """The owner of the vectors in one folder."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        """Remember where and with what; nothing is read yet."""
        self.folder = folder
        self.encoder = encoder
        self._rows = VectorStore(folder, encoder, dimensions=encoder.dimensions)
        self._deep = VectorStore(folder / DEEP_FOLDER, encoder, dimensions=encoder.deep_dimensions)
        self._searching = Searching(folder)
        self._calibration: Calibration | None = None
        self._last: tuple[str, Encoded] | None = None

    def add(self, experts: Texts) -> None:
        """Make sure that these experts have vectors, on disk where possible."""
        if not self._missing(experts):
            return
        self.refresh()
        for batch in _batches(self._missing(experts)):
            encoded = self._encoded(batch)
            self._deep.append({digest: deep for digest, (_, deep) in encoded.items()})
            self._rows.append({digest: rows for digest, (rows, _) in encoded.items()})
        self._calibrate()

    def refresh(self) -> None:
        """Look whether another process has published vectors since."""
        before = self.revision
        self._rows.refresh()
        self._deep.refresh()
        if self.revision != before:
            self._calibrate()

    def lacking(self, experts: Texts) -> int:
        """Return how many of these experts `add` would encode, going by the last read."""
        return len(self._missing(experts))

    def remove(self, digests: Iterable[Digest]) -> None:
        """Forget experts.

        Raises:
            StoreError: when the folder cannot be written.
        """
        gone = list(digests)
        if not len(self.positions(gone)):
            return
        if self._rows.bury(gone):
            remove_graph(self.folder)
        self._deep.bury(gone)
        self._calibrate()

    def rebuild(self, experts: Texts) -> None:
        """Make all vectors again, and the graph where the index is large enough for one.

        Raises:
            StoreError: when the folder cannot be written.
        """
        parts = (self._encoded(batch) for batch in _batches(experts))
        encoded = dict(chain.from_iterable(part.items() for part in parts))
        self._deep.replace({digest: deep for digest, (_, deep) in encoded.items()})
        self._build_graph(self._rows.replace({d: rows for d, (rows, _) in encoded.items()}))
        self._ask_again()

    def prepare(self) -> None:
        """Do now what only pays in a process that searches often: load the graph, if any."""
        self._searching.load(self.table)

    @property
    def notes(self) -> list[str]:
        """What the user should know of the files: first of the rows, then of the deep rows."""
        return [*dict.fromkeys([*self._rows.notes, *self._deep.notes])]

    @property
    def deep(self) -> VectorTable:
        """The rows that the head reads; an immutable value."""
        return self._deep.table

    @property
    def calibration(self) -> Calibration:
        """How much evidence of the head is enough."""
        if self._calibration is None:
            self._calibrate()
        assert self._calibration is not None, "`_calibrate` sets it"
        return self._calibration

    @property
    def table(self) -> VectorTable:
        """The current vectors; an immutable value."""
        return self._rows.table

    @property
    def revision(self) -> str:
        """A text that changes when positions may mean other experts or their number changes."""
        table = self.table
        return f"{table.generation}:{len(table)}:{table.dead_rows}"

    def digest(self, position: int) -> Digest:
        """Return the content digest of the expert at a position."""
        return self.table.digest(position)

    def positions(self, digests: Iterable[Digest]) -> Rows:
        """Return the positions of experts; those that are not in the index are left out."""
        found = self.table.positions(list(digests))
        return found[found >= 0]

    def allow(self, digests: Iterable[Digest]) -> Allowed:
        """Return a filter that lets these experts through; made once, used for many searches."""
        table = self.table
        mask = np.zeros(len(table), np.bool_)
        mask[self.positions(digests)] = True
        return Allowed(table, mask)

    def search(
        self, query: Vectors, *, count: int = FOUND, allowed: Allowed | None = None
    ) -> Found:
        """Return the experts closest to a unit vector, at most ``count``, of those allowed.

        With a graph they are the owners of the ``count`` closest rows.
        """
        table = self.table
        return self._searching.run(table, query, count=count, allowed=_filter(table, allowed))

    def measure(self, query: Vectors, experts: Rows) -> Found:
        """Return how close the experts at these positions are, even where others are closer."""
        table = self.table
        mask = np.zeros(len(table), np.bool_)
        mask[experts] = True
        return exactly(table, query, count=len(table), allowed=Allowed(table, mask))

    def encoded(self, prompt: str) -> Encoded:
        """Return the rows of a prompt; the last one is kept, as it is routed on many bases."""
        last = self._last  # another thread may replace it meanwhile
        if last is None or last[0] != prompt:
            last = self._last = (prompt, self.encoder.encode_deep([prompt]))
        return last[1]

    def check_integrity(self) -> None:
        """Check what the class promises about its state.

        Raises:
            StoreError: naming what does not hold.
        """
        for store in (self._rows, self._deep):
            _check(store)

    def _missing(self, experts: Texts) -> Texts:
        """Return the experts that have no vectors here."""
        digests = list(experts)
        lacking = (self.table.positions(digests) < 0) | (self.deep.positions(digests) < 0)
        return {digests[n]: experts[digests[n]] for n in np.flatnonzero(lacking)}

    def _encoded(self, experts: Texts) -> _Encoded:
        """Encode all texts in one go, and split the rows by expert."""
        texts = {digest: ExpertTexts.of(manifest) for digest, manifest in experts.items()}
        counts = np.array([len(each.all) for each in texts.values()], np.int64)
        encoded = self.encoder.encode_deep([t for each in texts.values() for t in each.all])
        parts = zip(parts_of(encoded.rows, counts), parts_of(encoded.deep, counts), strict=True)
        return {
            digest: (each.rows(rows), deep[: 1 + len(each.examples)])
            for (digest, each), (rows, deep) in zip(texts.items(), parts, strict=True)
        }

    def _build_graph(self, table: VectorTable) -> None:
        """Build the graph of a table that is on disk, without locking out writers meanwhile."""
        graph = build_graph(table) if len(table.rows) >= GRAPH_ROWS else None
        with self._rows.writing():
            if graph is None:
                remove_graph(self.folder)
            elif self._rows.read().generation == table.generation:
                save_graph(self.folder, graph, table)
                self._searching.take(table, graph)

    def _calibrate(self) -> None:
        """Ask examples again where the number of experts has changed much since the last time."""
        path = self.folder / CALIBRATION_FILE
        before = self._calibration or read_calibration(path, encoder=self.encoder.stamp)
        if before is not None and before.is_fresh(int(self.table.alive.sum())):
            self._calibration = before
        else:
            self._ask_again()

    def _ask_again(self) -> None:
        prior, experts = prior_of(self.encoder.name), int(self.table.alive.sum())
        found = ask_again(self.table, self.deep, self.search) if experts else NOTHING_ASKED
        self._calibration = calibrated(found, prior, experts=experts)
        path = self.folder / CALIBRATION_FILE
        write_calibration(path, self._calibration, encoder=self.encoder.stamp)


def _check(store: VectorStore) -> None:
    table, where = store.table, store.folder / JOURNAL_FILE
    for start in range(0, len(table.rows), 1 << 14):
        norms = np.linalg.norm(table.rows[start : start + (1 << 14)], axis=1)
        if not (np.isclose(norms, 1, atol=1e-3) | (norms == 0)).all():
            raise StoreError(f"{where}: a row has not unit length")
    if table.counts.sum() != len(table.rows):
        raise StoreError(f"{where}: rows without an expert")
    if table.encoder != store.encoder.digest():
        raise StoreError(f"{where}: made by another encoder")
    if table.generation and not store.check():
        raise StoreError(f"{where}: rows that are not those that were written")


def _batches(experts: Texts) -> Iterator[Texts]:
    rest = iter(experts.items())
    while batch := dict(islice(rest, BATCH)):
        yield batch


def _filter(table: VectorTable, allowed: Allowed | None) -> Allowed | None:
    """Return the filter for this table; none where all may be found."""
    if allowed is not None:
        fitting = allowed.of(table)
        return None if fitting.is_open else fitting
    return Allowed(table, table.alive) if table.dead_rows else None
