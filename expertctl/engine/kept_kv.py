"""Caches of finished generations, kept so that the next turn need not be read from its beginning.

Of each kind of cache up to `SLOTS` texts are kept, of all keys and plans. A request finds, among
those of its own cache key and plan identity, the one that agrees with it furthest; at least one
token is always read, for its scores. A text that it continues is taken out, and the result is kept
only when the generation completed: one that failed, was stopped or was given up leaves nothing, nor
does one whose key is forgotten meanwhile. A text that merely begins alike stays, and its rows are
copied. Texts without a key neither find nor leave anything.

A cache is lent with exactly the room that is asked for. Bytes count as ``kv``, and are entered
before there is memory. Kept caches are given up when `Tiers` asks for their bytes, in any thread,
the longest unused first; so the lock is that of `Tiers`. They are also given up as far as they take
more than ``kept_limit``. Texts come from one thread. Soft prompts stand before the first token;
they are the same under one identity, so they are reused, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from expertctl.engine.kv_cache import KVCache
from expertctl.engine.kv_loan import KVLoan, KVWanted, Origin, common
from expertctl.engine.tiers import Tier, Tiers

SLOTS = 64
"""At most so many texts are kept, so that finding one is cheap; mostly memory allows fewer."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptText:
    """A completed generation: its origin, the tokens it read and wrote, their rows."""

    origin: Origin
    ids: tuple[int, ...]
    cache: KVCache

    def agrees(self, wanted: KVWanted) -> int:
        """Return how many tokens of a text need not be read."""
        if self.origin != wanted.origin or not wanted.reuse:
            return 0
        most = min(len(wanted.ids) - 1, wanted.capacity - wanted.virtual)
        return min(common(self.ids, wanted.ids), most)

    def begins(self, other: "KeptText") -> bool:
        """Tell whether another text says all that this one does."""
        return self.origin == other.origin and self.ids == other.ids[: len(self.ids)]


@dataclass(slots=True, eq=False)
class _Text:
    """A running text: the bytes entered for it, and the text its rows are being copied from."""

    origin: Origin | None
    own_bytes: int = 0
    cache: KVCache | None = None
    source: KeptText | None = None
    is_forgotten: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that are not those of kept texts."""
        return self.own_bytes + (0 if self.source is None else self.source.cache.nbytes)


@dataclass(frozen=True, slots=True)
class CacheKind:
    """The caches of a base: how to make one, and what it will take."""

    make: Callable[[KVWanted], KVCache]
    nbytes: Callable[[KVWanted], int]


PLAIN = CacheKind(
    make=lambda wanted: KVCache(wanted.config, wanted.capacity),
    nbytes=lambda wanted: wanted.nbytes,
)
"""Float32 in the machine's memory."""


