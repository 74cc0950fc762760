"""Room for the keys and values of a text: how many tokens fit, and how many are there.

What a generation asks of the keeper of keys and values, and what it is lent.

Keys and values of a text, preallocated; one generation at a time owns them.

Layout ``[layer, kv_head, capacity, head_dim]``: heads stand ``capacity`` rows apart whatever the
current length is. Memory is not cleared, rows at and beyond ``length`` are never read. A text that
does not fit is an error, old rows are never pushed out.

Caches of finished generations, kept so that the next turn need not be read from its beginning.

Of each kind of cache up to `MAX_CACHED_SEQUENCES` texts are kept, of all keys and plans. A request finds, among
those of its own cache key and plan identity, the one that agrees with it furthest; at least one
token is always read, for its scores. A text that it continues is taken out, and the result is kept
only when the generation completed: one that failed, was stopped or was given up leaves nothing, nor
does one whose key is forgotten meanwhile. A text that merely begins alike stays, and its rows are
copied. Texts without a key neither find nor leave anything.

A cache is lent with exactly the room that is asked for. Bytes count as ``kv``, and are entered
before there is memory. Kept caches are given up when `AdapterCache` asks for their bytes, in any thread,
the longest unused first; so the lock is that of `AdapterCache`. They are also given up as far as they take
more than ``kept_limit``. Texts come from one thread. Soft prompts stand before the first token;
they are the same under one identity, so they are reused, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from expertctl.digest import Digest
from expertctl.engine.memory.adapter_cache import AdapterCache, Tier
from expertctl.errors import BudgetError
from expertctl.package.model_config import ModelConfig


class KVCacheBase:
    """Room for ``capacity`` tokens; `length` of them are filled."""

    def __init__(self, capacity: int) -> None:
        """Begin without a token."""
        self.capacity = capacity
        self.length = 0

    def ensure_capacity(self, tokens: int) -> None:
        """Check that so many more tokens fit.

        Raises:
            BudgetError: when they do not.
        """
        if self.length + tokens > self.capacity:
            raise BudgetError(
                f"{tokens} more tokens do not fit into the KV cache: "
                f"{self.length} of {self.capacity} are used",
                hint="shorten the prompt or ask for fewer tokens",
            )

    def advance(self, tokens: int) -> None:
        """Count what every layer has written."""
        self.length += tokens

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens only."""
        assert 0 <= length <= self.length, f"cannot rewind from {self.length} to {length}"
        self.length = length

    def reset(self) -> None:
        """Make room for another generation."""
        self.rewind(0)


@contextmanager
def rewind_on_error(caches: Sequence[KVCacheBase]) -> Iterator[None]:
    """Rewind all rooms if the block fails, so that no text is ahead of another."""
    lengths = [room.length for room in caches]
    try:
        yield
    except BaseException:
        for room, length in zip(caches, lengths, strict=True):
            room.rewind(length)
        raise


_FLOAT_BYTES = 4
KVCacheT = TypeVar("KVCacheT", bound=KVCacheBase, covariant=True)


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """The owner of a text, and the plan that its rows were computed with."""

    owner: str
    identity: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRequest:
    """What a generation needs: the prompt's tokens, virtual ones before them, room for more."""

    cache_key: str | None
    identity: Digest
    config: ModelConfig
    ids: Sequence[int]
    virtual_tokens: int
    capacity: int
    reuse: bool = True
    """Whether rows of earlier texts may begin it; not where the logits of all rows are wanted."""
    initial_tokens: int | None = None
    """For how many tokens memory is taken at the start; None: for all.

    Where keys and values lie in pages, that for the rest is taken as it is needed.
    """

    @property
    def prefix_key(self) -> PrefixKey | None:
        """The origin of earlier texts that may begin it; without a key there is none."""
        return None if self.cache_key is None else PrefixKey(self.cache_key, self.identity)

    @property
    def nbytes(self) -> int:
        """The bytes of keys and values."""
        return self.config.count_kv_bytes(self.capacity, itemsize=_FLOAT_BYTES)

    @property
    def description(self) -> str:
        """How an error calls it."""
        return f"the KV cache of {self.capacity} tokens"


class KVAllocation(Generic[KVCacheT]):
    """Room for one generation; the first ``reused`` tokens of its prompt are read already."""

    def __init__(self, cache: KVCacheT, *, reused: int = 0) -> None:
        """Begin a generation that has not completed."""
        self.cache, self.reused = cache, reused
        self.completed: tuple[int, ...] | None = None

    def complete(self, ids: Sequence[int]) -> None:
        """Say that the generation came to its end; ``ids`` are prompt and answer."""
        self.completed = tuple(ids)


def count_common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens at the beginning are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


