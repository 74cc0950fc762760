"""`VectorTable`: the vectors of experts as one matrix, entry after entry.

An entry keeps its position: new ones come behind, and a forgotten one stays in its place, dead,
until everything is written anew. So data kept per position stays valid while
`VectorTable.generation` is the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from expertctl.digest import Digest

Vectors = npt.NDArray[np.float32]
"""Unit rows, or other float32 numbers derived from them."""

Rows = npt.NDArray[np.int64]
"""Indices of rows, or positions of experts."""

Mask = npt.NDArray[np.bool_]
"""One yes or no for every position."""

Keys = npt.NDArray[np.uint8]
"""Content digests as bytes, [entries, 32]."""

_FEW = 16


@dataclass(frozen=True, eq=False)
class VectorTable:
    """Entries and their rows; an entry is the texts of one expert.

    ``encoder`` is the digest of what made the rows, ``stamp`` how to recognise it cheaply. A table
    that no file holds has no ``generation``.
    """

    encoder: Digest
    stamp: str
    keys: Keys
    counts: Rows  # how many rows each entry has
    alive: Mask
    rows: Vectors  # [sum of counts, dimensions]
    generation: str = ""

    @classmethod
    def empty(cls, *, encoder: Digest, stamp: str, dimensions: int) -> Self:
        """Return a table without entries."""
        none = np.zeros(0, np.int64)
        rows = np.zeros((0, dimensions), np.float32)
        return cls(encoder, stamp, _keys_of([]), none, none.astype(np.bool_), rows)

    def __len__(self) -> int:
        """How many positions there are, dead ones included."""
        return len(self.counts)

    @cached_property
    def starts(self) -> Rows:
        """The first row of every entry."""
        starts: Rows = np.cumsum(self.counts) - self.counts
        return starts

    @cached_property
    def owners(self) -> npt.NDArray[np.int32]:
        """The position that every row belongs to."""
        return np.repeat(np.arange(len(self), dtype=np.int32), self.counts)

    @cached_property
    def dead_rows(self) -> int:
        """How many rows belong to entries that were forgotten."""
        return int(self.counts[~self.alive].sum())

    @property
    def digests(self) -> list[Digest]:
        """The content digests of the entries that are alive, in their order."""
        return [self.digest(int(position)) for position in np.flatnonzero(self.alive)]

    def digest(self, position: int) -> Digest:
        """Return the content digest at a position."""
        return Digest(self.keys[position].tobytes().hex())

    def positions(self, digests: Sequence[Digest]) -> Rows:
        """Return the position of each digest, -1 where it is not in the table."""
        wanted = _keys_of(digests)
        heads = _heads(wanted)
        found = self._scan(heads) if len(digests) <= _FEW else self._bisect(heads)
        sure = (self.keys[found] == wanted).all(axis=1) if len(self) else np.zeros(0, np.bool_)
        return np.where((found >= 0) & sure, found, -1) if len(self) else found

    def rows_of(self, positions: Rows) -> Rows:
        """Return which rows belong to these positions, entry after entry."""
        counts = self.counts[positions]
        before = np.cumsum(counts) - counts
        rows: Rows = np.repeat(self.starts[positions] - before, counts) + np.arange(counts.sum())
        return rows

    def with_entries(self, added: Mapping[Digest, Vectors]) -> "VectorTable":
        """Return a table in memory with more entries; those that are alive already stay as is."""
        new = self.lacking(added)
        rows = np.concatenate([self.rows, *new.values()])
        return replace(self.joined(new, rows), generation="")

    def joined(self, new: Mapping[Digest, Vectors], rows: Vectors) -> "VectorTable":
        """Return the table with new entries; ``rows`` are all rows, the new ones last."""
        return replace(
            self,
            keys=np.concatenate([self.keys, _keys_of(new)]),
            counts=np.concatenate([self.counts, counts_of(new)]),
            alive=np.concatenate([self.alive, np.ones(len(new), np.bool_)]),
            rows=rows,
        )

    def lacking(self, added: Mapping[Digest, Vectors]) -> dict[Digest, Vectors]:
        """Return those of these entries that are not in the table."""
        at = self.positions(list(added))
        return {d: rows for (d, rows), there in zip(added.items(), at, strict=True) if there < 0}

    def without(self, positions: Rows) -> "VectorTable":
        """Return the table with these entries dead."""
        alive = self.alive.copy()
        alive[positions] = False
        return replace(self, alive=alive)

    def compact(self) -> "VectorTable":
        """Return a table in memory of what is alive."""
        kept = np.flatnonzero(self.alive)
        return replace(
            self,
            keys=self.keys[kept],
            counts=self.counts[kept],
            alive=self.alive[kept],
            rows=self.rows[self.rows_of(kept)],
            generation="",
        )

    def _scan(self, heads: npt.NDArray[np.uint64]) -> Rows:
        """Find a few digests by scanning all keys; -1 where none has the same head."""
        mine = [np.flatnonzero((self._heads == head) & self.alive) for head in heads]
        return np.array([at[-1] if len(at) else -1 for at in mine], np.int64)

    def _bisect(self, heads: npt.NDArray[np.uint64]) -> Rows:
        """Find many digests in a sorted list of the live entries."""
        order = self._order
        at = np.searchsorted(self._heads[order], heads)
        inside = at < len(order)
        found = np.full(len(heads), -1, np.int64)
        found[inside] = order[at[inside]]
        return found

    @cached_property
    def _heads(self) -> npt.NDArray[np.uint64]:
        return _heads(self.keys)

    @cached_property
    def _order(self) -> Rows:
        alive = np.flatnonzero(self.alive)
        return alive[np.argsort(self._heads[alive], kind="stable")]


def counts_of(entries: Mapping[Digest, Vectors]) -> Rows:
    """Return how many rows each of these entries has."""
    return np.array([len(rows) for rows in entries.values()], np.int64)


def parts_of(rows: Vectors, counts: Rows) -> list[Vectors]:
    """Cut rows apart, so many for each entry."""
    return np.split(rows, np.cumsum(counts))[:-1]


def _keys_of(digests: Iterable[Digest]) -> Keys:
    joined = bytes.fromhex("".join(digest.hex for digest in digests))
    return np.frombuffer(joined, np.uint8).reshape(-1, 32)


def _heads(keys: Keys) -> npt.NDArray[np.uint64]:
    """Return the first eight bytes of every key as one number, enough to tell most apart."""
    return np.ascontiguousarray(keys[:, :8]).view(np.uint64).reshape(-1)
