"""`VectorFiles`: the vectors of installed experts on disk, next to ``index.db``.

``vectors.journal`` says which expert owns which rows of ``vectors-….rows``, a float32 matrix that
is mapped, not read. Adding experts appends to both files, rows first, each flushed: it costs only
the new rows, and is complete or absent whenever the process is killed. Removing an expert appends a
record; its rows disappear when everything is rewritten, to a file with another name that the new
journal contains. Damaged files are discarded: the vectors are rebuilt from the manifests.

The journal is one header line of JSON followed by records of 64 bytes, which are appended and never
changed. The checksum of a record covers its bytes, its place and the header, so an interrupted
append leaves no valid record. All records are read and checked by a few operations on one array.
"""

import json
import secrets
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from expertctl.errors import DigestError
from expertctl.files import sync_folder, write_at, write_atomic
from expertctl.reference import Digest
from expertctl.routing.vector_table import (
    Keys,
    Mask,
    Rows,
    Vectors,
    VectorTable,
    count_rows,
    split_rows,
)
from expertctl.schema.validation import decode_json

FORMAT = "2"
RECORD = np.dtype(
    [
        ("kind", "<u4"),
        ("count", "<u4"),  # the number of rows; 0 in a removal
        ("at", "<u8"),  # the first row; in a removal the position of the removed entry
        ("digest", "u1", (32,)),
        ("rows", "<u8"),  # the checksum of the rows; 0 in a removal
        ("check", "<u8"),
    ]
)
ADDED, REMOVED = 1, 2

_RECORD_WORDS = RECORD.itemsize // 8
_MAX_HEADER = 1 << 14
_HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Records = npt.NDArray[np.void]
"""An array of `RECORD`."""


class JournalHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line: what made the rows, and the name of their file."""

    format: str
    encoder: str
    stamp: str
    dimensions: int
    rows: str

    def to_bytes(self) -> bytes:
        """Return the line, padded to whole records."""
        line = json.dumps(msgspec.to_builtins(self)).encode()
        return line + b" " * (-(len(line) + 1) % RECORD.itemsize) + b"\n"


@dataclass(frozen=True, slots=True)
class VectorJournal:
    """The header and the records up to the first invalid one.

    ``size`` is the offset of their end in bytes. A journal is ``damaged`` if valid records follow
    later, so that the cause was not an interrupted append.
    """

    header: JournalHeader
    records: Records
    size: int
    damaged: bool

    def with_records(self, added: Records) -> "VectorJournal":
        """Return the journal with the appended records."""
        records = np.concatenate([self.records, added])
        return replace(self, records=records, size=self.size + added.nbytes)


@dataclass(frozen=True, slots=True)
class JournalEntries:
    """The entries that result from the records."""

    keys: Keys
    counts: Rows
    alive: Mask
    checks: npt.NDArray[np.uint64]  # checksums of the rows of each entry


def read_journal(path: Path) -> VectorJournal | None:
    """Read a journal; ``None`` when it is absent or its header is invalid."""
    try:
        data = path.read_bytes()
        line = data[: data.index(b"\n", 0, _MAX_HEADER) + 1]
        header = decode_json(line, JournalHeader)
        Digest.parse(header.encoder)
    except (OSError, ValueError, msgspec.MsgspecError, DigestError):
        return None
    if header.format != FORMAT or header.to_bytes() != line:
        return None
    count = (len(data) - len(line)) // RECORD.itemsize
    records = np.frombuffer(data, RECORD, count=count, offset=len(line))
    whole = records["check"] == _checksum_records(records, line, first=0)
    sound = count if whole.all() else int(whole.argmin())
    size = len(line) + sound * RECORD.itemsize
    return VectorJournal(header, records[:sound], size, damaged=bool(whole[sound:].any()))


def replay(records: Records) -> JournalEntries | None:
    """Return the entries that result from records; ``None`` when they contradict each other."""
    is_added = records["kind"] == ADDED
    added, buried = records[is_added], records[~is_added]
    counts = added["count"].astype(np.int64)
    at = buried["at"].astype(np.int64)
    known = np.cumsum(is_added)[~is_added]  # how many entries preceded each removal
    sound = (
        (buried["kind"] == REMOVED).all()
        and (counts > 0).all()
        and (added["at"] == np.cumsum(counts) - counts).all()
        and ((at >= 0) & (at < known)).all()
    )
    if not sound or (added["digest"][at] != buried["digest"]).any():
        return None
    alive = np.ones(len(added), np.bool_)
    alive[at] = False
    return JournalEntries(np.ascontiguousarray(added["digest"]), counts, alive, added["rows"])


def build_added_records(added: Mapping[Digest, Vectors], *, row: int) -> Records:
    """Return the records of new entries whose first row is ``row``."""
    records = np.zeros(len(added), RECORD)
    counts = count_rows(added)
    records["kind"] = ADDED
    records["count"] = counts
    records["at"] = row + np.cumsum(counts) - counts
    records["rows"] = [checksum_rows(rows) for rows in added.values()]
    for record, digest in zip(records, added, strict=True):
        record["digest"] = np.frombuffer(bytes.fromhex(digest.hex), np.uint8)
    return records


def build_removed_records(keys: Keys, positions: Rows) -> Records:
    """Return the records that remove the entries at these positions."""
    records = np.zeros(len(positions), RECORD)
    records["kind"] = REMOVED
    records["at"] = positions
    records["digest"] = keys[positions]
    return records


def seal_records(records: Records, header: JournalHeader, *, first: int) -> bytes:
    """Return records as bytes with checksums, the first of them being record number ``first``."""
    checked = records.copy()
    checked["check"] = _checksum_records(checked, header.to_bytes(), first=first)
    return checked.tobytes()


def checksum_rows(rows: Vectors) -> int:
    """Return the checksum (CRC-32) of the rows of an entry."""
    return zlib.crc32(np.ascontiguousarray(rows).tobytes())


def _checksum_records(records: Records, header: bytes, *, first: int) -> npt.NDArray[np.uint64]:
    """Hash all words of each record but the last with its place and the header."""
    words = np.ascontiguousarray(records).view(np.uint64).reshape(-1, _RECORD_WORDS)
    places = np.arange(first, first + len(records), dtype=np.uint64)
    mixed = (places + np.uint64(1)) * _HASH_MULTIPLIER ^ np.uint64(zlib.crc32(header))
    for word in words[:, :-1].T:
        mixed = (mixed ^ word) * _HASH_MULTIPLIER
        mixed ^= mixed >> np.uint64(29)
    return mixed


JOURNAL_FILE = "vectors.journal"
ROWS_GLOB = "vectors-*.rows"
CHECKED_BYTES = 8 << 20
"""Rows up to this size are read and checked when opened; larger files are only mapped."""
_ATTEMPTS = 5

FileSignature = tuple[int, int, int]
"""Inode, size and modification time (ns) of the journal."""


@dataclass(frozen=True, slots=True)
class _OpenVectors:
    signature: FileSignature | None
    journal: VectorJournal
    table: VectorTable


class VectorFiles:
    """The files in one folder; the owner must hold a lock while it writes."""

    def __init__(self, folder: Path, *, dimensions: int) -> None:
        """Remember the folder and the length of a row; nothing is read yet."""
        self.folder = folder
        self.dimensions = dimensions
        self._opened: _OpenVectors | None = None

    @property
    def journal(self) -> Path:
        """The path of the journal, which is always written last."""
        return self.folder / JOURNAL_FILE

    def has_changed(self) -> bool:
        """Tell whether the files have changed since they were last read."""
        known = None if self._opened is None else self._opened.signature
        return _read_signature(self.journal) != known

    def read(self) -> VectorTable | None:
        """Return the published table; ``None`` when it is absent or damaged."""
        if self._opened is None or self.has_changed():
            self._opened = self._open()
        return None if self._opened is None else self._opened.table

    def append(self, added: Mapping[Digest, Vectors]) -> VectorTable:
        """Append entries to the table on disk, and return the whole table.

        Nothing is read again, so the time does not depend on the size of the table.
        """
        opened = self._open_for_writing()
        table, at = opened.table, len(opened.table.rows)
        new = np.concatenate(list(added.values()))
        write_at(self.folder / table.generation, _as_bytes(new), offset=at * self._row_bytes)
        journal = self._append_records(opened.journal, build_added_records(added, row=at))
        rows = self._extend_rows(table, new)
        return self._remember(journal, table.append_entries(added, rows))

    def remove(self, positions: Rows) -> VectorTable:
        """Remove the entries at these positions of the table on disk."""
        opened = self._open_for_writing()
        journal = self._append_records(
            opened.journal, build_removed_records(opened.table.keys, positions)
        )
        return self._remember(journal, opened.table.mark_dead(positions))

    def update_stamp(self, stamp: str) -> VectorTable:
        """Record a new stamp of the encoder, which may have moved; rows are kept."""
        opened = self._open_for_writing()
        if opened.journal.header.stamp == stamp:
            return opened.table
        header = msgspec.structs.replace(opened.journal.header, stamp=stamp)
        return self._replace_journal(
            header, opened.journal.records, replace(opened.table, stamp=stamp)
        )

    def replace(self, table: VectorTable) -> VectorTable:
        """Write all live entries to new files; readers of the old files are not disturbed."""
        whole = table.compact() if table.dead_rows else table
        name = f"vectors-{secrets.token_hex(8)}.rows"
        header = JournalHeader(FORMAT, str(table.encoder), table.stamp, self.dimensions, name)
        entries = dict(zip(whole.digests, split_rows(whole.rows, whole.counts), strict=True))
        with self._remove_rows_on_error(name):
            write_at(self.folder / name, _as_bytes(whole.rows), offset=0)
            sync_folder(self.folder)
            published = self._replace_journal(
                header, build_added_records(entries, row=0), replace(whole, generation=name)
            )
        self._remove_others(name)
        return published

    def _open(self) -> _OpenVectors | None:
        """Open the files, again if a writer replaced them between journal and rows."""
        for _ in range(_ATTEMPTS):
            signature = _read_signature(self.journal)
            opened = self._open_at(signature)
            if opened is not None or signature == _read_signature(self.journal):
                return opened
        return None

    def _open_at(self, signature: FileSignature | None) -> _OpenVectors | None:
        journal = read_journal(self.journal)
        if journal is None or journal.header.dimensions != self.dimensions:
            return None
        entries = replay(journal.records)
        rows = None if entries is None else self._open_rows(journal.header, entries)
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
        return _OpenVectors(signature, journal, table)

    def _open_for_writing(self) -> _OpenVectors:
        """Return the open files, ready to append to: damaged ones are rewritten first."""
        assert self._opened is not None, "writers read first"
        if self._opened.journal.damaged:
            self.replace(self._opened.table)
        return self._opened

    def _append_records(self, journal: VectorJournal, records: Records) -> VectorJournal:
        data = seal_records(records, journal.header, first=len(journal.records))
        write_at(self.journal, data, offset=journal.size)
        return journal.with_records(np.frombuffer(data, RECORD))

    def _replace_journal(
        self, header: JournalHeader, records: Records, table: VectorTable
    ) -> VectorTable:
        data = seal_records(records, header, first=0)
        write_atomic(self.journal, header.to_bytes() + data, mode=0o600)
        size = len(header.to_bytes()) + len(data)
        journal = VectorJournal(header, np.frombuffer(data, RECORD), size, damaged=False)
        return self._remember(journal, table)

    def _remember(self, journal: VectorJournal, table: VectorTable) -> VectorTable:
        self._opened = _OpenVectors(_read_signature(self.journal), journal, table)
        return table

    @property
    def _row_bytes(self) -> int:
        return self.dimensions * np.dtype(np.float32).itemsize

    def _open_rows(self, header: JournalHeader, entries: JournalEntries) -> Vectors | None:
        """Open the rows: read and checked if they are few, else mapped."""
        try:
            rows = self._map_rows(header.rows, int(entries.counts.sum()))
        except (OSError, ValueError):  # absent, or shorter than the journal says
            return None
        if rows.nbytes > CHECKED_BYTES:
            return rows
        read = np.array(rows)
        return read if _is_sound(read, entries) else None

    def _map_rows(self, name: str, count: int) -> Vectors:
        return _map_matrix(self.folder / Path(name).name, (count, self.dimensions))

    def _extend_rows(self, table: VectorTable, new: Vectors) -> Vectors:
        """Return the rows of a table followed by those just appended to its file."""
        if table.rows.nbytes > CHECKED_BYTES:
            return self._map_rows(table.generation, len(table.rows) + len(new))
        both: Vectors = np.concatenate([table.rows, new])
        return both

    @contextmanager
    def _remove_rows_on_error(self, name: str) -> Iterator[None]:
        """Remove rows after a write error (a full disk), unless the journal names their file."""
        try:
            yield
        except OSError:
            journal = read_journal(self.journal)
            if journal is None or journal.header.rows != name:
                with suppress(OSError):
                    (self.folder / name).unlink()
            raise

    def _remove_others(self, name: str) -> None:
        """Remove the rows of older journals; those still in use are removed by a later call."""
        for path in self.folder.glob(ROWS_GLOB):
            if path.name != name:
                with suppress(OSError):
                    path.unlink()


def describe_vector_damage(folder: Path) -> str:
    """Return what is wrong with the vectors in a folder, after reading all; empty if nothing."""
    for _ in range(_ATTEMPTS):
        before = _read_signature(folder / JOURNAL_FILE)
        damage = _describe_damage(folder, read_journal(folder / JOURNAL_FILE)) if before else ""
        if before == _read_signature(folder / JOURNAL_FILE):  # no process wrote meanwhile
            break
    return damage


def _describe_damage(folder: Path, journal: VectorJournal | None) -> str:
    entries = None if journal is None else replay(journal.records)
    if journal is None or entries is None or journal.damaged:
        return "its records are damaged"
    try:
        shape = int(entries.counts.sum()), journal.header.dimensions
        rows = _map_matrix(folder / Path(journal.header.rows).name, shape)
    except (OSError, ValueError):
        return f"{journal.header.rows}, which it names, is absent or too short"
    return "" if _is_sound(rows, entries) else f"{journal.header.rows} was changed"


def _read_signature(journal: Path) -> FileSignature | None:
    try:
        status = journal.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _map_matrix(path: Path, shape: tuple[int, int]) -> Vectors:
    """Map a matrix; raises `OSError` or `ValueError` when the file is absent or too short."""
    if shape[0] == 0:
        return np.zeros(shape, np.float32)
    return np.memmap(path, np.float32, mode="r", shape=shape).view(np.ndarray)


def _is_sound(rows: Vectors, entries: JournalEntries) -> bool:
    parts = split_rows(rows, entries.counts)
    return all(
        checksum_rows(part) == check for part, check in zip(parts, entries.checks, strict=True)
    )


def _as_bytes(rows: Vectors) -> memoryview:
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
