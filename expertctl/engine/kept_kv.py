"""What stays of a finished generation, so that the next turn need not be read from its beginning.

One generation is kept of each kind of cache. It serves a request of the same cache key and the same
plan identity, as far as the tokens agree; at least one token is always read, for its scores. While
it is in use it is taken out, and put back only when that generation completed: one that failed, was
stopped or was given up leaves nothing, nor does one whose key is forgotten meanwhile. Another plan
under the same key is a miss, which ends the entry.

A cache is lent with exactly the room that is asked for. The bytes of what is kept count as ``kv``;
they are given up before a request is refused, or an expert evicted, for want of memory. Soft
prompts stand before the first token; they are the same under one identity, so they are part of what
is reused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from expertctl.digest import Digest
from expertctl.engine.kv_cache import KVCache
from expertctl.engine.kv_loan import KVLoan, KVWanted
from expertctl.engine.tiers import Tier, Tiers


@dataclass(frozen=True, slots=True, eq=False)
class KeptKV:
    """A completed generation: whose it is, the tokens it read and wrote, their rows."""

    cache_key: str
    identity: Digest
    ids: tuple[int, ...]
    cache: KVCache


@dataclass(slots=True, eq=False)
class _Text:
    """One that runs."""

    cache_key: str | None
    is_forgotten: bool = False


@dataclass(frozen=True, slots=True)
class CacheKind:
    """What caches of some base are: their name, how one is made, what it takes, known before."""

    name: str
    make: Callable[[KVWanted], KVCache]
    nbytes: Callable[[KVWanted], int]


PLAIN = CacheKind(
    "torch",
    make=lambda wanted: KVCache(wanted.config, wanted.capacity),
    nbytes=lambda wanted: wanted.nbytes,
)
"""Float32 in the machine's memory."""


class KVSlot:
    """The owner of the one generation that is kept of a kind."""

    def __init__(self, tiers: Tiers, kind: CacheKind = PLAIN) -> None:
        """Begin with none; its memory is that of the device tier."""
        self._tiers, self._kind = tiers, kind
        self._place = Tier.DEVICE, Digest.of(f"the last generation in {kind.name}".encode())
        self._running: list[_Text] = []

    @contextmanager
    def borrow(self, wanted: KVWanted) -> Iterator[KVLoan[KVCache]]:
        """Lend a cache: what is kept, as far as it agrees, or an empty one.

        Raises:
            BudgetError: when an empty one cannot fit.
        """
        loan, text = self._reused(wanted) or KVLoan(self._empty(wanted)), _Text(wanted.cache_key)
        self._running.append(text)
        try:
            yield loan
        finally:
            self._running.remove(text)
            self._end(loan, wanted, is_forgotten=text.is_forgotten)

    def holds(self, cache_key: str | None, identity: Digest) -> bool:
        """Tell whether something is kept for this key and plan."""
        kept = self._peek()
        return kept is not None and (kept.cache_key, kept.identity) == (cache_key, identity)

    def forget(self, cache_key: str) -> None:
        """Drop what is kept for a key; texts of it that run now leave nothing."""
        for text in self._running:
            text.is_forgotten |= text.cache_key == cache_key
        self._drop(cache_key)

    def _drop(self, cache_key: str) -> None:
        kept = self._peek()
        if kept is not None and kept.cache_key == cache_key:
            self._tiers.forget(self._place)

    def clear(self) -> None:
        """Drop what is kept."""
        self._tiers.forget(self._place)

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        kept = self._peek()
        return 0 if kept is None else kept.cache.nbytes

    @property
    def kept_bytes(self) -> int:
        """The same: what is lent is no entry."""
        return self.nbytes

    def check_integrity(self) -> None:
        """Assert that what is kept has a row for each of its tokens."""
        kept = self._peek()
        if kept is not None:
            kept.cache.check_integrity()
            assert kept.cache.length >= len(kept.ids)

    def check_idle(self) -> None:
        """Assert that nothing is lent."""
        assert not self._running

    def _peek(self) -> KeptKV | None:
        return cast(KeptKV | None, self._tiers.kept(self._place))

    def _reused(self, wanted: KVWanted) -> KVLoan[KVCache] | None:
        """Take out what is kept, if some of it can be used."""
        kept = self._take(wanted)
        if kept is None:
            return None
        common = min(_common(kept.ids, wanted.ids), len(wanted.ids) - 1)
        kept.cache.rewind(wanted.virtual + common)
        if common and kept.cache.capacity == wanted.capacity:
            return KVLoan(kept.cache, reused=common)
        try:
            return self._moved(kept.cache, wanted, common) if common else None
        finally:
            size = kept.cache.nbytes
            del kept
            self._release(size)

    def _take(self, wanted: KVWanted) -> KeptKV | None:
        if self.holds(wanted.cache_key, wanted.identity):
            return cast(KeptKV, self._tiers.take(self._place))
        if wanted.cache_key is not None:
            self._drop(wanted.cache_key)
        return None

    def _moved(self, cache: KVCache, wanted: KVWanted, common: int) -> KVLoan[KVCache] | None:
        """Copy the rows that agree into a cache of the size asked for, if both fit for a moment."""
        if not self._tiers.has_room(Tier.DEVICE, self._kind.nbytes(wanted)):
            return None  # reading the text again beats evicting the experts that it needs
        moved = self._empty(wanted)
        moved.copy_from(cache)
        return KVLoan(moved, reused=common)

    def _empty(self, wanted: KVWanted) -> KVCache:
        size = self._kind.nbytes(wanted)
        self._tiers.reserve(Tier.DEVICE, "kv", size, what=wanted.what)
        try:
            return self._kind.make(wanted)
        except BaseException:
            self._release(size)
            raise

    def _end(self, loan: KVLoan[KVCache], wanted: KVWanted, *, is_forgotten: bool) -> None:
        cache = loan.cache
        del loan.cache
        if loan.completed is None or wanted.cache_key is None or is_forgotten:
            size = cache.nbytes
            del cache
            self._release(size)
            return
        ids = loan.completed[: cache.length - wanted.virtual]
        kept = KeptKV(wanted.cache_key, wanted.identity, ids, cache)
        self._tiers.keep(self._place, kept, cache.nbytes, purpose="kv")

    def _release(self, size: int) -> None:
        self._tiers.release(Tier.DEVICE, "kv", size)


def _common(kept: Sequence[int], wanted: Sequence[int]) -> int:
    """How many tokens at the beginning are the same."""
    pairs = enumerate(zip(kept, wanted, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(kept), len(wanted)))
