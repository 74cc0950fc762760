"""The KV store of a batch on a CUDA device: one static cache, and the sequences in its rows.

A captured step needs all of its sequences in one `StaticKVCache`, here the *arena*. It is allocated
for the first sequence. `ArenaPlan` decides its shape, once for a server: as many rows as a batch
has, with as much capacity as a part of the memory allows. A longer sequence waits until no row is
in use, then an arena of fewer, longer rows replaces this one. Where memory is short an arena has
fewer rows, at least one of exactly the requested capacity, so a sequence that fits alone always
gets a row. If jobs wait for rows later and there is memory again, no sequence starts until no row
is in use and a larger arena replaces this one. The arena counts as ``kv``, whole, and is reserved
before it is allocated. While no row is in use, `AdapterCache` may reclaim it, in any thread; so
this store shares its lock.

Rows of finished sequences are kept and found as in `SequenceKVCache`, by cache key, plan and
tokens. A sequence with merely a common prefix gets a copy; here it may also be that of the prompt
of a running sequence, as far as it was read. A step computes all rows up to the last one in use, so
a new sequence gets the first row that no running one has: what is kept there moves to a free row,
or replaces the least recently used kept sequence. Where no row is free, a sequence that continues a
kept one gets its row. An arena that is replaced keeps nothing.

Sequences are created in one thread.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from expertctl.engine.kv.kv_cache import (
    KVAllocation,
    KVRequest,
    PrefixKey,
    count_common_prefix,
)
from expertctl.engine.memory.adapter_cache import AdapterCache, Tier
from expertctl.engine.moe.cache_plan import TYPICAL_SEQUENCE_TOKENS
from expertctl.engine.torch.cuda_graph_step import (
    StaticKVCache,
    StaticKVRow,
    estimate_static_kv_bytes,
)
from expertctl.engine.torch.devices import translate_device_errors
from expertctl.errors import BudgetError
from expertctl.package.model_config import ModelConfig

ARENA_SHARES, BUFFER_SHARES = 3, 2
"""Beside the base there is memory for so many arenas and so many times the buffers of base steps:
one of each, and the rest for plans and their slots. So `EntryTable` evicts plans before an arena,
unless it is short of both."""

DRAIN_INTERVAL = 60.0
"""Seconds between two attempts to replace an arena of few rows while jobs wait for one."""
_CAPACITY_STEP = 64
_WAIT = "wait until running sequences have ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPlan:
    """The shapes that the arena of a server may have."""

    rows: int
    """Number of rows of the batch."""
    capacity: int
    """Tokens of a row, unless a sequence needs more."""
    longest: int
    """Tokens of the longest sequence that fits into the memory."""
    limit: int
    """Maximum bytes of an arena of several rows."""

    def choose_capacity(self, tokens: int) -> int:
        """Return the capacity of the rows that a sequence of so many tokens needs.

        Longer ones get a multiple of the usual capacity, so that a conversation that grows does not
        replace the arena in each turn.
        """
        rounded = -(-tokens // self.capacity) * self.capacity
        return max(tokens, min(rounded, self.longest))

    def choose_rows(self, row_bytes: int) -> int:
        """Return how many rows of this size the arena has, at least one."""
        return max(1, min(self.rows, self.limit // row_bytes))


SizeFunction = Callable[[int], int]
"""Bytes for so many tokens."""


def estimate_batch_bytes(
    rows: int, tokens: int, *, kv_bytes: SizeFunction, buffer_bytes: SizeFunction
) -> int:
    """Return the memory beside the base in which an arena has so many rows of so many tokens.

    ``kv_bytes`` is for one row, ``buffer_bytes`` for the whole batch.
    """
    return ARENA_SHARES * rows * kv_bytes(tokens) + BUFFER_SHARES * buffer_bytes(tokens)


def plan_arena(
    *,
    rows: int,
    context: int,
    memory: int | None,
    kv_bytes: SizeFunction,
    buffer_bytes: SizeFunction,
) -> ArenaPlan:
    """Plan the arena of a batch within so many bytes beside the base; None: without a limit.

    There are fewer rows where they would not hold half of a typical sequence, or of the longest one
    for which there is memory. Functions are those of `estimate_batch_bytes`.
    """
    if memory is None:
        limit = rows * kv_bytes(context)
        return ArenaPlan(rows=rows, capacity=context, longest=context, limit=limit)

    def find_longest(size: SizeFunction) -> int:
        return bisect_left(range(1, context + 1), True, key=lambda tokens: size(tokens) > memory)

    def find_capacity(count: int) -> int:
        sizes = partial(estimate_batch_bytes, kv_bytes=kv_bytes, buffer_bytes=buffer_bytes)
        return find_longest(partial(sizes, count))

    least = min(find_capacity(1), TYPICAL_SEQUENCE_TOKENS) // 2
    found = (find_capacity(rows >> halved) for halved in range(rows.bit_length()))
    capacity = _round_down(next(tokens for tokens in found if tokens >= least), context=context)
    longest = max(find_longest(lambda tokens: kv_bytes(tokens) + buffer_bytes(tokens)), capacity)
    limit = max(memory - BUFFER_SHARES * buffer_bytes(capacity), 0) // ARENA_SHARES
    return ArenaPlan(rows=rows, capacity=capacity, longest=longest, limit=limit)


def _round_down(tokens: int, *, context: int) -> int:
    """Return a capacity that attention kernels read well: the context, or a multiple of 64."""
    whole = tokens == context or tokens < _CAPACITY_STEP
    return max(1, tokens if whole else tokens - tokens % _CAPACITY_STEP)


@dataclass(slots=True, eq=False)
class _RowSequence:
    """A sequence in a row, and its tokens that are known: while it runs, those of its prompt."""

    origin: PrefixKey | None
    ids: tuple[int, ...]
    cache: StaticKVRow
    is_forgotten: bool = False

    def count_shared_tokens(self, request: KVRequest) -> int:
        """Return the number of tokens of a request that need not be read."""
        if self.origin is None or self.origin != request.prefix_key or self.is_forgotten:
            return 0
        if not request.reuse:
            return 0
        written = self.cache.length - request.virtual_tokens
        most = min(written, len(request.ids) - 1, request.capacity - request.virtual_tokens)
        found = max(0, min(count_common_prefix(self.ids, request.ids), most))
        return found if self.cache.can_continue(request.virtual_tokens + found) else 0

    def is_extended_by(self, other: "_RowSequence") -> bool:
        """Return whether another sequence starts with all of this one."""
        return self.origin == other.origin and self.ids == other.ids[: len(self.ids)]


class StaticKVStore:
    """The owner of the arena, and of the sequences in its rows, both kept and running."""

    def __init__(
        self,
        tiers: AdapterCache,
        config: ModelConfig,
        plan: ArenaPlan,
        *,
        dtype: torch.dtype,
        device: torch.device,
        cached_limit: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without an arena; the memory is that of the device tier.

        Sequences are kept in at most ``cached_limit`` bytes; None: in all rows.
        """
        self._tiers, self._config, self._plan = tiers, config, plan
        self._dtype, self._device, self._cached_limit = dtype, device, cached_limit
        self._clock = clock
        self._arena: StaticKVCache | None = None
        self._reserved = 0
        self._is_starting = False
        self._is_draining, self._drain_after = False, 0.0
        self._running: list[_RowSequence] = []
        self._cached: list[_RowSequence] = []
        """The least recently used first."""
        tiers.register_reclaimable(
            Tier.DEVICE, nbytes=lambda: self._reclaimable_bytes, reclaim=self._reclaim
        )

    @contextmanager
    def allocate(self, request: KVRequest) -> Iterator[KVAllocation[StaticKVRow]]:
        """Allocate a row; its first positions are those of a sequence with the same prefix.

        Raises:
            BudgetError: when no row is free, or none can be long enough while others are in use, or
                when the memory does not suffice.
        """
        text, reused = self._start(request)
        allocation = KVAllocation(text.cache, reused=reused)
        try:
            yield allocation
        finally:
            written = max(allocation.cache.length - request.virtual_tokens, 0)
            ids = (allocation.completed or ())[:written]
            del allocation.cache
            self._finish(text, ids)

    def check_free_row(self, request: KVRequest) -> None:
        """Check that the arena in use has a free row that is long enough for a request.

        Raises:
            BudgetError: when it has none, or when a larger one is to replace it.
        """
        if self._arena is None or not self._running:
            return
        if len(self._running) == self._arena.rows:
            self._is_draining |= self._should_drain(self._arena, request)
        elif self._is_draining:
            raise BudgetError(f"{request.description}: more rows are to be allocated", hint=_WAIT)
        _check_free_row(self._arena, request, used=len(self._running))

    @property
    def free_rows(self) -> int | None:
        """Number of free rows of the arena in use; None: none is, so another may replace it."""
        arena, used = self._arena, len(self._running)
        if arena is None or not used:
            return None
        return 0 if self._is_draining else arena.rows - used

    def forget(self, cache_key: str) -> None:
        """Drop what is kept for a key; its running sequences will keep nothing."""
        with self._tiers.lock:
            for text in self._running:
                text.is_forgotten |= text.origin is not None and text.origin.owner == cache_key
            self._cached = [
                kept
                for kept in self._cached
                if kept.origin is None or kept.origin.owner != cache_key
            ]

    def clear(self) -> None:
        """Drop all that is kept, and the arena if no row of it is in use."""
        with self._tiers.lock:
            self._cached = []
            self._reclaim(self._reclaimable_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return self._reserved

    @property
    def cached_bytes(self) -> int:
        """Bytes of the rows that no running sequence uses."""
        with self._tiers.lock:
            arena = self._arena
            if arena is None:
                return 0
            return self._reserved - len(self._running) * (arena.nbytes // arena.rows)

    def check_integrity(self) -> None:
        """Assert that each sequence has a row of its own, and that the arena is reserved."""
        with self._tiers.lock:
            arena, rows = self._arena, [text.cache for text in (*self._running, *self._cached)]
            assert self._reserved == (0 if arena is None else arena.nbytes)
            assert all(row.arena is arena for row in rows)
            assert len({row.number for row in rows}) == len(rows)
            assert len(self._cached) <= self._max_cached
            for kept in self._cached:
                kept.cache.check_integrity()
                assert 0 < len(kept.ids) <= kept.cache.length

    def check_idle(self) -> None:
        """Assert that nothing is in use."""
        assert not self._running

    @property
    def _reclaimable_bytes(self) -> int:
        """The arena can only be freed whole."""
        return 0 if self._running or self._is_starting else self._reserved

    @property
    def _max_cached(self) -> int:
        """Maximum number of kept sequences."""
        if self._arena is None:
            return 0
        rows, size = self._arena.rows, self._arena.nbytes // self._arena.rows
        return rows if self._cached_limit is None else min(rows, self._cached_limit // size)

    @translate_device_errors()
    def _start(self, request: KVRequest) -> tuple[_RowSequence, int]:
        """Return a sequence with its row, and the number of tokens reused."""
        with self._tiers.lock:
            self._is_starting = True  # from here on nobody reclaims the arena
        try:
            arena = self._prepare_arena(request)
            source = self._find_source(request)
            reused = 0 if source is None else source.count_shared_tokens(request)
            row = self._take_row(arena, source, request.virtual_tokens + reused)
            text = _RowSequence(request.prefix_key, tuple(request.ids), row)
            self._running.append(text)
        finally:
            self._is_starting = False
        return text, reused

    def _prepare_arena(self, request: KVRequest) -> StaticKVCache:
        """Return the arena, which has a free row for a request; replace it if it is too short."""
        if self._arena is not None and self._running:
            self.check_free_row(request)
            return self._arena
        capacity = self._plan.choose_capacity(request.capacity)
        rows = self._plan.choose_rows(self._estimate_bytes(1, capacity))
        if self._arena is not None and self._is_good_enough(self._arena, request, rows, capacity):
            return self._arena
        return self._replace_arena(request, rows, capacity)  # nothing here references the old one

    def _is_good_enough(
        self, arena: StaticKVCache, request: KVRequest, rows: int, capacity: int
    ) -> bool:
        """Return whether an unused arena serves a request.

        One of the wanted shape does, and so does a smaller one while there is no memory for that.
        One that is too long does not: the buffers of steps may be reserved for the wanted capacity.
        """
        if (arena.rows, arena.capacity) == (rows, capacity):
            return True
        if not request.capacity <= arena.capacity <= capacity:
            return False
        missing = self._estimate_bytes(rows, capacity) - arena.nbytes
        if missing <= 0 or not self._try_reserve(missing, request):
            return True
        self._tiers.release(Tier.DEVICE, "kv", missing)
        return False

    def _should_drain(self, arena: StaticKVCache, request: KVRequest) -> bool:
        """Return whether to wait for an arena of more rows, for which there is memory now.

        All rows of a smaller one are in use. It is asked for once in a while only, since the memory
        may be gone again when no row is in use.
        """
        capacity = self._plan.choose_capacity(arena.capacity)
        rows = self._plan.choose_rows(self._estimate_bytes(1, capacity))
        now = self._clock()
        if arena.rows >= rows or now < self._drain_after:
            return False
        self._drain_after = now + DRAIN_INTERVAL
        return not self._is_good_enough(arena, request, rows, capacity)

    def _replace_arena(self, request: KVRequest, rows: int, capacity: int) -> StaticKVCache:
        """Allocate an arena of the wanted shape, or with as few rows as memory requires."""
        self._drop_arena()
        while rows and not self._try_reserve(self._estimate_bytes(rows, capacity), request):
            rows //= 2
        if not rows:
            rows, capacity = 1, request.capacity
            size = self._estimate_bytes(rows, capacity)
            self._tiers.reserve(Tier.DEVICE, "kv", size, what=request.description)
        self._reserved = self._estimate_bytes(rows, capacity)
        try:
            self._arena = StaticKVCache(
                self._config, rows=rows, capacity=capacity, dtype=self._dtype, device=self._device
            )
        except BaseException:
            self._drop_arena()
            raise
        return self._arena

    def _try_reserve(self, size: int, request: KVRequest) -> bool:
        """Reserve bytes, if necessary in place of plans that nobody uses."""
        try:
            self._tiers.reserve(Tier.DEVICE, "kv", size, what=request.description)
        except BudgetError:
            return False
        return True

    def _drop_arena(self) -> None:
        """Free the arena, and then its bytes."""
        with self._tiers.lock:
            self._cached, self._arena = [], None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # else torch keeps the block, in which plans do not fit
            size, self._reserved = self._reserved, 0
            self._tiers.release(Tier.DEVICE, "kv", size)

    def _reclaim(self, size: int) -> None:
        """Free the arena if that frees anything now."""
        with self._tiers.lock:
            if size > 0 and self._reclaimable_bytes:
                self._drop_arena()

    def _find_source(self, request: KVRequest) -> _RowSequence | None:
        """Return the sequence with the longest common prefix, the newest of several."""
        texts = [*self._running, *self._cached]
        best = max(
            reversed(texts), key=lambda text: text.count_shared_tokens(request), default=None
        )
        return best if best is not None and best.count_shared_tokens(request) else None

    def _take_row(
        self, arena: StaticKVCache, source: _RowSequence | None, length: int
    ) -> StaticKVRow:
        """Return the first row that no running sequence has, with ``length`` rows of the source.

        A kept sequence that goes on where all rows are filled stays where it is. A conversation
        does not displace one that only has the same beginning.
        """
        running = {text.cache.number for text in self._running}
        free = set(range(arena.rows)) - running - {kept.cache.number for kept in self._cached}
        number = min(set(range(arena.rows)) - running)
        here = next((kept for kept in self._cached if kept.cache.number == number), None)
        is_kept = source is not None and source in self._cached
        is_continued = is_kept and source is not None and 2 * length >= source.cache.length
        if source is not None and is_continued and (here is source or (here and not free)):
            return self._take_over(source, length)
        if here is not None and not self._move_away(arena, here, free, keep=source):
            return self._take_over(here, length)
        row = arena.get_row(number)
        if source is not None:
            row.copy_from(source.cache, length)
        if source is not None and is_kept:
            self._cached.remove(source)
            self._cached += [] if is_continued else [source]  # it was used just now
        return row

    def _take_over(self, source: _RowSequence, length: int) -> StaticKVRow:
        """Return the row of a kept sequence, rewound to what is continued."""
        self._cached.remove(source)
        source.cache.rewind(length)
        return source.cache

    def _move_away(
        self,
        arena: StaticKVCache,
        here: _RowSequence,
        free: set[int],
        *,
        keep: _RowSequence | None,
    ) -> bool:
        """Move a kept sequence to the last free row, or in place of the least recently used one.

        That may be itself. Return False if only it could be evicted for that, and is to be kept.
        """
        target = max(free, default=None)
        if target is None:
            evicted = next((kept for kept in self._cached if kept is not keep), None)
            if evicted is None:
                return False
            self._cached.remove(evicted)
            if evicted is here:
                return True
            target = evicted.cache.number
        row = arena.get_row(target)
        row.copy_from(here.cache, here.cache.length)
        here.cache = row
        return True

    def _finish(self, text: _RowSequence, ids: Sequence[int]) -> None:
        """Keep the row of ``ids``, replacing sequences that it continues."""
        with self._tiers.lock:
            self._running.remove(text)
            self._is_draining &= bool(self._running)
            if ids and text.origin is not None and not text.is_forgotten:
                text.ids = tuple(ids)
                others = [kept for kept in self._cached if not kept.is_extended_by(text)]
                self._cached = [*others, text]
                del self._cached[: max(0, len(self._cached) - self._max_cached)]
            self._tiers.release(Tier.DEVICE, "kv", 0)  # others wait for memory to be reclaimable

    def _estimate_bytes(self, rows: int, capacity: int) -> int:
        return estimate_static_kv_bytes(
            self._config, capacity=capacity, dtype=self._dtype, rows=rows
        )


def _check_free_row(arena: StaticKVCache, request: KVRequest, *, used: int) -> None:
    """Raise `BudgetError` where a request has to wait for running sequences."""
    if request.capacity > arena.capacity:
        raise BudgetError(
            f"{request.description}: the rows in use have {arena.capacity} tokens", hint=_WAIT
        )
    if used == arena.rows:
        raise BudgetError(f"{request.description}: all {used} rows are in use", hint=_WAIT)
