"""Contiguous KV caches of single sequences in torch, and their owner.

`KVCache` preallocates the layout ``[layer, kv_head, capacity, head_dim]``: heads are ``capacity``
rows apart whatever the current length. Memory is not cleared.

`SequenceKVCache` keeps the caches of finished generations so that the next turn need not be read
from its beginning, up to `MAX_CACHED_SEQUENCES` over all keys and plans. A request finds, among
those of its own cache key and plan, the one with the longest common prefix; at least one token is
always read, for its logits. A sequence that it continues is taken out, and the result is kept only
when the generation completed: one that failed or was cancelled keeps nothing, nor does one whose
key is forgotten meanwhile. A sequence with merely a common prefix stays, and its rows are copied.
Sequences without a key neither find nor keep anything.

A cache has exactly the requested capacity. Bytes count as ``kv`` and are reserved before they are
allocated. Kept caches are evicted when `AdapterCache` reclaims memory, in any thread, the least
recently used first; so they share its lock. They are also evicted if they exceed ``cached_limit``.
Sequences are created in one thread. Soft prompts precede the first token; they are the same under
one plan identity, so they are reused, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from expertctl.engine.kv.kv_cache import (
    KVAllocation,
    KVCacheBase,
    KVRequest,
    PrefixKey,
    count_common_prefix,
)
from expertctl.engine.memory.adapter_cache import AdapterCache, Tier
from expertctl.package.model_config import ModelConfig


class KVCache(KVCacheBase):
    """Contiguous KV cache of ``capacity`` tokens, `length` of them filled."""

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the memory, once."""
        shape = (len(config.attention_layers), config.kv_heads, capacity, config.head_dim)
        super().__init__(capacity)
        make = torch.empty if config.block.varied is None else torch.zeros  # some heads are smaller
        self._keys = make(shape, dtype=dtype, device=device)
        self._values = make(shape, dtype=dtype, device=device)
        self._use_states(make_states(config, device=device))

    def _use_states(self, states: Tensor) -> None:
        """Use memory [2, layers, numbers] for the state and for what a pass makes of it."""
        self._state, self._next = states.unbind(0)
        self._state.zero_()
        self._state_tokens = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, filled or not."""
        return self._keys.nbytes + self._values.nbytes + 2 * self._state.nbytes

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the step's rows ``[kv_heads, tokens, head_dim]`` to one layer.

        Returns all keys and values of the layer up to them, as views. The rows count as filled only
        after `advance`, so a failed step leaves the cache unchanged.
        """
        heads, tokens, dims = keys.shape
        end = self.length + tokens
        self._keys[layer, :heads, self.length : end, :dims].copy_(keys)
        self._values[layer, :heads, self.length : end, :dims].copy_(values)
        return self.read(layer, tokens, heads=heads, dims=dims)

    def read(self, layer: int, tokens: int, *, heads: int, dims: int) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer up to those of a step of so many tokens."""
        end = self.length + tokens
        return self._keys[layer, :heads, :end, :dims], self._values[layer, :heads, :end, :dims]

    def get_state(self, layer: int) -> Tensor:
        """Return the state [numbers] of a layer without keys and values, counted among those."""
        assert self._state_tokens == self.length, "a state cannot be cut"
        return self._state[layer]

    def write_state(self, layer: int, state: Tensor) -> None:
        """Store the state after the tokens of a pass; it counts after `advance`."""
        self._next[layer].copy_(state)

    def advance(self, tokens: int) -> None:
        """Count tokens whose rows and states every layer has written."""
        super().advance(tokens)
        if self._state.numel():
            self._state.copy_(self._next)
        self._state_tokens = self.length

    def rewind(self, length: int) -> None:
        """Keep only the first ``length`` tokens; a state only lasts if those are none or all."""
        super().rewind(length)
        if length == 0:
            self._state.zero_()
            self._state_tokens = 0

    def copy_state(self) -> Tensor:
        """Return a copy of its state, [layers, numbers]."""
        return self._state.clone()

    def rewind_to_state(self, length: int, state: Tensor) -> None:
        """Return to a state that it had after fewer tokens."""
        self.rewind(length)
        self._state.copy_(state)
        self._state_tokens = length

    def can_continue(self, tokens: int) -> bool:
        """Tell whether its first ``tokens`` can be continued without the others."""
        return not self._state.numel() or tokens == self.length

    def copy_from(self, other: "KVCache", tokens: int) -> None:
        """Copy the first ``tokens`` of another cache of the same base, which stays unchanged.

        Raises:
            BudgetError: when they do not fit.
        """
        assert tokens <= other.length
        self.reset()
        self.ensure_capacity(tokens)
        for own, others in ((self._keys, other._keys), (self._values, other._values)):
            own[:, :, :tokens].copy_(others[:, :, :tokens])
        self._next.copy_(other._state)
        self.advance(tokens)

    def check_integrity(self) -> None:
        """Assert the invariants: a possible length, and finite numbers in every filled row."""
        assert 0 <= self.length <= self.capacity
        assert self._keys.shape == self._values.shape
        for filled in (self._keys[:, :, : self.length], self._values[:, :, : self.length]):
            assert bool(torch.isfinite(filled).all())
        assert bool(torch.isfinite(self._state).all())


def make_states(config: ModelConfig, *rows: int, device: torch.device | str) -> Tensor:
    """Return memory for states of sequences, [2, layers, *rows, numbers]; often it is empty."""
    layers, numbers = (0, 0) if config.delta_net is None else config.delta_net.state_shape
    return torch.zeros(2, layers, *rows, numbers, device=device)


MAX_CACHED_SEQUENCES = 64
"""Maximum number of kept sequences, which keeps lookups cheap; usually memory allows fewer."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedSequence:
    """A completed generation: its origin, its prompt and answer tokens, and their rows."""

    origin: PrefixKey
    ids: tuple[int, ...]
    cache: KVCache

    def count_shared_tokens(self, request: KVRequest) -> int:
        """Return the number of tokens of a request that need not be read."""
        if self.origin != request.prefix_key or not request.reuse:
            return 0
        most = min(len(request.ids) - 1, request.capacity - request.virtual_tokens)
        found = min(count_common_prefix(self.ids, request.ids), most)
        return found if self.cache.can_continue(request.virtual_tokens + found) else 0

    def is_extended_by(self, other: "CachedSequence") -> bool:
        """Return whether another sequence starts with all of this one."""
        return self.origin == other.origin and self.ids == other.ids[: len(self.ids)]


