"""`VectorTable`: the vectors of experts as one matrix, and search results on it.

An entry keeps its position: new ones are appended, and a removed one stays in place, dead, until
everything is rewritten. So data stored per position is valid as long as `VectorTable.generation` is
the same.

A text has a row, whose cosines measure how close it is to another text, and a rerank row, in which
the reranker sees more of what distinguishes experts. Some encoders use the same row for both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from expertctl.reference import Digest

Vectors = npt.NDArray[np.float32]
"""Unit rows, or other float32 numbers derived from them."""

Rows = npt.NDArray[np.int64]
"""Row numbers, or positions of experts."""

Mask = npt.NDArray[np.bool_]
"""One flag per position."""

Keys = npt.NDArray[np.uint8]
"""Content digests as bytes, [entries, 32]."""

_MAX_SCANNED_KEYS = 16


@dataclass(frozen=True, eq=False)
class VectorTable:
    """Entries and their rows; an entry is the texts of one expert. Immutable.

    ``encoder`` is the digest of what made the rows, and ``stamp`` identifies it cheaply. A table
    that is in no file has no ``generation``; until it is published its ``encoder`` may be unknown.
    """

    encoder: Digest | None
    stamp: str
    keys: Keys
    counts: Rows  # the number of rows of each entry
    alive: Mask
    rows: Vectors  # [sum of counts, dimensions]
    generation: str = ""

    @classmethod
    def empty(cls, *, stamp: str, dimensions: int, encoder: Digest | None = None) -> Self:
        """Return a table without entries."""
        none = np.zeros(0, np.int64)
        rows = np.zeros((0, dimensions), np.float32)
        return cls(encoder, stamp, _encode_keys([]), none, none.astype(np.bool_), rows)

    def __len__(self) -> int:
        """Return the number of positions, dead ones included."""
        return len(self.counts)

    @cached_property
    def starts(self) -> Rows:
        """The first row of every entry."""
        starts: Rows = np.cumsum(self.counts) - self.counts
        return starts

    @cached_property
    def owners(self) -> npt.NDArray[np.int32]:
        """The position that owns each row."""
        return np.repeat(np.arange(len(self), dtype=np.int32), self.counts)

    @cached_property
    def dead_rows(self) -> int:
        """The number of rows of dead entries."""
        return int(self.counts[~self.alive].sum())

    @property
    def digests(self) -> list[Digest]:
        """The content digests of the live entries, in order."""
        return [self.digest_at(int(position)) for position in np.flatnonzero(self.alive)]

    def digest_at(self, position: int) -> Digest:
        """Return the content digest at a position."""
        return Digest(self.keys[position].tobytes().hex())

    def find_positions(self, digests: Sequence[Digest]) -> Rows:
        """Return the position of each digest, -1 if it is not in the table."""
        wanted = _encode_keys(digests)
        heads = _key_prefixes(wanted)
        found = self._scan(heads) if len(digests) <= _MAX_SCANNED_KEYS else self._bisect(heads)
        sure = (self.keys[found] == wanted).all(axis=1) if len(self) else np.zeros(0, np.bool_)
        return np.where((found >= 0) & sure, found, -1) if len(self) else found

    def select_rows(self, positions: Rows) -> Rows:
        """Return the rows of these positions, entry after entry."""
        return expand_spans(self.starts[positions], self.counts[positions])

    def add_entries(self, added: Mapping[Digest, Vectors]) -> "VectorTable":
        """Return a table in memory with more entries; existing live ones are kept."""
        new = self.find_missing(added)
        rows = np.concatenate([self.rows, *new.values()])
        return replace(self.append_entries(new, rows), generation="")

    def append_entries(self, new: Mapping[Digest, Vectors], rows: Vectors) -> "VectorTable":
        """Return the table with new entries; ``rows`` are all rows, the new ones last."""
        return replace(
            self,
            keys=np.concatenate([self.keys, _encode_keys(new)]),
            counts=np.concatenate([self.counts, count_rows(new)]),
            alive=np.concatenate([self.alive, np.ones(len(new), np.bool_)]),
            rows=rows,
        )

    def find_missing(self, added: Mapping[Digest, Vectors]) -> dict[Digest, Vectors]:
        """Return those of ``added`` that are not in the table."""
        at = self.find_positions(list(added))
        return {d: rows for (d, rows), there in zip(added.items(), at, strict=True) if there < 0}

    def mark_dead(self, positions: Rows) -> "VectorTable":
        """Return the table with these entries marked as dead."""
        alive = self.alive.copy()
        alive[positions] = False
        return replace(self, alive=alive)

    def compact(self) -> "VectorTable":
        """Return a table in memory with only the live entries."""
        kept = np.flatnonzero(self.alive)
        return replace(
            self,
            keys=self.keys[kept],
            counts=self.counts[kept],
            alive=self.alive[kept],
            rows=self.rows[self.select_rows(kept)],
            generation="",
        )

    def _scan(self, heads: npt.NDArray[np.uint64]) -> Rows:
        """Find a few digests by scanning all keys; -1 if no key has the same prefix."""
        mine = [np.flatnonzero((self._prefixes == head) & self.alive) for head in heads]
        return np.array([at[-1] if len(at) else -1 for at in mine], np.int64)

    def _bisect(self, heads: npt.NDArray[np.uint64]) -> Rows:
        """Find many digests by binary search in the live entries."""
        order = self._sorted_positions
        at = np.searchsorted(self._prefixes[order], heads)
        inside = at < len(order)
        found = np.full(len(heads), -1, np.int64)
        found[inside] = order[at[inside]]
        return found

    @cached_property
    def _prefixes(self) -> npt.NDArray[np.uint64]:
        return _key_prefixes(self.keys)

    @cached_property
    def _sorted_positions(self) -> Rows:
        alive = np.flatnonzero(self.alive)
        return alive[np.argsort(self._prefixes[alive], kind="stable")]


def count_rows(entries: Mapping[Digest, Vectors]) -> Rows:
    """Return the number of rows of each entry."""
    return np.array([len(rows) for rows in entries.values()], np.int64)


def expand_spans(starts: Rows, counts: Rows) -> Rows:
    """Return the concatenated numbers of several spans."""
    before = np.cumsum(counts) - counts
    spans: Rows = np.repeat(starts - before, counts) + np.arange(counts.sum())
    return spans


def split_rows(rows: Vectors, counts: Rows) -> list[Vectors]:
    """Split rows into parts of these lengths."""
    return np.split(rows, np.cumsum(counts))[:-1]


def _encode_keys(digests: Iterable[Digest]) -> Keys:
    joined = bytes.fromhex("".join(digest.hex for digest in digests))
    return np.frombuffer(joined, np.uint8).reshape(-1, 32)


def _key_prefixes(keys: Keys) -> npt.NDArray[np.uint64]:
    """Return the first eight bytes of every key as one number, enough to tell most apart."""
    return np.ascontiguousarray(keys[:, :8]).view(np.uint64).reshape(-1)


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """Unit rows, or rows of zeros for texts without content, in the order of the texts."""

    rows: Vectors  # [texts, dimensions]
    rerank_rows: Vectors  # [texts, rerank dimensions]

    @classmethod
    def from_rows(cls, rows: Vectors) -> Self:
        """Use the same rows for search and reranking."""
        return cls(rows, rows)


def normalise_rows(rows: Vectors) -> Vectors:
    """Scale rows to unit length, in place; rows of zeros stay."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: Vectors = np.divide(rows, norms, out=rows, where=norms > 0)
    return unit


