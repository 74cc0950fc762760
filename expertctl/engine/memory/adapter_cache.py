"""The adapter cache: experts and compiled plans in each memory tier, within one budget.

Tiers are SSD → RAM → device. RAM holds the verified bytes of an expert, the device tier the
compiled plan. Without an accelerator both tiers are in the same memory and share one
`MemoryBudget`.

Memory for an entry is freed *before* it is loaded. Pinned entries stay, and so does what a resident
plan uses in place; `EntryTable` chooses which of the others is evicted first. Borrowing uses
``with``, so nothing stays pinned.

All methods are thread-safe. Every decision is made under one lock, on entries that are already in
the budget; bytes are read, multiplied and packed outside of it. An entry is loaded once: another
request that needs it waits, and loads it itself only if that fails, so a request gets errors of its
own reading only. No request waits for what only another one needs, so there is no deadlock.

`AdapterPrefetcher` loads the expected entries of planned jobs one after another, those of earlier
jobs first, in threads that only read and verify. `AdapterCache` decides, and for a prefetch evicts
nothing that is in use or needed sooner. A thread ends when nothing is left to load, so an idle
engine has none.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from expertctl.engine.memory.budget import (
    ABSENT,
    CacheEntry,
    EntryTable,
    ExpectationId,
    MemoryBudget,
    Purpose,
    ReclaimableMemory,
)
from expertctl.reference import Digest

CachedValue = TypeVar("CachedValue")


class Tier(Enum):
    """A memory that holds entries."""

    RAM = "ram"
    DEVICE = "device"


CacheKey = tuple[Tier, Digest]


@dataclass(frozen=True, slots=True)
class CacheRequest(Generic[CachedValue]):
    """An entry that a request needs: how to load it, and its exact size.

    ``depends_on`` are entries whose memory it uses; they stay as long as it does. ``traffic`` is
    False for entries derived from other entries, so that a plan and its experts are not both
    counted.
    """

    key: CacheKey
    nbytes: int
    description: str
    load: Callable[[], CachedValue]
    depends_on: tuple[CacheKey, ...] = ()
    traffic: bool = True


@dataclass(slots=True)
class TierTraffic:
    """Counts of entries found and loaded, evictions and bytes of one tier."""

    hits: int = 0
    loads: int = 0
    evictions: int = 0
    waits: int = 0
    """Number of requests that waited for a load already in progress."""
    nbytes: int = 0
    """Bytes that were loaded, whether used in the end or not."""


class AdapterCache:
    """The one owner of all resident entries."""

    def __init__(self, *, ram: MemoryBudget, device: MemoryBudget, workers: int = 2) -> None:
        """Start empty; pass the same budget twice where both tiers are one memory."""
        self._budgets = {Tier.RAM: ram, Tier.DEVICE: device}
        self._workers = workers
        self._memory = EntryTable[CacheKey](on_evict=self._count_eviction)
        self._tickets = 0
        self._lock = threading.RLock()
        """Acquired by ``with``, atomically: a signal finds it held inside the block, or not at
        all."""
        self._changed = threading.Condition(self._lock)
        self.traffic = {tier: TierTraffic() for tier in Tier}

    def begin_request(self) -> None:
        """Age all entries by one request."""
        with self._lock:
            self._memory.now += 1

    def contains(self, key: CacheKey) -> bool:
        """Return whether an entry is resident; other threads may change that at any time."""
        return self._memory.find_loaded(key) is not None

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The reentrant lock held for every decision."""
        return self._lock

    def register_reclaimable(
        self, tier: Tier, *, nbytes: Callable[[], int], reclaim: Callable[[int], None]
    ) -> None:
        """Register an owner of cached KV that can be freed on demand.

        ``nbytes`` is the size that it can free; ``reclaim`` frees at least the given size. Both are
        called by any thread with the `lock` held, which also guards the owner's state.
        """
        with self._lock:
            self._memory.reclaimable.append(ReclaimableMemory(self._budgets[tier], nbytes, reclaim))

    @contextmanager
    def pin(self, requests: Sequence[CacheRequest[CachedValue]]) -> Iterator[list[CachedValue]]:
        """Borrow entries of one tier, loading missing ones, several at once.

        Raises:
            BudgetError: when they cannot fit beside pinned entries; nothing is evicted then.
        """
        keys, held = [item.key for item in requests], self._pin_all(requests)
        del requests  # a request may reference entries that must be evictable meanwhile
        try:
            yield [held[key].value for key in keys]  # type: ignore[misc]  # a key always names the same kind
        finally:
            self._unpin(held.values())

    @contextmanager
    def pin_if_present(self, key: CacheKey) -> Iterator[object | None]:
        """Borrow an entry if it is resident."""
        with self._lock:
            entry = self._memory.find_loaded(key)
            found = [] if entry is None else [entry]
            self._pin(found)
            self.traffic[key[0]].hits += sum(entry.traffic for entry in found)
        try:
            yield found[0].value if found else None
        finally:
            self._unpin(found)

    @contextmanager
    def expect(self, keys: Iterable[CacheKey]) -> Iterator[ExpectationId]:
        """Announce entries that will be needed; they are evicted last, the soonest needed latest.

        Entries that were fetched but never used are dropped at the end, unless still expected.
        """
        with self._lock:
            self._tickets += 1
            ticket = self._tickets
            self._memory.expected[ticket] = frozenset(keys)
        try:
            yield ticket
        finally:
            with self._lock:
                for key in self._memory.expected.pop(ticket):
                    self._memory.evict_if_unused(key)
                self._changed.notify_all()

    def fetch(self, item: CacheRequest[CachedValue], ticket: ExpectationId) -> None:
        """Load an expected entry, once there is memory that is not needed sooner.

        Returns when it is resident, loading, or no longer expected. If loading fails, the request
        that needs it loads it again, and gets the error.
        """
        entry = self._start_fetch(item, ticket)
        if entry is not None:
            with suppress(Exception):
                self._load_entry(entry, item)

    @contextmanager
    def reserve_during(
        self, tier: Tier, purpose: Purpose, size: int, *, what: str
    ) -> Iterator[None]:
        """Reserve bytes for the length of a ``with`` block; raises as `reserve` does."""
        self.reserve(tier, purpose, size, what=what)
        try:
            yield
        finally:
            self.release(tier, purpose, size)

    def reserve(self, tier: Tier, purpose: Purpose, size: int, *, what: str) -> None:
        """Reserve bytes for something else in the same memory, evicting entries for it.

        Raises:
            BudgetError: when they cannot fit beside pinned entries; nothing is evicted then.
        """
        budget = self._budgets[tier]
        with self._lock:
            self._free_memory(budget, purpose, size, what=what)
            budget.reserve(purpose, size, what=what)

    def try_reserve(self, tier: Tier, purpose: Purpose, size: int, *, what: str) -> bool:
        """Reserve bytes if that evicts nothing but cached KV; return whether it did."""
        budget = self._budgets[tier]
        with self._lock:
            entries = self._memory.entries.keys()
            if size > self._memory.count_available(budget, keep=entries):
                return False
            self._memory.free_memory(budget, size, keep=entries)
            budget.reserve(purpose, size, what=what)
            return True

    def release(self, tier: Tier, purpose: Purpose, size: int) -> None:
        """Release bytes reserved by `reserve`."""
        with self._lock:
            self._budgets[tier].release(purpose, size)
            self._changed.notify_all()

    def forget(self, key: CacheKey) -> None:
        """Drop an entry and those that use its memory; none of them may be pinned."""
        with self._lock:
            while key in self._memory.entries and not self.contains(key):
                self._changed.wait()
            self._memory.evict_dependents(key)
            if key in self._memory.entries:
                self._memory.evict(key)

    def clear(self) -> None:
        """Drop everything that is neither pinned nor loading."""
        with self._lock:
            self._memory.clear()

    def check_idle(self) -> None:
        """Assert the invariants between requests: nothing is borrowed, expected or loading."""
        with self._lock:
            self._memory.check_idle()
            for budget in self._budgets.values():
                assert budget.reserved_bytes("experts") == self._memory.count_bytes(budget)
                assert budget.reserved_bytes("buffers") == 0

    def check_integrity(self) -> None:
        """Assert the invariants."""
        with self._lock:
            self._memory.check_integrity()
            for budget in self._budgets.values():
                budget.check_integrity()

    def _pin_all(
        self, requests: Sequence[CacheRequest[CachedValue]]
    ) -> dict[CacheKey, CacheEntry[CacheKey]]:
        """Pin resident entries, load the rest and pin them too; all or nothing.

        What another request failed to load is tried again.
        """
        missing = {item.key: item for item in requests}
        held: dict[CacheKey, CacheEntry[CacheKey]] = {}
        try:
            while missing:
                self._try_pin(list(missing.values()), held)
                missing = {key: item for key, item in missing.items() if key not in held}
        except BaseException:
            self._unpin(held.values())
            raise
        return held

    def _try_pin(
        self,
        requests: Sequence[CacheRequest[CachedValue]],
        pinned: dict[CacheKey, CacheEntry[CacheKey]],
    ) -> None:
        """Add to ``pinned`` the entries that are resident, loaded by others, or loaded here."""
        own: dict[CacheKey, CacheEntry[CacheKey]] = {}
        try:
            with self._lock:
                entries = self._memory.entries
                there = {i.key: entries[i.key] for i in requests if i.key in entries}
                fresh = {key for key, entry in there.items() if not entry.is_used}
                self._pin(there.values())
                pinned.update(there)
                self._reserve_absent([item for item in requests if item.key not in there], own)
                pinned.update(own)
            self._load_all([item for item in requests if item.key in own], own)
        finally:
            for key, entry in own.items():  # if one failed, also those not started
                self._finish_load(entry, key)
        with self._lock:
            self._wait_for_loads(there, pinned)
            for item in requests:
                if item.traffic and item.key in pinned:
                    brought = item.key in own or item.key in fresh
                    self.traffic[item.key[0]].loads += brought
                    self.traffic[item.key[0]].hits += not brought

    def _pin(self, entries: Iterable[CacheEntry[CacheKey]]) -> None:
        for entry in entries:
            entry.record_use(self._memory.now)  # first: what is pinned was used
            entry.pins += 1

    def _unpin(self, entries: Iterable[CacheEntry[CacheKey]]) -> None:
        with self._lock:
            for entry in entries:
                entry.pins -= 1
            self._changed.notify_all()

    def _reserve_absent(
        self,
        absent: Sequence[CacheRequest[CachedValue]],
        new_entries: dict[CacheKey, CacheEntry[CacheKey]],
    ) -> None:
        """Reserve the size of all, and add the entries to load to ``new_entries``, pinned."""
        if not absent:
            return
        budget = self._budgets[absent[0].key[0]]
        what = ", ".join(item.description for item in absent)
        self._free_memory(budget, "experts", sum(item.nbytes for item in absent), what=what)
        for item in absent:
            # another request may have started to load one while this one waited for memory
            if item.key not in self._memory.entries:
                new_entries[item.key] = self._create_entry(item)
                self._add_entry(item, new_entries[item.key], what)
        self._pin(new_entries.values())

    def _create_entry(self, item: CacheRequest[CachedValue]) -> CacheEntry[CacheKey]:
        budget = self._budgets[item.key[0]]
        now, count = self._memory.now, self._memory.get_past_count(item.key)
        return CacheEntry(
            budget, item.nbytes, now, item.depends_on, traffic=item.traffic, count=count
        )

    def _add_entry(
        self, item: CacheRequest[CachedValue], entry: CacheEntry[CacheKey], what: str
    ) -> CacheEntry[CacheKey]:
        """Add an entry that is about to be loaded; the caller must finish its load in any case."""
        entry.budget.reserve("experts", item.nbytes, what=what)
        self._memory.entries[item.key] = entry
        return entry

    def _load_all(
        self,
        items: Sequence[CacheRequest[CachedValue]],
        new_entries: Mapping[CacheKey, CacheEntry[CacheKey]],
    ) -> None:
        """Load the added entries."""

        def bring(item: CacheRequest[CachedValue]) -> None:
            self._load_entry(new_entries[item.key], item)

        with ThreadPoolExecutor(self._workers, thread_name_prefix="load") as pool:
            each = pool.map if len(items) > 1 else map
            list(each(bring, items))

    def _load_entry(self, entry: CacheEntry[CacheKey], item: CacheRequest[CachedValue]) -> None:
        try:
            entry.value = item.load()  # from here on no frame references it
        finally:
            self._finish_load(entry, item.key)

    def _finish_load(self, entry: CacheEntry[CacheKey], key: CacheKey) -> None:
        """Publish a loaded entry; remove one that failed or is no longer needed."""
        with self._lock:
            if entry.is_loaded or self._memory.entries.get(key) is not entry:
                return
            if entry.value is ABSENT:
                del self._memory.entries[key]
                entry.budget.release("experts", entry.nbytes)
            else:
                entry.is_loaded = True
                self.traffic[key[0]].nbytes += entry.nbytes
                self._memory.evict_if_unused(key)
            self._changed.notify_all()

    def _wait_for_loads(
        self,
        loading: Mapping[CacheKey, CacheEntry[CacheKey]],
        pinned: dict[CacheKey, CacheEntry[CacheKey]],
    ) -> None:
        """Wait for loads by other requests; remove failed ones from ``pinned``."""
        for key, entry in loading.items():
            self.traffic[key[0]].waits += self._is_loading(key, entry)
            while self._is_loading(key, entry):
                self._changed.wait()
            if not entry.is_loaded:
                del pinned[key]

    def _is_loading(self, key: CacheKey, entry: CacheEntry[CacheKey]) -> bool:
        return not entry.is_loaded and self._memory.entries.get(key) is entry

    def _start_fetch(
        self, item: CacheRequest[CachedValue], ticket: ExpectationId
    ) -> CacheEntry[CacheKey] | None:
        with self._lock:
            while ticket in self._memory.expected and item.key not in self._memory.entries:
                if self._free_spare_memory(item, ticket):
                    return self._add_entry(item, self._create_entry(item), item.description)
                self._changed.wait()
            return None

    def _free_spare_memory(self, item: CacheRequest[CachedValue], ticket: ExpectationId) -> bool:
        """Free memory for an expected entry without evicting what is needed sooner, if possible."""
        budget, sooner = self._budgets[item.key[0]], self._memory.list_needed_by(ticket)
        if item.nbytes > self._memory.count_available(budget, keep=sooner):
            return False
        self._memory.free_memory(budget, item.nbytes, keep=sooner)
        return True

    def _free_memory(self, budget: MemoryBudget, purpose: Purpose, size: int, *, what: str) -> None:
        """Free so many bytes, if necessary after unpinned entries have finished loading."""
        while size > (room := self._memory.count_available(budget)):
            if size > room + self._memory.count_loading(budget):
                raise budget.make_error(purpose, size, what=what)
            self._changed.wait()
        self._memory.free_memory(budget, size)

    def _count_eviction(self, key: CacheKey) -> None:
        self.traffic[key[0]].evictions += 1