@dataclass(slots=True, eq=False)
class _ActiveSequence:
    """A running sequence: its reserved bytes, and the sequence its rows are being copied from."""

    origin: PrefixKey | None
    own_bytes: int = 0
    cache: KVCache | None = None
    source: CachedSequence | None = None
    is_forgotten: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that do not belong to kept sequences."""
        return self.own_bytes + (0 if self.source is None else self.source.cache.nbytes)


@dataclass(frozen=True, slots=True)
class KVCacheFactory:
    """Creates the caches of a base, and knows their size in advance."""

    make: Callable[[KVRequest], KVCache]
    nbytes: Callable[[KVRequest], int]


class SequenceKVCache:
    """The owner of the caches of one kind, both kept and in use."""

    def __init__(
        self,
        tiers: AdapterCache,
        factory: KVCacheFactory,
        *,
        max_sequences: int = MAX_CACHED_SEQUENCES,
        cached_limit: int | None = None,
    ) -> None:
        """Start empty; the memory is that of the device tier.

        At most ``max_sequences`` are kept, in ``cached_limit`` bytes; None: no limit.
        """
        self._tiers, self._factory, self._max_sequences = tiers, factory, max_sequences
        self._cached_limit = cached_limit
        self._cached: list[CachedSequence] = []
        """The least recently used first."""
        self._active: list[_ActiveSequence] = []
        tiers.register_reclaimable(
            Tier.DEVICE, nbytes=lambda: self.cached_bytes, reclaim=self._evict
        )

    @contextmanager
    def allocate(self, request: KVRequest) -> Iterator[KVAllocation[KVCache]]:
        """Lend a cache; its first rows are those of a kept sequence with the same prefix."""
        text = _ActiveSequence(request.prefix_key)
        self._active.append(text)
        try:
            allocation = self._allocate(request, text)
        except BaseException:
            self._finish(text, ())
            raise
        try:
            yield allocation
        finally:
            written = max(allocation.cache.length - request.virtual_tokens, 0)
            ids = (allocation.completed or ())[:written]
            del allocation.cache
            self._finish(text, ids)

    def check_free_row(self, request: KVRequest) -> None:
        """Do nothing: a sequence waits for nothing but memory."""

    @property
    def free_rows(self) -> int | None:
        """None: there are as many as fit into the memory."""
        return None

    def forget(self, cache_key: str) -> None:
        """Drop what is kept for a key; its running sequences will keep nothing."""
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
        """Bytes of all caches, both kept and in use."""
        return self.cached_bytes + sum(text.nbytes for text in self._active)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the caches that no running sequence uses."""
        return sum(kept.cache.nbytes for kept in self._cached)

    def check_integrity(self) -> None:
        """Assert that each kept sequence has a row per token and a cache of its own."""
        with self._tiers.lock:
            allocated = [(text, text.cache) for text in self._active if text.cache is not None]
            caches = [*(kept.cache for kept in self._cached), *(cache for _, cache in allocated)]
            assert len({id(cache) for cache in caches}) == len(caches)
            assert all(text.own_bytes == cache.nbytes for text, cache in allocated)
            assert len(self._cached) <= self._max_sequences
            assert self._cached_limit is None or self.cached_bytes <= self._cached_limit
            for kept in self._cached:
                kept.cache.check_integrity()
                assert 0 < len(kept.ids) <= kept.cache.length

    def check_idle(self) -> None:
        """Assert that nothing is in use."""
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
        """Give a sequence the rows of the best match; return the number of tokens reused."""
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
        """Take out the longest match, the newest of several, until it is returned."""
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
        """Copy rows into a cache of the requested size, if both fit for a moment."""
        size = self._factory.nbytes(request)
        if not self._tiers.try_reserve(Tier.DEVICE, "kv", size, what=request.description):
            return False  # reading the tokens again beats evicting experts that are needed
        text.own_bytes = size
        text.cache = self._factory.make(request)
        text.cache.copy_from(cache, request.virtual_tokens + tokens)
        return True

    def _return_source(self, text: _ActiveSequence, *, is_kept: bool) -> None:
        """Put back the sequence that was copied from, or free it."""
        with self._tiers.lock:
            before = self.nbytes
            if is_kept and text.source is not None and not text.is_forgotten:
                self._cached.append(text.source)
            text.source = None
            self._release(before - self.nbytes)

    def _finish(self, text: _ActiveSequence, ids: Sequence[int]) -> None:
        """Keep the rows of ``ids``, replacing sequences that they continue."""
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
        """Free up to ``size`` bytes of kept caches, the least recently used first."""
        with self._tiers.lock:
            freed = 0
            while self._cached and freed < size:
                freed += self._cached.pop(0).cache.nbytes
            self._release(freed)

    def _release(self, size: int) -> None:
        """Release reserved bytes."""
        self._tiers.release(Tier.DEVICE, "kv", size)
