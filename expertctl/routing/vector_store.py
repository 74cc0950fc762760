"""`VectorStore`: vectors of installed experts in one folder, made by one encoder.

The files can be deleted at any time and are made again when the encoder changes. Several processes
may use one folder: readers take what was published last, writers take turns. Where nothing can be
written, vectors are kept in memory and `notes` says so.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from expertctl.digest import Digest
from expertctl.errors import ExpertError, StoreError
from expertctl.routing.encoder import Encoder
from expertctl.routing.vector_files import JOURNAL_FILE, VectorFiles
from expertctl.routing.vector_table import Rows, Vectors, VectorTable
from expertctl.store.disk import disk_errors

LOCK_FILE = "vectors.lock"
LOCK_SECONDS = 10.0
DEAD = 0.3
"""The share of rows that may belong to forgotten experts before all is written anew."""


class VectorStore:
    """The owner of the files of one folder; each table that it returns is an immutable value."""

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
        """Look whether another process has published something since."""
        if self._files.changed():
            self._table = self.read()

    def read(self) -> VectorTable:
        """Return the published table; empty where it is absent, damaged or of another encoder."""
        table = self._files.read()
        if table is None:
            return self._empty()
        if table.stamp == self.encoder.stamp:
            return table
        if table.encoder == self.encoder.digest():  # the same weights in another place
            return replace(table, stamp=self.encoder.stamp)
        return self._empty()

    def append(self, added: Mapping[Digest, Vectors]) -> None:
        """Publish these entries beside those on disk by now; keep them in memory if that fails."""
        try:
            with self.writing():
                self._table = self._appended(self.read(), added)
        except ExpertError as error:
            self.notes.append(f"the routing index was not saved: {error.message}")
            self._table = self.table.with_entries(added)

    def bury(self, digests: Iterable[Digest]) -> bool:
        """Forget entries; tell whether the rest was written anew because too much was dead.

        Raises:
            StoreError: when the folder cannot be written.
        """
        with self.writing():
            table = self.read()
            at = table.positions(list(digests))
            return self._buried(table, at[at >= 0])

    def replace(self, rows: Mapping[Digest, Vectors]) -> VectorTable:
        """Keep just these entries and return them.

        Raises:
            StoreError: when the folder cannot be written.
        """
        with self.writing():
            self._table = self._files.replace(self._empty().with_entries(rows))
        return self._table

    def check(self) -> bool:
        """Tell whether all rows are those that were written."""
        return self._files.check()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep other writers out.

        Raises:
            StoreError: when the folder cannot be written, or is locked for too long.
            DiskFullError: when there is no space left.
        """
        with disk_errors(self.folder / JOURNAL_FILE):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                with FileLock(self.folder / LOCK_FILE, timeout=LOCK_SECONDS, mode=0o600):
                    yield
            except Timeout as error:
                message = f"{self.folder / LOCK_FILE} has been held for too long"
                hint = "another process is writing vectors: try again when that has ended"
                raise StoreError(message, hint=hint) from error

    def _empty(self) -> VectorTable:
        return VectorTable.empty(
            encoder=self.encoder.digest(), stamp=self.encoder.stamp, dimensions=self.dimensions
        )

    def _appended(self, table: VectorTable, added: Mapping[Digest, Vectors]) -> VectorTable:
        new = table.lacking(added)
        if not table.generation:  # what was made so far is kept, if another encoder wrote meanwhile
            return self._files.replace(self.table.with_entries(new))
        self._files.restamp(table.stamp)
        return self._files.append(new) if new else table

    def _buried(self, table: VectorTable, positions: Rows) -> bool:
        """Bury entries; write all anew when too much is dead."""
        self._table = self._files.bury(positions) if len(positions) else table
        if self._table.dead_rows <= DEAD * len(self._table.rows):
            return False
        self._table = self._files.replace(self._table)
        return True
