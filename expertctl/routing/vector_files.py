"""`VectorFiles`: the vectors of installed experts on the disk, beside ``index.db``.

``vectors.journal`` says which expert has which rows of ``vectors-….rows``, a matrix of float32
that is mapped, not read. Adding experts appends to both files, rows first, each flushed: it costs
only the new rows, and is complete or absent whenever the process is killed. Forgetting an expert
appends a record; its rows go when everything is written anew, to a file of another name that the
new journal names. Damage makes the files worthless, not dangerous: the vectors are made again from
the manifests.
"""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from expertctl.digest import Digest
from expertctl.durable import append, sync_folder, write_atomic
from expertctl.routing.vector_journal import (
    FORMAT,
    RECORD,
    Entries,
    Header,
    Journal,
    Records,
    added_records,
    buried_records,
    read_journal,
    replay,
    rows_check,
    sealed,
)
from expertctl.routing.vector_table import Rows, Vectors, VectorTable, parts_of

JOURNAL_FILE = "vectors.journal"
ROWS_GLOB = "vectors-*.rows"
CHECKED_BYTES = 8 << 20
"""Rows up to this size are read and checked when they are opened; larger files are mapped."""
_ATTEMPTS = 5

Signature = tuple[int, int, int]
"""The inode, size and time of the journal, which change when it does."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """What the files held when they had a signature."""

    signature: Signature | None
    journal: Journal
    table: VectorTable


class VectorFiles:
    """The files in one folder; the owner of this object holds a lock while it writes."""

    def __init__(self, folder: Path, *, dimensions: int) -> None:
        """Remember the folder and the length of a row; nothing is read yet."""
        self.folder = folder
        self.dimensions = dimensions
        self._opened: _Opened | None = None

    @property
    def journal(self) -> Path:
        """The journal, which is always replaced or appended to last."""
        return self.folder / JOURNAL_FILE

    def changed(self) -> bool:
        """Tell whether the files have changed since they were read last."""
        known = None if self._opened is None else self._opened.signature
        return _signature(self.journal) != known

    def read(self) -> VectorTable | None:
        """Return what was published last; ``None`` when it is absent or worthless."""
        if self._opened is None or self.changed():
            self._opened = self._open()
        return None if self._opened is None else self._opened.table

    def append(self, added: Mapping[Digest, Vectors]) -> VectorTable:
        """Add new entries to the table on disk, and return the whole table.

        Nothing is read again, so adding takes as long for a large table as for a small one.
        """
        opened = self._writable()
        table, at = opened.table, len(opened.table.rows)
        new = np.concatenate(list(added.values()))
        append(self.folder / table.generation, _bytes(new), at=at * self._row_bytes)
        journal = self._recorded(opened.journal, added_records(added, row=at))
        rows = self._more_rows(table, new)
        return self._keep(journal, table.joined(added, rows))

    def bury(self, positions: Rows) -> VectorTable:
        """Forget the entries at these positions of the table on disk."""
        opened = self._writable()
        journal = self._recorded(opened.journal, buried_records(opened.table.keys, positions))
        return self._keep(journal, opened.table.without(positions))

    def restamp(self, stamp: str) -> VectorTable:
        """Record a new stamp of the encoder, which may have moved; the rows stay."""
        opened = self._writable()
        if opened.journal.header.stamp == stamp:
            return opened.table
        header = msgspec.structs.replace(opened.journal.header, stamp=stamp)
        return self._begin(header, opened.journal.records, replace(opened.table, stamp=stamp))

    def replace(self, table: VectorTable) -> VectorTable:
        """Write all that is alive anew and return it; readers of the old files may go on."""
        whole = table.compact() if table.dead_rows else table
        name = f"vectors-{secrets.token_hex(8)}.rows"
        header = Header(FORMAT, str(table.encoder), table.stamp, self.dimensions, name)
        entries = dict(zip(whole.digests, parts_of(whole.rows, whole.counts), strict=True))
        with self._removed_unless_named(name):
            append(self.folder / name, _bytes(whole.rows), at=0)
            sync_folder(self.folder)
            published = self._begin(
                header, added_records(entries, row=0), replace(whole, generation=name)
            )
        self._remove_others(name)
        return published

    def check(self) -> bool:
        """Tell whether all rows are those that were written."""
        return not vector_damage(self.folder)

    def _open(self) -> _Opened | None:
        """Open the files; try again when a writer replaced them between journal and rows."""
        for _ in range(_ATTEMPTS):
            signature = _signature(self.journal)
            opened = self._opened_at(signature)
            if opened is not None or signature == _signature(self.journal):
                return opened
        return None

    def _opened_at(self, signature: Signature | None) -> _Opened | None:
        journal = read_journal(self.journal)
        if journal is None or journal.header.dimensions != self.dimensions:
            return None
        entries = replay(journal.records)
        rows = None if entries is None else self._rows(journal.header, entries)
        if entries is None or rows is None:
            return None
        table = VectorTable(
            encoder=Digest.parse(journal.header.encoder),
            stamp=journal.header.stamp,
            keys=entries.keys,
            counts=entries.counts,
            alive=entries.alive,
            rows=rows,
            generation=journal.header.rows,
        )
        return _Opened(signature, journal, table)

    def _writable(self) -> _Opened:
        """Return the open files, ready to append to: damaged ones are written anew first."""
        assert self._opened is not None, "writers read first"
        if self._opened.journal.damaged:
            self.replace(self._opened.table)
        return self._opened

    def _recorded(self, journal: Journal, records: Records) -> Journal:
        data = sealed(records, journal.header, first=len(journal.records))
        append(self.journal, data, at=journal.size)
        return journal.with_records(np.frombuffer(data, RECORD))

    def _begin(self, header: Header, records: Records, table: VectorTable) -> VectorTable:
        """Replace the journal by one with this header."""
        data = sealed(records, header, first=0)
        write_atomic(self.journal, header.to_bytes() + data, mode=0o600)
        size = len(header.to_bytes()) + len(data)
        journal = Journal(header, np.frombuffer(data, RECORD), size, damaged=False)
        return self._keep(journal, table)

    def _keep(self, journal: Journal, table: VectorTable) -> VectorTable:
        self._opened = _Opened(_signature(self.journal), journal, table)
        return table

    @property
    def _row_bytes(self) -> int:
        return self.dimensions * np.dtype(np.float32).itemsize

    def _rows(self, header: Header, entries: Entries) -> Vectors | None:
        """Open the rows: all in memory and checked when they are few, else mapped."""
        try:
            rows = self._mapped(header.rows, int(entries.counts.sum()))
        except (OSError, ValueError):  # absent, or shorter than the journal says
            return None
        if rows.nbytes > CHECKED_BYTES:
            return rows
        read = np.array(rows)
        return read if _is_sound(read, entries) else None

    def _mapped(self, name: str, count: int) -> Vectors:
        return _map(self.folder / Path(name).name, (count, self.dimensions))

    def _more_rows(self, table: VectorTable, new: Vectors) -> Vectors:
        """Return the rows of a table together with those that were appended to its file."""
        if table.rows.nbytes > CHECKED_BYTES:
            return self._mapped(table.generation, len(table.rows) + len(new))
        both: Vectors = np.concatenate([table.rows, new])
        return both

    @contextmanager
    def _removed_unless_named(self, name: str) -> Iterator[None]:
        """Remove rows after a write error (a full disk), unless the journal already names them."""
        try:
            yield
        except OSError:
            journal = read_journal(self.journal)
            if journal is None or journal.header.rows != name:
                with suppress(OSError):
                    (self.folder / name).unlink()
            raise

    def _remove_others(self, name: str) -> None:
        """Remove the rows of older journals; a later call removes those still in use."""
        for path in self.folder.glob(ROWS_GLOB):
            if path.name != name:
                with suppress(OSError):
                    path.unlink()


def vector_damage(folder: Path) -> str:
    """Say what is wrong with the vectors in a folder, every byte read; empty when nothing is."""
    for _ in range(_ATTEMPTS):
        before = _signature(folder / JOURNAL_FILE)
        damage = _damage(folder, read_journal(folder / JOURNAL_FILE)) if before else ""
        if before == _signature(folder / JOURNAL_FILE):  # no process wrote meanwhile
            break
    return damage


def _damage(folder: Path, journal: Journal | None) -> str:
    entries = None if journal is None else replay(journal.records)
    if journal is None or entries is None or journal.damaged:
        return "its records are damaged"
    try:
        shape = int(entries.counts.sum()), journal.header.dimensions
        rows = _map(folder / Path(journal.header.rows).name, shape)
    except (OSError, ValueError):
        return f"{journal.header.rows}, which it names, is absent or too short"
    return "" if _is_sound(rows, entries) else f"{journal.header.rows} was changed"


def _signature(journal: Path) -> Signature | None:
    try:
        status = journal.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _map(path: Path, shape: tuple[int, int]) -> Vectors:
    """Map a matrix; an `OSError` or `ValueError` when it is absent or too short."""
    if shape[0] == 0:
        return np.zeros(shape, np.float32)
    return np.memmap(path, np.float32, mode="r", shape=shape).view(np.ndarray)


def _is_sound(rows: Vectors, entries: Entries) -> bool:
    parts = parts_of(rows, entries.counts)
    return all(rows_check(part) == check for part, check in zip(parts, entries.checks, strict=True))


def _bytes(rows: Vectors) -> memoryview:
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