@dataclass(frozen=True, slots=True)
class _PrefetchItem(Generic[CachedValue]):
    request: CacheRequest[CachedValue]
    expectation: ExpectationId


class AdapterPrefetcher(Generic[CachedValue]):
    """The owner of the prefetch queue."""

    def __init__(self, tiers: AdapterCache, *, workers: int = 1) -> None:
        """Start with an empty queue; one thread reads at disk speed, and another one hashes."""
        self._tiers, self._workers = tiers, workers
        self._needs: deque[_PrefetchItem[CachedValue]] = deque()
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._threads = set[threading.Thread]()

    @contextmanager
    def expect(
        self, requests: Sequence[CacheRequest[CachedValue]], *, plan: CacheKey | None = None
    ) -> Iterator[None]:
        """Start loading what a job will need, unless its compiled plan is resident.

        Leave the block when the job has pinned its entries, or is cancelled: entries still missing
        are not loaded any more, and those loaded but unneeded are evicted.
        """
        ready = plan is not None and self._tiers.contains(plan)
        needed = () if ready else requests
        keys = [item.key for item in needed]
        with self._tiers.expect(keys if plan is None else [*keys, plan]) as ticket:
            absent = (item for item in needed if not self._tiers.contains(item.key))
            self._enqueue([_PrefetchItem(item, ticket) for item in absent])
            yield

    def wait_until_idle(self) -> None:
        """Return when the queue is empty and all loads ended."""
        with self._lock:
            self._idle.wait_for(lambda: not self._worker_count)

    def check_integrity(self) -> None:
        """Assert that the queue is empty or has a thread."""
        with self._lock:
            assert self._worker_count <= self._workers
            assert self._worker_count or not self._needs

    @property
    def _worker_count(self) -> int:
        """Number of threads; one that could not start does not count."""
        return sum(thread.is_alive() for thread in self._threads)

    def _enqueue(self, needs: Sequence[_PrefetchItem[CachedValue]]) -> None:
        with self._lock:
            self._needs.extend(needs)
            new = min(self._workers, len(self._needs)) - self._worker_count
            for _ in range(max(0, new)):
                thread = threading.Thread(target=self._run_worker, name="prefetch", daemon=True)
                self._threads.add(thread)
                thread.start()

    def _run_worker(self) -> None:
        while (need := self._take_next()) is not None:
            with suppress(BaseException):  # whatever ends a load, its request loads again
                self._tiers.fetch(need.request, need.expectation)
            del need  # its references belong to the job

    def _take_next(self) -> _PrefetchItem[CachedValue] | None:
        with self._lock:
            if self._needs:
                return self._needs.popleft()
            self._threads.discard(threading.current_thread())
            self._idle.notify_all()
            return None
