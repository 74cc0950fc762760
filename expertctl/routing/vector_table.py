"""The vectors of installed experts as one table, and the file that keeps it.

The file is safetensors with JSON metadata, never pickle, and may be deleted at any time. Whatever
is wrong with it makes it worthless, not dangerous: the table is made again from the manifests.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from expertctl.digest import Digest
from expertctl.durable import write_atomic
from expertctl.errors import DigestError
from expertctl.schema.shape import shape, shape_json
from expertctl.schema.strict_json import canonical

Vectors = npt.NDArray[np.float32]
"""Unit rows, or other float32 numbers that come of them."""

Rows = npt.NDArray[np.int64]
"""Indices of rows."""

FORMAT = "1"
_ROWS = "rows"


@dataclass(frozen=True, slots=True)
class VectorTable:
    """Unit rows, entry after entry; an entry is the texts of one expert.

    ``encoder`` is the digest of what made the rows, ``stamp`` how to recognise it cheaply.
    """

    encoder: Digest
    stamp: str
    entries: Mapping[Digest, int]  # content digest → number of rows, in the order of the rows
    rows: Vectors  # [sum of entries, dimensions]

    @classmethod
    def empty(cls, *, encoder: Digest, stamp: str, dimensions: int) -> Self:
        """Return a table without entries."""
        return cls(encoder, stamp, {}, np.zeros((0, dimensions), np.float32))

    @property
    def contents(self) -> Digest:
        """What the rows were made of: names a graph built over them."""
        entries = [[str(digest), count] for digest, count in self.entries.items()]
        return Digest.of(canonical([str(self.encoder), entries]))

    @property
    def starts(self) -> list[int]:
        """The first row of every entry."""
        return [0, *accumulate(self.entries.values())][:-1]

    def rows_of(self, digests: Iterable[Digest]) -> Rows:
        """Return which rows belong to the entries that are named and there."""
        wanted = set(digests)
        spans = zip(self.entries.items(), self.starts, strict=True)
        mine = [range(start, start + n) for (digest, n), start in spans if digest in wanted]
        return np.array([row for span in mine for row in span], np.int64)

    def with_entries(self, added: Mapping[Digest, Vectors]) -> "VectorTable":
        """Return a table with more entries; those that are there already stay as they are."""
        new = {digest: rows for digest, rows in added.items() if digest not in self.entries}
        entries = {**self.entries, **{digest: len(rows) for digest, rows in new.items()}}
        rows = np.concatenate([self.rows, *new.values()])
        return VectorTable(self.encoder, self.stamp, entries, rows)

    def only(self, kept: Iterable[Digest]) -> "VectorTable":
        """Return a table without the entries that are not named."""
        wanted = set(kept)
        entries = {digest: n for digest, n in self.entries.items() if digest in wanted}
        return VectorTable(self.encoder, self.stamp, entries, self.rows[self.rows_of(wanted)])


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The metadata of the file."""

    format: str
    encoder: str
    stamp: str
    entries: str


def write_table(path: Path, table: VectorTable) -> None:
    """Replace the file by this table, whole or not at all."""
    entries = [[str(digest), count] for digest, count in table.entries.items()]
    metadata = {
        "format": FORMAT,
        "encoder": str(table.encoder),
        "stamp": table.stamp,
        "entries": canonical(entries).decode(),
    }
    write_atomic(path, save({_ROWS: table.rows}, metadata=metadata), mode=0o600)


def read_table(path: Path, *, dimensions: int) -> VectorTable | None:
    """Read the file; ``None`` when it is absent or anything is wrong with it."""
    try:
        with safe_open(path, framework="numpy") as file:
            rows = file.get_tensor(_ROWS)
            metadata = shape(file.metadata(), _Metadata)
        counts = shape_json(metadata.entries, list[tuple[str, int]])
        entries = {Digest.parse(digest): count for digest, count in counts}
        table = VectorTable(Digest.parse(metadata.encoder), metadata.stamp, entries, rows)
    except (OSError, SafetensorError, msgspec.MsgspecError, DigestError):
        return None
    return table if metadata.format == FORMAT and _is_sound(table, dimensions) else None


def _is_sound(table: VectorTable, dimensions: int) -> bool:
    rows, counts = table.rows, table.entries.values()
    fits = rows.dtype == np.float32 and rows.ndim == 2 and rows.shape[1] == dimensions
    return (
        fits
        and all(count > 0 for count in counts)
        and sum(counts) == len(rows)
        and bool((np.abs(rows) <= 1 + 1e-3).all())  # NaN compares false
    )
