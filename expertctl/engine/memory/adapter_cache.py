"""Residency: which experts and compiled plans are in which memory, within one budget.

SSD → RAM → device. RAM holds an expert's verified bytes, the device tier what is computed with: the
compiled plan. Without an accelerator both tiers lie in the same memory and share one `Budget`.

Rules: room for an entry is made *before* it is loaded; what is pinned stays, and so does what a
resident plan uses in place; `eviction` says what of the rest goes first. Borrowing is by ``with``,
so nothing is left pinned.

Any thread may ask. Every decision is made under one lock, on entries that are in the ledger
already; bytes are read, multiplied and packed outside of it. What is on its way is brought once:
another request that wants it waits, and brings it itself only if that fails, so a request gets
errors of its own reading only. None waits for what only another one needs, so none waits for ever.

Experts brought before they are asked for: the needs of planned jobs.

A caller that knows what a job will need announces it for as long as that holds. The needs are
brought one after another, those of earlier jobs first, by threads that only read and verify:
`AdapterCache` decides, and evicts nothing for them that is in use or needed sooner. A thread lives as long
as there is something to bring, so an idle engine has none.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from expertctl.digest import Digest
from expertctl.engine.memory.budget import (
    ABSENT,
    CacheEntry,
    EntryTable,
    ExpectationId,
    MemoryBudget,
    Purpose,
    ReclaimableMemory,
)

CachedValue = TypeVar("CachedValue")


class Tier(Enum):
    """A memory that holds entries."""

    RAM = "ram"
    DEVICE = "device"


CacheKey = tuple[Tier, Digest]


@dataclass(frozen=True, slots=True)
class CacheRequest(Generic[CachedValue]):
    """Something that a request needs: how to get it, and what it will cost exactly.

    ``uses`` are entries whose memory it refers to; they stay as long as it does. What only follows
    from other entries is no ``traffic``.
    """

    key: CacheKey
    nbytes: int
    description: str
    load: Callable[[], CachedValue]
    depends_on: tuple[CacheKey, ...] = ()
    traffic: bool = True


@dataclass(slots=True)
class TierTraffic:
    """How often something was there already, and how often it had to be brought for its use."""

    hits: int = 0
    loads: int = 0
    evictions: int = 0
    waits: int = 0
    """How often a request waited for what was on its way."""
    nbytes: int = 0
    """Bytes that were brought, needed in the end or not."""


class AdapterCache:
    """The one owner of what is resident."""

    def __init__(self, *, ram: MemoryBudget, device: MemoryBudget, workers: int = 2) -> None:
        """Start empty; give the same budget twice where both are one memory."""
        self._budgets = {Tier.RAM: ram, Tier.DEVICE: device}
        self._workers = workers
        self._memory = EntryTable[CacheKey](on_evict=self._count_eviction)
        self._tickets = 0
        self._lock = threading.RLock()
        """Taken by ``with``, at once: a signal finds it held within the block, or not at all."""
        self._changed = threading.Condition(self._lock)
        self.traffic = {tier: TierTraffic() for tier in Tier}

    def begin_request(self) -> None:
        """Let everything grow older by one request."""
        with self._lock:
            self._memory.now += 1

    def contains(self, key: CacheKey) -> bool:
        """Tell whether an entry is resident; where there are other threads, it was."""
        return self._memory.find_loaded(key) is not None

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held for every decision; may be taken again by the thread that holds it."""
        return self._lock

    def register_reclaimable(
        self, tier: Tier, *, nbytes: Callable[[], int], reclaim: Callable[[int], None]
    ) -> None:
        """Register an owner that keeps rows of keys and values until room is needed.

        ``nbytes`` is what it can spare; ``give_up`` releases at least so many of them. Both are
        called by any thread, with the `lock` held, which guards the owner's state, too.
        """
        with self._lock:
            self._memory.reclaimable.append(ReclaimableMemory(self._budgets[tier], nbytes, reclaim))

    @contextmanager
    def pin(self, requests: Sequence[CacheRequest[CachedValue]]) -> Iterator[list[CachedValue]]:
        """Borrow entries of one tier, loading those that are absent, several at once.

        Raises:
            BudgetError: when they cannot fit beside what is pinned; nothing is evicted then.
        """
        keys, held = [item.key for item in requests], self._pin_all(requests)
        del requests  # what loads an entry may refer to others, which must be free to go meanwhile
        try:
            yield [held[key].value for key in keys]  # type: ignore[misc]  # a key always names the same kind
        finally:
            self._unpin(held.values())

    @contextmanager
    def pin_if_present(self, key: CacheKey) -> Iterator[object | None]:
        """Borrow an entry if it is there."""
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
        """Announce what will be needed; it is evicted after all else, what is needed soonest last.

        What was fetched for it but never used goes at the end, unless it is still expected.
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
        """Bring what is expected, once there is room that is not needed sooner.

        Returns when it is there, on its way, or expected no more. If it fails, the request that
        needs it brings it again, and gets the error.
        """
        entry = self._start_fetch(item, ticket)
        if entry is not None:
            with suppress(Exception):
                self._load_entry(entry, item)

    @contextmanager
    def reserve_during(
        self, tier: Tier, purpose: Purpose, size: int, *, what: str
    ) -> Iterator[None]:
        """Hold bytes for something else in the same memory, evicting entries for it.

        Raises:
            BudgetError: when they cannot fit beside what is pinned.
        """
        self.reserve(tier, purpose, size, what=what)
        try:
            yield
        finally:
            self.release(tier, purpose, size)

    def reserve(self, tier: Tier, purpose: Purpose, size: int, *, what: str) -> None:
        """Enter bytes of something else in the same memory, evicting entries for it.

        Raises:
            BudgetError: when they cannot fit beside what is pinned; nothing is evicted then.
        """
        budget = self._budgets[tier]
        with self._lock:
            self._free_memory(budget, purpose, size, what=what)
            budget.reserve(purpose, size, what=what)

    def try_reserve(self, tier: Tier, purpose: Purpose, size: int, *, what: str) -> bool:
        """Enter bytes if that evicts nothing but kept rows; tell whether it did."""
        budget = self._budgets[tier]
        with self._lock:
            entries = self._memory.entries.keys()
            if size > self._memory.count_available(budget, keep=entries):
                return False
            self._memory.free_memory(budget, size, keep=entries)
            budget.reserve(purpose, size, what=what)
            return True

    def release(self, tier: Tier, purpose: Purpose, size: int) -> None:
        """Strike out bytes that `reserve` entered."""
        with self._lock:
            self._budgets[tier].release(purpose, size)
            self._changed.notify_all()

    def forget(self, key: CacheKey) -> None:
        """Drop an entry, if it is there, and what uses its memory; nothing of it may be pinned."""
        with self._lock:
            while key in self._memory.entries and not self.contains(key):
                self._changed.wait()
            self._memory.evict_dependents(key)
            if key in self._memory.entries:
                self._memory.evict(key)

    def clear(self) -> None:
        """Drop everything that is not pinned, nor on its way."""
        with self._lock:
            self._memory.clear()

    def check_idle(self) -> None:
        """Assert what holds between requests: nothing is borrowed, expected or on its way."""
        with self._lock:
            self._memory.check_idle()
            for budget in self._budgets.values():
                assert budget.reserved_bytes("experts") == self._memory.count_bytes(budget)
                assert budget.reserved_bytes("buffers") == 0

    def check_integrity(self) -> None:
        """Assert what must always hold."""
        with self._lock:
            self._memory.check_integrity()
            for budget in self._budgets.values():
                budget.check_integrity()

    def _pin_all(
        self, requests: Sequence[CacheRequest[CachedValue]]
    ) -> dict[CacheKey, CacheEntry[CacheKey]]:
        """Pin what is there, bring the rest and pin that too; all or nothing.

        What another request failed to bring is tried again.
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
        """Add to ``held``, pinned, what is there, what others bring, and what is brought here."""
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
            for key, entry in own.items():  # if one failed, those not begun, too
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
        """Enter the cost of all, and into ``own`` the entries that are to be brought, pinned."""
        if not absent:
            return
        budget, what = (
            self._budgets[absent[0].key[0]],
            ", ".join(item.description for item in absent),
        )
        self._free_memory(budget, "experts", sum(item.nbytes for item in absent), what=what)
        for item in absent:
            # while room was waited for, another may have begun to bring one
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
        """Enter what is on its way; the caller brings it and settles it, whatever happens."""
        entry.budget.reserve("experts", item.nbytes, what=what)
        self._memory.entries[item.key] = entry
        return entry

    def _load_all(
        self,
        items: Sequence[CacheRequest[CachedValue]],
        new_entries: Mapping[CacheKey, CacheEntry[CacheKey]],
    ) -> None:
        """Load what was entered."""

        def bring(item: CacheRequest[CachedValue]) -> None:
            self._load_entry(new_entries[item.key], item)

        with ThreadPoolExecutor(self._workers, thread_name_prefix="load") as pool:
            each = pool.map if len(items) > 1 else map
            list(each(bring, items))

    def _load_entry(self, entry: CacheEntry[CacheKey], item: CacheRequest[CachedValue]) -> None:
        try:
            entry.value = item.load()  # from here on no frame refers to it
        finally:
            self._finish_load(entry, item.key)

    def _finish_load(self, entry: CacheEntry[CacheKey], key: CacheKey) -> None:
        """Let what came be used; strike out what did not, and what is not needed any more."""
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
        """Wait for what others bring; what they could not bring is taken from ``held``."""
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
        """Make room for what is expected, sparing what is needed sooner, if that is possible."""
        budget, sooner = self._budgets[item.key[0]], self._memory.list_needed_by(ticket)
        if item.nbytes > self._memory.count_available(budget, keep=sooner):
            return False
        self._memory.free_memory(budget, item.nbytes, keep=sooner)
        return True

    def _free_memory(self, budget: MemoryBudget, purpose: Purpose, size: int, *, what: str) -> None:
        """Make so many bytes free, once entries on their way that are not pinned have landed."""
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
    """The owner of the queue of known needs."""

    def __init__(self, tiers: AdapterCache, *, workers: int = 1) -> None:
        """Begin with no need; one thread reads as fast as a disk gives, and hashes on another."""
        self._tiers, self._workers = tiers, workers
        self._needs: deque[_PrefetchItem[CachedValue]] = deque()
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._threads = set[threading.Thread]()

    @contextmanager
    def expect(
        self, requests: Sequence[CacheRequest[CachedValue]], *, plan: CacheKey | None = None
    ) -> Iterator[None]:
        """Begin to bring what a job will need, unless its compiled plan is there.

        Leave it when the job has pinned what it needs, or is given up: what is absent by then is
        not brought, and what came but is not needed is evicted.
        """
        ready = plan is not None and self._tiers.contains(plan)
        needed = () if ready else requests
        keys = [item.key for item in needed]
        with self._tiers.expect(keys if plan is None else [*keys, plan]) as ticket:
            absent = (item for item in needed if not self._tiers.contains(item.key))
            self._enqueue([_PrefetchItem(item, ticket) for item in absent])
            yield

    def wait_until_idle(self) -> None:
        """Return when there is nothing left to bring."""
        with self._lock:
            self._idle.wait_for(lambda: not self._worker_count)

    def check_integrity(self) -> None:
        """Assert that every need has a thread that will come to it."""
        with self._lock:
            assert self._worker_count <= self._workers
            assert self._worker_count or not self._needs

    @property
    def _worker_count(self) -> int:
        """How many threads there are; one that could not begin is none."""
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
            with suppress(BaseException):  # whatever ends a reading, its request reads again
                self._tiers.fetch(need.request, need.expectation)
            del need  # what it refers to belongs to the job

    def _take_next(self) -> _PrefetchItem[CachedValue] | None:
        with self._lock:
            if self._needs:
                return self._needs.popleft()
            self._threads.discard(threading.current_thread())
            self._idle.notify_all()
            return None