def interpolate(cosines: Vectors, points: Sequence[tuple[float, float]]) -> Vectors:
    """Map cosines by linear interpolation between points."""
    raw, meant = zip(*points, strict=True)
    similar: Vectors = np.interp(cosines, raw, meant).astype(np.float32)
    return similar


DECIMALS = 6
"""The number of decimal places to which cosines are rounded."""


@dataclass(frozen=True, eq=False)
class SearchFilter:
    """Which positions of a table a search may return; created once, used for many searches."""

    table: VectorTable
    mask: Mask

    @cached_property
    def positions(self) -> Rows:
        """The allowed positions."""
        return np.flatnonzero(self.mask)

    @cached_property
    def row_count(self) -> int:
        """The number of allowed rows."""
        return int(self.table.counts[self.positions].sum())

    @cached_property
    def admits_all(self) -> bool:
        """Whether all rows are allowed."""
        return self.row_count == len(self.table.rows)

    @cached_property
    def rows(self) -> Rows:
        """The allowed rows."""
        return self.table.select_rows(self.positions)

    def extend_to(self, table: VectorTable) -> "SearchFilter":
        """Return the filter for a table with later entries, which are not allowed.

        For the same table it is the same filter.
        """
        if table is self.table:
            return self
        assert table.generation == self.table.generation, "a filter of positions that are no more"
        mask = np.zeros(len(table), np.bool_)
        mask[: len(self.mask)] = self.mask
        return SearchFilter(table, mask & table.alive)


@dataclass(frozen=True, slots=True, eq=False)
class SearchHits:
    """Experts close to a query, closest first, each with its best row.

    The three arrays have equal length. ``experts`` are positions in the index, valid until
    `RoutingIndex.revision` changes; ``cosines`` are not calibrated.
    """

    experts: Rows
    cosines: Vectors
    texts: Rows  # 0 is the first row of the expert

    @classmethod
    def empty(cls) -> Self:
        """Return no hits."""
        none = np.zeros(0, np.int64)
        return cls(none, np.zeros(0, np.float32), none)

    def take(self, count: int) -> "SearchHits":
        """Return the closest ``count`` hits."""
        if len(self) <= count:
            return self
        return SearchHits(self.experts[:count], self.cosines[:count], self.texts[:count])

    def __len__(self) -> int:
        """Return the number of experts found."""
        return len(self.experts)


def group_by_expert(table: VectorTable, rows: Rows, cosines: Vectors) -> SearchHits:
    """Group rows by the expert that owns them; of equal rows the first is used.

    Cosines are rounded, because the last bits of a product depend on which other rows are
    multiplied in the same call, and no order may depend on that.
    """
    cosines = cosines.round(DECIMALS)
    order = np.lexsort((rows, -cosines))
    first: dict[int, int] = {}
    keep = first.setdefault
    for at, owner in zip(order.tolist(), table.owners[rows[order]].tolist(), strict=True):
        keep(owner, at)
    best = np.fromiter(first.values(), np.int64, len(first))
    experts = np.fromiter(first, np.int64, len(first))
    return SearchHits(experts, cosines[best], rows[best] - table.starts[experts])