class KVCache(KVCacheBase):
    """Room for ``capacity`` tokens; `length` of them are filled."""

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Reserve the memory, once."""
        shape = (config.layers, config.kv_heads, capacity, config.head_dim)
        super().__init__(capacity)
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors, filled or not."""
        return self._keys.nbytes + self._values.nbytes

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the step's rows ``[kv_heads, tokens, head_dim]`` behind the filled ones.

        Returns all keys and values of the layer up to them, as views. The rows count as filled
        after `advance` only, so a step that fails leaves the cache as it was.
        """
        end = self.length + keys.shape[1]
        self._keys[layer, :, self.length : end].copy_(keys)
        self._values[layer, :, self.length : end].copy_(values)
        return self._keys[layer, :, :end], self._values[layer, :, :end]

    def copy_from(self, other: "KVCache", tokens: int) -> None:
        """Become the first ``tokens`` of another cache of the same base; that one stays as it is.

        Raises:
            BudgetError: when they do not fit.
        """
        assert tokens <= other.length
        self.reset()
        self.ensure_capacity(tokens)
        for own, others in ((self._keys, other._keys), (self._values, other._values)):
            own[:, :, :tokens].copy_(others[:, :, :tokens])
        self.advance(tokens)

    def check_integrity(self) -> None:
        """Assert what always holds: a possible length, numbers in every filled row."""
        assert 0 <= self.length <= self.capacity
        assert self._keys.shape == self._values.shape
        for filled in (self._keys[:, :, : self.length], self._values[:, :, : self.length]):
            assert bool(torch.isfinite(filled).all())


MAX_CACHED_SEQUENCES = 64
"""At most so many texts are kept, so that finding one is cheap; mostly memory allows fewer."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedSequence:
    """A completed generation: its origin, the tokens it read and wrote, their rows."""

    origin: PrefixKey
    ids: tuple[int, ...]
    cache: KVCache

    def count_shared_tokens(self, request: KVRequest) -> int:
        """Return how many tokens of a text need not be read."""
        if self.origin != request.prefix_key or not request.reuse:
            return 0
        most = min(len(request.ids) - 1, request.capacity - request.virtual_tokens)
        return min(count_common_prefix(self.ids, request.ids), most)

    def is_extended_by(self, other: "CachedSequence") -> bool:
        """Tell whether another text says all that this one does."""
        return self.origin == other.origin and self.ids == other.ids[: len(self.ids)]


@dataclass(slots=True, eq=False)
class _ActiveSequence:
    """A running text: the bytes entered for it, and the text its rows are being copied from."""

    origin: PrefixKey | None
    own_bytes: int = 0
    cache: KVCache | None = None
    source: CachedSequence | None = None
    is_forgotten: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that are not those of kept texts."""
        return self.own_bytes + (0 if self.source is None else self.source.cache.nbytes)


@dataclass(frozen=True, slots=True)
class KVCacheFactory:
    """The caches of a base: how to make one, and what it will take."""

    make: Callable[[KVRequest], KVCache]
    nbytes: Callable[[KVRequest], int]


FLOAT32_CACHE = KVCacheFactory(
    make=lambda wanted: KVCache(wanted.config, wanted.capacity),
    nbytes=lambda wanted: wanted.nbytes,
)
"""Float32 in the machine's memory."""


