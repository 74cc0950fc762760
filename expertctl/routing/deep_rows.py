"""`DeepRows`: what the head knows of installed experts, kept beside their vectors.

The deep rows of an expert's description and examples, in files that are made and mended as those of
the index are. Where nothing can be written they are kept in memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from expertctl.digest import Digest
from expertctl.errors import ExpertError, StoreError
from expertctl.routing.encoder import Encoder
from expertctl.routing.lesson import Lesson
from expertctl.routing.vector_files import JOURNAL_FILE, VectorFiles
from expertctl.routing.vector_table import Vectors, VectorTable
from expertctl.store.disk import disk_errors

FOLDER, LOCK_FILE = "deep", "vectors.lock"
LOCK_SECONDS = 10.0
MOST_ROWS = 128
"""How many texts of an expert are kept; of more, as many at even distances."""


class DeepRows:
    """The owner of the deep rows below one folder; an index teaches it."""

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        """Remember where and with what; nothing is read yet."""
        self.folder = folder / FOLDER
        self.encoder = encoder
        self.notes: list[str] = []
        self._files = VectorFiles(self.folder, dimensions=encoder.deep_dimensions)
        self._table: VectorTable | None = None

    @property
    def table(self) -> VectorTable:
        """The deep rows of now; a value, which later changes leave alone."""
        if self._table is None:
            self._table = self._read()
        return self._table

    def lacking(self, digests: Sequence[Digest]) -> set[Digest]:
        """Return which of these experts have no rows here."""
        at = self.table.positions(digests)
        return {digests[n] for n in np.flatnonzero(at < 0)}

    def learn(self, lessons: Sequence[Lesson]) -> None:
        """Keep the rows of experts; of those that are here already, the old ones."""
        rows = {lesson.digest: _thinned(lesson.deep) for lesson in lessons}
        try:
            with self._writing():
                self._table = self._appended(self._read(), rows)
        except ExpertError as error:
            self.notes.append(f"what the router learnt was not saved: {error.message}")
            self._table = self.table.with_entries(rows)

    def forget(self, digests: Iterable[Digest]) -> None:
        """Forget experts.

        Raises:
            StoreError: when the folder cannot be written.
        """
        with self._writing():
            table = self._read()
            at = table.positions(list(digests))
            if (at >= 0).any():
                self._table = self._files.bury(at[at >= 0])

    def restart(self) -> None:
        """Forget everything.

        Raises:
            StoreError: when the folder cannot be written.
        """
        with self._writing():
            self._table = self._files.replace(self._empty())

    def check_integrity(self) -> None:
        """Check what the class promises about its state.

        Raises:
            StoreError: naming what does not hold.
        """
        table = self.table
        if table.counts.sum() != len(table.rows) or (table.counts > MOST_ROWS).any():
            raise StoreError(f"{self.folder / JOURNAL_FILE}: rows without an expert")
        if table.encoder != self.encoder.digest():
            raise StoreError(f"{self.folder / JOURNAL_FILE}: made by another encoder")
        if table.generation and not self._files.check():
            raise StoreError(f"{self.folder / JOURNAL_FILE}: rows that are not those written")

    def _appended(self, table: VectorTable, rows: Mapping[Digest, Vectors]) -> VectorTable:
        new = table.lacking(rows)
        if not table.generation:
            return self._files.replace(table.with_entries(new))
        self._files.restamp(table.stamp)
        return self._files.append(new) if new else table

    def _read(self) -> VectorTable:
        """Return the published rows, none where they are absent, damaged or another encoder's."""
        table = self._files.read()
        if table is not None and table.stamp == self.encoder.stamp:
            return table
        if table is not None and table.encoder == self.encoder.digest():
            return replace(table, stamp=self.encoder.stamp)
        return self._empty()

    def _empty(self) -> VectorTable:
        return VectorTable.empty(
            encoder=self.encoder.digest(),
            stamp=self.encoder.stamp,
            dimensions=self.encoder.deep_dimensions,
        )

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


def _thinned(rows: Vectors) -> Vectors:
    if len(rows) <= MOST_ROWS:
        return rows
    return rows[np.linspace(0, len(rows) - 1, MOST_ROWS).astype(np.int64)]
