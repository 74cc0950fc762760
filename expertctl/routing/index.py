"""`RoutingIndex`: the vectors of the installed experts, stored next to ``index.db``.

The distance of an expert to a prompt is that of its closest vector (`ExpertTexts`); the rerank rows
of its description and examples come from the same pass of the encoder. Adding an expert costs only
the encoding of its own texts.

A `VectorStore` is one folder of `VectorFiles` made by one encoder. The files may be deleted at any
time and are rebuilt when the encoder changes. Several processes may use a folder: readers see the
last published state, writers take turns. If nothing can be written, vectors stay in memory and
`notes` says so.
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
from expertctl.routing.background import compute_background_digest, load_background
from expertctl.routing.calibration import (
    CALIBRATION_FILE,
    NO_EVIDENCE,
    PRIORS,
    Calibration,
    collect_evidence,
    fit_calibration,
    read_calibration,
    write_calibration,
)
from expertctl.routing.encoder import Encoder, ExpertTexts
from expertctl.routing.vector_files import JOURNAL_FILE, VectorFiles, describe_vector_damage
from expertctl.routing.vector_search import (
    GRAPH_ROWS,
    VectorSearcher,
    build_graph,
    find_nearest_exact,
    remove_graph,
    save_graph,
)
from expertctl.routing.vector_table import (
    EncodedTexts,
    Rows,
    SearchFilter,
    SearchHits,
    Vectors,
    VectorTable,
    split_rows,
)
from expertctl.schema.manifest import Manifest
from expertctl.store.disk import disk_errors

LOCK_FILE = "vectors.lock"
LOCK_SECONDS = 10.0
MAX_DEAD_SHARE = 0.3
"""The share of rows of removed experts above which all files are rewritten."""


class VectorStore:
    """Owns the files of one folder; each table it returns is immutable."""

    def __init__(self, folder: Path, encoder: Encoder, *, dimensions: int) -> None:
        """Remember the folder and the encoder; nothing is read yet."""
        self.folder = folder
        self.encoder = encoder
        self.dimensions = dimensions
        self.notes: list[str] = []
        self._files = VectorFiles(folder, dimensions=dimensions)
        self._table: VectorTable | None = None

    @property
    def table(self) -> VectorTable:
        """The current vectors."""
        if self._table is None:
            self._table = self.read()
        return self._table

    def refresh(self) -> None:
        """Read again if another process has published a change."""
        if self._files.has_changed():
            self._table = self.read()

    def read(self) -> VectorTable:
        """Return the published table; empty if it is absent, damaged or of another encoder."""
        table = self._files.read()
        if table is None:
            return self._build_empty()
        if table.stamp == self.encoder.stamp:
            return table
        if table.encoder == self.encoder.digest():  # the same weights in another place
            return replace(table, stamp=self.encoder.stamp)
        return self._build_empty()

    def append(self, added: Mapping[Digest, Vectors]) -> None:
        """Publish more entries after those now on disk; keep them in memory if that fails."""
        try:
            with self.lock_for_writing():
                self._table = self._append_to(self.read(), added)
        except ExpertError as error:
            self.notes.append(f"the routing index was not saved: {error.message}")
            self._table = self.table.add_entries(added)

    def remove(self, digests: Iterable[Digest]) -> bool:
        """Remove entries; tell whether the rest was rewritten because too many rows were dead.

        Raises as `lock_for_writing`.
        """
        with self.lock_for_writing():
            table = self.read()
            at = table.find_positions(list(digests))
            return self._remove_entries(table, at[at >= 0])

    def replace(self, rows: Mapping[Digest, Vectors]) -> VectorTable:
        """Replace all entries and return the new table; raises as `lock_for_writing`."""
        with self.lock_for_writing():
            self._table = self._publish(self._build_empty().add_entries(rows))
        return self._table

    @contextmanager
    def lock_for_writing(self) -> Iterator[None]:
        """Lock out other writers.

        Raises:
            StoreError: when the folder cannot be written, or stays locked for too long.
            DiskFullError: when there is no space left.
        """
        with disk_errors(self.folder / JOURNAL_FILE):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                with FileLock(self.folder / LOCK_FILE, timeout=LOCK_SECONDS, mode=0o600):
                    yield
            except Timeout as error:
                message = f"{self.folder / LOCK_FILE} has been locked for too long"
                hint = "another process is writing vectors: try again when it has finished"
                raise StoreError(message, hint=hint) from error

    def _build_empty(self) -> VectorTable:
        return VectorTable.empty(stamp=self.encoder.stamp, dimensions=self.dimensions)

    def _publish(self, table: VectorTable) -> VectorTable:
        """Replace what is published; reads the weights of the encoder if that was not necessary."""
        if table.encoder is None:
            table = replace(table, encoder=self.encoder.digest())
        return self._files.replace(table)

    def _append_to(self, table: VectorTable, added: Mapping[Digest, Vectors]) -> VectorTable:
        new = table.find_missing(added)
        if not table.generation:  # keep our entries if another encoder wrote meanwhile
            return self._publish(self.table.add_entries(new))
        self._files.update_stamp(table.stamp)
        return self._files.append(new) if new else table

    def _remove_entries(self, table: VectorTable, positions: Rows) -> bool:
        """Mark entries as removed; rewrite everything when too many rows are dead."""
        self._table = self._files.remove(positions) if len(positions) else table
        if self._table.dead_rows <= MAX_DEAD_SHARE * len(self._table.rows):
            return False
        self._table = self._publish(self._table)
        return True


MAX_HITS = 64
"""The default number of experts that a search returns."""
BATCH = 64
"""How many experts are encoded and published at a time."""
RERANK_FOLDER = "deep"

ManifestsByDigest = Mapping[Digest, Manifest]
"""Content digest → manifest."""

_EncodedRows = Mapping[Digest, tuple[Vectors, Vectors]]
"""Content digest → rows and rerank rows."""


@dataclass(frozen=True, slots=True)
class Similarity:
    """How close an expert is to a prompt, and which of its rows is closest."""

    cosine: float
    text: int  # see `encoder.describe_row`


class RoutingIndex:
    """Owns the vectors in one folder."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        """Remember the folder and the encoder; nothing is read yet."""
        self.folder = folder
        self.encoder = encoder
        self._rows = VectorStore(folder, encoder, dimensions=encoder.dimensions)
        self._deep = VectorStore(
            folder / RERANK_FOLDER, encoder, dimensions=encoder.rerank_dimensions
        )
        self._searching = VectorSearcher(folder)
        self._calibration: Calibration | None = None
        self._last: tuple[str, EncodedTexts] | None = None
        self._background: EncodedTexts | None = None
        self._has_background = True

    def add(self, experts: ManifestsByDigest) -> None:
        """Encode the experts that have no vectors yet, and publish them if possible."""
        if not self._find_missing(experts):
            return
        self.refresh()
        for batch in _iter_batches(self._find_missing(experts)):
            encoded = self._encode_experts(batch)
            self._deep.append({digest: deep for digest, (_, deep) in encoded.items()})
            self._rows.append({digest: rows for digest, (rows, _) in encoded.items()})
        self._calibrate()

    def refresh(self) -> None:
        """Read again if another process has published vectors."""
        before = self.revision
        self._rows.refresh()
        self._deep.refresh()
        if self.revision != before:
            self._calibrate()

    def count_missing(self, experts: ManifestsByDigest) -> int:
        """Return how many of these experts `add` would encode, as of the last read."""
        return len(self._find_missing(experts))

    def remove(self, digests: Iterable[Digest]) -> None:
        """Remove experts; raises as `VectorStore.lock_for_writing`."""
        gone = list(digests)
        if not len(self.find_positions(gone)):
            return
        if self._rows.remove(gone):
            remove_graph(self.folder)
        self._deep.remove(gone)
        self._calibrate()

    def rebuild(self, experts: ManifestsByDigest) -> None:
        """Make all vectors again, and the graph if it pays.

        Raises as `VectorStore.lock_for_writing`.
        """
        parts = (self._encode_experts(batch) for batch in _iter_batches(experts))
        encoded = dict(chain.from_iterable(part.items() for part in parts))
        self._deep.replace({digest: deep for digest, (_, deep) in encoded.items()})
        self._build_graph(self._rows.replace({d: rows for d, (rows, _) in encoded.items()}))
        self._recalibrate()

    def load_search_graph(self) -> None:
        """Load the graph, if any, which pays only in a process that searches often."""
        self._searching.load(self.table)

    @property
    def notes(self) -> list[str]:
        """Notes for the user about the files."""
        return [*dict.fromkeys([*self._rows.notes, *self._deep.notes])]

    @property
    def rerank_table(self) -> VectorTable:
        """The rows that the reranker reads; immutable."""
        return self._deep.table

    @property
    def calibration(self) -> Calibration:
        """The calibration of the reranker's evidence."""
        if self._calibration is None:
            self._calibrate()
        assert self._calibration is not None, "`_calibrate` sets it"
        return self._calibration

    @property
    def background(self) -> EncodedTexts | None:
        """The rows of texts that are for no expert; None if the encoder does not use them."""
        if self._background is None and self._has_background:
            self._background = load_background(self.folder, self.encoder)
            self._has_background = self._background is not None
        return self._background

    @property
    def table(self) -> VectorTable:
        """The current vectors; immutable."""
        return self._rows.table

    @property
    def revision(self) -> str:
        """A text that changes whenever positions get another meaning or their number changes."""
        table = self.table
        return f"{table.generation}:{len(table)}:{table.dead_rows}"

    def find_positions(self, digests: Iterable[Digest]) -> Rows:
        """Return the positions of experts, without those that are not in the index."""
        found = self.table.find_positions(list(digests))
        return found[found >= 0]

    def search(
        self, query: Vectors, *, count: int = MAX_HITS, allowed: SearchFilter | None = None
    ) -> SearchHits:
        """Return at most ``count`` allowed experts, those closest to a unit vector.

        With a graph they are the owners of the ``count`` closest rows.
        """
        table = self.table
        return self._searching.search(
            table, query, count=count, allowed=_refresh_filter(table, allowed)
        )

    def measure_similarity(self, query: Vectors, experts: Rows) -> SearchHits:
        """Return the similarity of the experts at these positions, however far they are."""
        table = self.table
        mask = np.zeros(len(table), np.bool_)
        mask[experts] = True
        return find_nearest_exact(table, query, count=len(table), allowed=SearchFilter(table, mask))

    def encode_prompt(self, prompt: str) -> EncodedTexts:
        """Encode a prompt; the last result is cached, as one prompt is routed on many bases."""
        last = self._last  # another thread may replace it meanwhile
        if last is None or last[0] != prompt:
            last = self._last = (prompt, self.encoder.encode_for_rerank([prompt]))
        return last[1]

    def check_integrity(self) -> None:
        """Check the invariants of both stores.

        Raises:
            StoreError: naming the first violation.
        """
        for store in (self._rows, self._deep):
            _check_store(store)

    def _find_missing(self, experts: ManifestsByDigest) -> ManifestsByDigest:
        """Return the experts that have no vectors here."""
        digests = list(experts)
        lacking = (self.table.find_positions(digests) < 0) | (
            self.rerank_table.find_positions(digests) < 0
        )
        return {digests[n]: experts[digests[n]] for n in np.flatnonzero(lacking)}

    def _encode_experts(self, experts: ManifestsByDigest) -> _EncodedRows:
        """Encode all texts in one batch, and split the rows by expert."""
        texts = {
            digest: ExpertTexts.from_manifest(manifest) for digest, manifest in experts.items()
        }
        counts = np.array([len(each.all) for each in texts.values()], np.int64)
        encoded = self.encoder.encode_for_rerank([t for each in texts.values() for t in each.all])
        parts = zip(
            split_rows(encoded.rows, counts), split_rows(encoded.rerank_rows, counts), strict=True
        )
        return {
            digest: (each.build_rows(rows), deep[: 1 + len(each.examples)])
            for (digest, each), (rows, deep) in zip(texts.items(), parts, strict=True)
        }

    def _build_graph(self, table: VectorTable) -> None:
        """Build the graph of a published table, without blocking writers meanwhile."""
        graph = build_graph(table) if len(table.rows) >= GRAPH_ROWS else None
        with self._rows.lock_for_writing():
            if graph is None:
                remove_graph(self.folder)
            elif self._rows.read().generation == table.generation:
                save_graph(self.folder, graph, table)
                self._searching.use_graph(table, graph)

    def _calibrate(self) -> None:
        """Recalibrate if the number of experts has changed much since the last calibration."""
        path = self.folder / CALIBRATION_FILE
        before = self._calibration or read_calibration(path, encoder=self.calibration_key)
        if before is not None and before.is_fresh(int(self.table.alive.sum())):
            self._calibration = before
        else:
            self._recalibrate()

    @property
    def calibration_key(self) -> str:
        """What a stored calibration depends on besides the experts."""
        return f"{self.encoder.stamp} {compute_background_digest()}"

    def _recalibrate(self) -> None:
        prior, experts = PRIORS[self.encoder.name], int(self.table.alive.sum())
        found = (
            collect_evidence(self.table, self.rerank_table, self.search, background=self.background)
            if experts
            else NO_EVIDENCE
        )
        self._calibration = fit_calibration(found, prior, experts=experts)
        path = self.folder / CALIBRATION_FILE
        write_calibration(path, self._calibration, encoder=self.calibration_key)


def _check_store(store: VectorStore) -> None:
    table, where = store.table, store.folder / JOURNAL_FILE
    for start in range(0, len(table.rows), 1 << 14):
        norms = np.linalg.norm(table.rows[start : start + (1 << 14)], axis=1)
        if not (np.isclose(norms, 1, atol=1e-3) | (norms == 0)).all():
            raise StoreError(f"{where}: a row is not of unit length")
    if table.counts.sum() != len(table.rows):
        raise StoreError(f"{where}: rows without an expert")
    if table.generation and table.encoder != store.encoder.digest():
        raise StoreError(f"{where}: made by another encoder")
    if table.generation and describe_vector_damage(store.folder):
        raise StoreError(f"{where}: rows were changed after they were written")


def _iter_batches(experts: ManifestsByDigest) -> Iterator[ManifestsByDigest]:
    rest = iter(experts.items())
    while batch := dict(islice(rest, BATCH)):
        yield batch


def _refresh_filter(table: VectorTable, allowed: SearchFilter | None) -> SearchFilter | None:
    """Return the filter for this table; None if it admits everything."""
    if allowed is not None:
        fitting = allowed.extend_to(table)
        return None if fitting.admits_all else fitting
    return SearchFilter(table, table.alive) if table.dead_rows else None