class SequenceKVCache:
    """The owner of the caches of a kind, of those that are kept and of those that are lent."""

    def __init__(
        self,
        tiers: AdapterCache,
        factory: KVCacheFactory = FLOAT32_CACHE,
        *,
        max_sequences: int = MAX_CACHED_SEQUENCES,
        cached_limit: int | None = None,
    ) -> None:
        """Begin with none; their memory is that of the device tier.

        At most ``most`` texts are kept, in ``kept_limit`` bytes; None: no limit.
        """
        self._tiers, self._factory, self._max_sequences = tiers, factory, max_sequences
        self._cached_limit = cached_limit
        self._cached: list[CachedSequence] = []
        """The longest unused first."""
        self._active: list[_ActiveSequence] = []
        tiers.register_reclaimable(
            Tier.DEVICE, nbytes=lambda: self.cached_bytes, reclaim=self._evict
        )

    @contextmanager
    def allocate(self, request: KVRequest) -> Iterator[KVAllocation[KVCache]]:
        """Lend a cache; its first rows are those of a kept text that began in the same way.

        Raises:
            BudgetError: when it cannot fit.
        """
        text = _ActiveSequence(request.prefix_key)
        self._active.append(text)
        try:
            loan = self._allocate(request, text)
        except BaseException:
            self._finish(text, ())
            raise
        try:
            yield loan
        finally:
            ids = (loan.completed or ())[: max(loan.cache.length - request.virtual_tokens, 0)]
            del loan.cache
            self._finish(text, ids)

    def forget(self, cache_key: str) -> None:
        """Drop what is kept for a key; texts of it that run now leave nothing."""
        with self._tiers.lock:
            for text in self._active:
                text.is_forgotten |= text.origin is not None and text.origin.owner == cache_key
            before = self.cached_bytes
            self._cached = [kept for kept in self._cached if kept.origin.owner != cache_key]
            self._release(before - self.cached_bytes)

    def clear(self) -> None:
        """Drop all that is kept."""
        self._evict(self.cached_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, those of running texts and kept ones."""
        return self.cached_bytes + sum(text.nbytes for text in self._active)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the caches that no running text has."""
        return sum(kept.cache.nbytes for kept in self._cached)

    def check_integrity(self) -> None:
        """Assert that what is kept has a row for each of its tokens, and an owner of its own."""
        with self._tiers.lock:
            lent = [(text, text.cache) for text in self._active if text.cache is not None]
            caches = [*(kept.cache for kept in self._cached), *(cache for _, cache in lent)]
            assert len({id(cache) for cache in caches}) == len(caches)
            assert all(text.own_bytes == cache.nbytes for text, cache in lent)
            assert len(self._cached) <= self._max_sequences
            assert self._cached_limit is None or self.cached_bytes <= self._cached_limit
            for kept in self._cached:
                kept.cache.check_integrity()
                assert 0 < len(kept.ids) <= kept.cache.length

    def check_idle(self) -> None:
        """Assert that nothing is lent."""
        assert not self._active

    def _allocate(self, request: KVRequest, text: _ActiveSequence) -> KVAllocation[KVCache]:
        reused = self._reuse_prefix(request, text)
        if text.cache is None:
            size = self._factory.nbytes(request)
            self._tiers.reserve(Tier.DEVICE, "kv", size, what=request.description)
            text.own_bytes = size
            text.cache = self._factory.make(request)
        return KVAllocation(text.cache, reused=reused)

    def _reuse_prefix(self, request: KVRequest, text: _ActiveSequence) -> int:
        """Give a text the rows of the kept one that agrees with it furthest; return how many."""
        source = self._take_best_match(request, text)
        if source is None:
            return 0
        tokens = source.count_shared_tokens(request)
        # a conversation does not displace one that only has the same beginning
        goes_on = 2 * tokens >= len(source.ids)
        if goes_on and source.cache.capacity == request.capacity:
            text.cache, text.own_bytes, text.source = source.cache, source.cache.nbytes, None
            text.cache.rewind(request.virtual_tokens + tokens)
            return tokens
        is_copied = self._copy_prefix(source.cache, request, text, tokens)
        del source
        self._return_source(text, is_kept=not goes_on)
        return tokens if is_copied else 0

    def _take_best_match(self, request: KVRequest, text: _ActiveSequence) -> CachedSequence | None:
        """Take out what agrees furthest, the newest of several, until it is given back."""
        with self._tiers.lock:
            best = max(
                reversed(self._cached),
                key=lambda kept: kept.count_shared_tokens(request),
                default=None,
            )
            if best is None or not best.count_shared_tokens(request):
                return None
            self._cached.remove(best)
            text.source = best
            return best

    def _copy_prefix(
        self, cache: KVCache, request: KVRequest, text: _ActiveSequence, tokens: int
    ) -> bool:
        """Copy rows into a cache of the size asked for, if both fit for a moment."""
        size = self._factory.nbytes(request)
        if not self._tiers.try_reserve(Tier.DEVICE, "kv", size, what=request.description):
            return False  # reading the text again beats evicting the experts that it needs
        text.own_bytes = size
        text.cache = self._factory.make(request)
        text.cache.copy_from(cache, request.virtual_tokens + tokens)
        return True

    def _return_source(self, text: _ActiveSequence, *, is_kept: bool) -> None:
        """Put back what a text was copied from, or let it go."""
        with self._tiers.lock:
            before = self.nbytes
            if is_kept and text.source is not None and not text.is_forgotten:
                self._cached.append(text.source)
            text.source = None
            self._release(before - self.nbytes)

    def _finish(self, text: _ActiveSequence, ids: Sequence[int]) -> None:
        """Keep the rows of ``ids``, in the place of texts that they go on from."""
        with self._tiers.lock:
            before = self.nbytes
            if ids and text.origin is not None and not text.is_forgotten:
                assert text.cache is not None
                self._store(CachedSequence(text.origin, tuple(ids), text.cache))
            self._active.remove(text)
            text.cache = text.source = None
            self._release(before - self.nbytes)

    def _store(self, text: CachedSequence) -> None:
        others = [kept for kept in self._cached if not kept.is_extended_by(text)]
        self._cached = [*others, text][-self._max_sequences :]
        while self._cached_limit is not None and self.cached_bytes > self._cached_limit:
            del self._cached[0]

    def _evict(self, size: int) -> None:
        """Free so many bytes of what is kept, the longest unused first, as far as there are."""
        with self._tiers.lock:
            freed = 0
            while self._cached and freed < size:
                freed += self._cached.pop(0).cache.nbytes
            self._release(freed)

    def _release(self, size: int) -> None:
        """Strike out bytes that are free."""
        self._tiers.release(Tier.DEVICE, "kv", size)