class KVSlots:
    """The owner of the caches of a kind, of those that are kept and of those that are lent."""

    def __init__(
        self,
        tiers: Tiers,
        kind: CacheKind = PLAIN,
        *,
        most: int = SLOTS,
        kept_limit: int | None = None,
    ) -> None:
        """Begin with none; their memory is that of the device tier.

        At most ``most`` texts are kept, in ``kept_limit`` bytes; None: no limit.
        """
        self._tiers, self._kind, self._most = tiers, kind, most
        self._kept_limit = kept_limit
        self._kept: list[KeptText] = []
        """The longest unused first."""
        self._running: list[_Text] = []
        tiers.spare_from(Tier.DEVICE, nbytes=lambda: self.kept_bytes, give_up=self._let_go)

    @contextmanager
    def borrow(self, wanted: KVWanted) -> Iterator[KVLoan[KVCache]]:
        """Lend a cache; its first rows are those of a kept text that began in the same way.

        Raises:
            BudgetError: when it cannot fit.
        """
        text = _Text(wanted.origin)
        self._running.append(text)
        try:
            loan = self._lent(wanted, text)
        except BaseException:
            self._end(text, ())
            raise
        try:
            yield loan
        finally:
            ids = (loan.completed or ())[: max(loan.cache.length - wanted.virtual, 0)]
            del loan.cache
            self._end(text, ids)

    def forget(self, cache_key: str) -> None:
        """Drop what is kept for a key; texts of it that run now leave nothing."""
        with self._tiers.lock:
            for text in self._running:
                text.is_forgotten |= text.origin is not None and text.origin.owner == cache_key
            before = self.kept_bytes
            self._kept = [kept for kept in self._kept if kept.origin.owner != cache_key]
            self._release(before - self.kept_bytes)

    def clear(self) -> None:
        """Drop all that is kept."""
        self._let_go(self.kept_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, those of running texts and kept ones."""
        return self.kept_bytes + sum(text.nbytes for text in self._running)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the caches that no running text has."""
        return sum(kept.cache.nbytes for kept in self._kept)

    def check_integrity(self) -> None:
        """Assert that what is kept has a row for each of its tokens, and an owner of its own."""
        with self._tiers.lock:
            lent = [(text, text.cache) for text in self._running if text.cache is not None]
            caches = [*(kept.cache for kept in self._kept), *(cache for _, cache in lent)]
            assert len({id(cache) for cache in caches}) == len(caches)
            assert all(text.own_bytes == cache.nbytes for text, cache in lent)
            assert len(self._kept) <= self._most
            assert self._kept_limit is None or self.kept_bytes <= self._kept_limit
            for kept in self._kept:
                kept.cache.check_integrity()
                assert 0 < len(kept.ids) <= kept.cache.length

    def check_idle(self) -> None:
        """Assert that nothing is lent."""
        assert not self._running

    def _lent(self, wanted: KVWanted, text: _Text) -> KVLoan[KVCache]:
        reused = self._reuse(wanted, text)
        if text.cache is None:
            size = self._kind.nbytes(wanted)
            self._tiers.reserve(Tier.DEVICE, "kv", size, what=wanted.what)
            text.own_bytes = size
            text.cache = self._kind.make(wanted)
        return KVLoan(text.cache, reused=reused)

    def _reuse(self, wanted: KVWanted, text: _Text) -> int:
        """Give a text the rows of the kept one that agrees with it furthest; return how many."""
        source = self._take_out(wanted, text)
        if source is None:
            return 0
        tokens = source.agrees(wanted)
        # a conversation does not displace one that only has the same beginning
        goes_on = 2 * tokens >= len(source.ids)
        if goes_on and source.cache.capacity == wanted.capacity:
            text.cache, text.own_bytes, text.source = source.cache, source.cache.nbytes, None
            text.cache.rewind(wanted.virtual + tokens)
            return tokens
        is_copied = self._copy(source.cache, wanted, text, tokens)
        del source
        self._give_back(text, is_kept=not goes_on)
        return tokens if is_copied else 0

    def _take_out(self, wanted: KVWanted, text: _Text) -> KeptText | None:
        """Take out what agrees furthest, the newest of several, until it is given back."""
        with self._tiers.lock:
            best = max(reversed(self._kept), key=lambda kept: kept.agrees(wanted), default=None)
            if best is None or not best.agrees(wanted):
                return None
            self._kept.remove(best)
            text.source = best
            return best

    def _copy(self, cache: KVCache, wanted: KVWanted, text: _Text, tokens: int) -> bool:
        """Copy rows into a cache of the size asked for, if both fit for a moment."""
        size = self._kind.nbytes(wanted)
        if not self._tiers.reserve_spare(Tier.DEVICE, "kv", size, what=wanted.what):
            return False  # reading the text again beats evicting the experts that it needs
        text.own_bytes = size
        text.cache = self._kind.make(wanted)
        text.cache.copy_from(cache, wanted.virtual + tokens)
        return True

    def _give_back(self, text: _Text, *, is_kept: bool) -> None:
        """Put back what a text was copied from, or let it go."""
        with self._tiers.lock:
            before = self.nbytes
            if is_kept and text.source is not None and not text.is_forgotten:
                self._kept.append(text.source)
            text.source = None
            self._release(before - self.nbytes)

    def _end(self, text: _Text, ids: Sequence[int]) -> None:
        """Keep the rows of ``ids``, in the place of texts that they go on from."""
        with self._tiers.lock:
            before = self.nbytes
            if ids and text.origin is not None and not text.is_forgotten:
                assert text.cache is not None
                self._keep(KeptText(text.origin, tuple(ids), text.cache))
            self._running.remove(text)
            text.cache = text.source = None
            self._release(before - self.nbytes)

    def _keep(self, text: KeptText) -> None:
        others = [kept for kept in self._kept if not kept.begins(text)]
        self._kept = [*others, text][-self._most :]
        while self._kept_limit is not None and self.kept_bytes > self._kept_limit:
            del self._kept[0]

    def _let_go(self, size: int) -> None:
        """Free so many bytes of what is kept, the longest unused first, as far as there are."""
        with self._tiers.lock:
            freed = 0
            while self._kept and freed < size:
                freed += self._kept.pop(0).cache.nbytes
            self._release(freed)

    def _release(self, size: int) -> None:
        """Strike out bytes that are free."""
        self._tiers.release(Tier.DEVICE, "kv", size)
