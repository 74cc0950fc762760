"""The memory budget, and the table of cache entries with the eviction rules; without threads.

One limit covers base, experts, KV and buffers and is never exceeded. Bytes are reserved before they
are allocated and released after they are freed, so the budget never reports less than what is live.

Pinned entries stay, and so do entries that a resident plan uses in place or that are still loading.
Two classes share the rest: experts, which are entries here, and kept KV, whose owners choose what
to evict. Kept KV is evicted first while it exceeds its share of both, otherwise experts are; if one
class has nothing left, the other is used. Among experts, those that no request expects are evicted
first, then those that are expected last; among equals the lowest priority first, ``count * 0.25 **
(age / 128)`` with the age in requests. The count adds one per use and decays: ``0.25 ** (requests
since / 512)`` of it is left. Counts outlive their entries, so an entry in demand again need not
start at one. ``docs/adr/0016-residency.md`` explains the formula.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

from expertctl.engine.memory.host import find_default_budget
from expertctl.engine_config import DeviceName
from expertctl.errors import BudgetError
from expertctl.settings import format_limit, format_size

Purpose = Literal["base", "experts", "kv", "buffers"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
BUDGET_HINTS: dict[Purpose, str] = {
    "base": "raise --memory-budget, choose a --dtype of fewer bits, or a smaller base",
    "experts": "use fewer experts with --max-experts, or raise --memory-budget",
    "kv": "lower --max-tokens, shorten the prompt, or raise --memory-budget",
    "buffers": "lower --max-tokens, shorten the prompt, or raise --memory-budget",
}

CACHED_KV_DIVISOR = 4
"""Kept KV may use this fraction (1 / n) of a server's budget by default."""


def choose_kv_cache_limit(requested: int | None, budget: int) -> int:
    """Return the maximum bytes of KV kept between requests."""
    return budget // CACHED_KV_DIVISOR if requested is None else min(requested, budget)


def find_budget_limit(requested: int | None, device: DeviceName) -> int:
    """Return the budget of an engine in the memory that it computes in.

    Raises:
        NotFoundError: when there is no such device.
        BudgetError: when other programs use nearly all memory of a device.
    """
    if device == "cpu":
        return find_default_budget() if requested is None else requested
    from expertctl.engine.torch.devices import find_device_budget

    return find_device_budget(requested)


class MemoryBudget:
    """Reserved bytes of one memory, by purpose; between threads, `AdapterCache` guards it."""

    def __init__(self, limit: int) -> None:
        """Start with nothing reserved."""
        self.limit = limit
        self._held: dict[Purpose, int] = dict.fromkeys(PURPOSES, 0)
        self._peak = 0

    @property
    def used(self) -> int:
        """Bytes reserved now."""
        return sum(self._held.values())

    @property
    def free(self) -> int:
        """Bytes that can still be reserved."""
        return self.limit - self.used

    @property
    def peak(self) -> int:
        """Maximum of the reserved bytes so far."""
        return self._peak

    def reserved_bytes(self, purpose: Purpose) -> int:
        """Bytes reserved now for one purpose."""
        return self._held[purpose]

    def reserve(self, purpose: Purpose, size: int, *, what: str) -> None:
        """Reserve bytes that are about to be allocated.

        Raises:
            BudgetError: when they do not fit; nothing is reserved then.
        """
        if size < 0:
            raise ValueError(f"{size} bytes cannot be reserved")
        if size > self.free:
            raise self.make_error(purpose, size, what=what)
        self._held[purpose] += size
        self._peak = max(self._peak, self.used)

    def release(self, purpose: Purpose, size: int) -> None:
        """Release bytes that were freed."""
        if not 0 <= size <= self._held[purpose]:
            raise ValueError(f"{size} bytes of {purpose} are not held")
        self._held[purpose] -= size

    @contextmanager
    def reserve_during(self, purpose: Purpose, size: int, *, what: str) -> Iterator[None]:
        """Reserve bytes for the length of a ``with`` block; raises as `reserve` does."""
        self.reserve(purpose, size, what=what)
        try:
            yield
        finally:
            self.release(purpose, size)

    def make_error(self, purpose: Purpose, size: int, *, what: str) -> BudgetError:
        """Return the error with the size needed, the free bytes and what is reserved."""
        held = ", ".join(f"{p} {format_size(n)}" for p, n in self._held.items() if n) or "nothing"
        needed, free = _format_distinct_sizes(size, self.free)
        return BudgetError(
            f"{what}: {needed} needed, but only {free} of the budget of "
            f"{format_limit(self.limit)} are free (held: {held})",
            hint=BUDGET_HINTS[purpose],
        )

    def check_integrity(self) -> None:
        """Assert the invariants."""
        assert 0 <= self.used <= self._peak <= self.limit
        assert all(size >= 0 for size in self._held.values())


def _format_distinct_sizes(first: int, second: int) -> tuple[str, str]:
    """Format two sizes so that the larger one can be seen."""
    shown = format_size(first), format_size(second)
    return shown if shown[0] != shown[1] else (f"{first:,} B", f"{second:,} B")


DECAY = 0.25
AGE_PERIOD = 128
COUNT_HALVING = 512
"""After so many requests a use counts a quarter."""
MAX_PAST_COUNTS = 1024
"""Number of evicted entries whose counts are remembered; older counts would be near zero."""
KEPT_SHARE = 0.5
"""Share of kept KV in the memory of experts and kept KV."""
ABSENT = object()
"""Value of an entry that is not loaded yet, or evicted."""
ExpectationId = int
"""Identifies one expectation; lower ones are needed sooner."""
_NEVER: ExpectationId = 1 << 62
EntryName = TypeVar("EntryName", bound=Hashable)


@dataclass(slots=True, eq=False)
class CacheEntry(Generic[EntryName]):
    """Something that takes memory; it can be used once it ``is_loaded``."""

    budget: MemoryBudget
    nbytes: int
    last_used: int
    uses: tuple[EntryName, ...] = ()
    value: object = ABSENT
    traffic: bool = True
    is_loaded: bool = False
    count: float = 0.0
    """Its uses, including those of earlier entries of its name, as of ``last_used``."""
    is_used: bool = False
    pins: int = 0

    def record_use(self, now: int) -> None:
        """Count a use."""
        self.count = decay_count(self.count, now - self.last_used) + 1
        self.last_used, self.is_used = now, True

    def compute_priority(self, now: int) -> float:
        """Return the eviction priority; higher means more worth keeping."""
        age = now - self.last_used
        return float(self.count * DECAY ** (age / AGE_PERIOD))


def decay_count(count: float, requests: int) -> float:
    """Return what is left of a count after so many requests."""
    return float(count * DECAY ** (requests / COUNT_HALVING))


@dataclass(frozen=True, slots=True)
class ReclaimableMemory:
    """Cached KV that its owner keeps until memory is needed."""

    budget: MemoryBudget
    nbytes: Callable[[], int]
    reclaim: Callable[[int], None]


class EntryTable(Generic[EntryName]):
    """The owner of the entries; not thread-safe."""

    def __init__(self, *, on_evict: Callable[[EntryName], None]) -> None:
        """Start empty; ``on_evict`` is called with each expert or plan that is evicted."""
        self.entries: dict[EntryName, CacheEntry[EntryName]] = {}
        self.expected: dict[ExpectationId, frozenset[EntryName]] = {}
        self.reclaimable: list[ReclaimableMemory] = []
        self.now = 0
        self._past_counts: dict[EntryName, tuple[float, int]] = {}
        self._on_evict = on_evict

    def find_loaded(self, name: EntryName) -> CacheEntry[EntryName] | None:
        """Return an entry that can be used."""
        entry = self.entries.get(name)
        return entry if entry is not None and entry.is_loaded else None

    def get_past_count(self, name: EntryName) -> float:
        """Return the decayed use count of an evicted entry."""
        count, last_used = self._past_counts.get(name, (0.0, self.now))
        return decay_count(count, self.now - last_used)

    def count_reclaimable(self, budget: MemoryBudget) -> int:
        """Return the bytes that can be freed without evicting an entry."""
        return sum(spare.nbytes() for spare in self.reclaimable if spare.budget is budget)

    def count_available(self, budget: MemoryBudget, *, keep: Collection[EntryName] = ()) -> int:
        """Return the bytes that are free or can be freed now, without the entries in ``keep``."""
        able = self._list_evictable(keep)
        return budget.free + self.count_reclaimable(budget) + _sum_bytes(able.values(), budget)

    def count_loading(self, budget: MemoryBudget) -> int:
        """Return the bytes of entries that are still loading and not pinned."""
        return _sum_bytes((e for e in self.entries.values() if not (e.is_loaded or e.pins)), budget)

    def free_memory(
        self, budget: MemoryBudget, size: int, *, keep: Collection[EntryName] = ()
    ) -> None:
        """Evict one thing after another until so many bytes are free; they must be available."""
        while size > (free := budget.free):
            able, spare = self._list_evictable(keep), self.count_reclaimable(budget)
            if spare and (
                self._exceeds_kept_share(spare, budget) or not _sum_bytes(able.values(), budget)
            ):
                self._reclaim(budget, min(spare, size - free))
            else:
                self.evict(self._choose_victim(able, budget))

    def list_needed_by(self, ticket: ExpectationId) -> set[EntryName]:
        """Return the entries expected at or before an expectation."""
        return {name for t, names in self.expected.items() if t <= ticket for name in names}

    def evict_if_unused(self, name: EntryName) -> None:
        """Evict an entry that was loaded and never used, unless it is still expected."""
        entry = self.find_loaded(name)
        if entry is None or entry.is_used:
            return
        if not any(name in names for names in self.expected.values()):
            self.evict(name)

    def evict_dependents(self, name: EntryName) -> None:
        """Evict the entries that use the memory of an entry."""
        for user in [other for other, entry in self.entries.items() if name in entry.uses]:
            self.evict(user)

    def evict(self, name: EntryName) -> None:
        """Evict an entry and release its bytes."""
        assert not self.entries[name].pins, "what is pinned stays"
        entry = self.entries.pop(name)
        entry.value = ABSENT  # the value is freed before its bytes are released
        entry.budget.release("experts", entry.nbytes)
        self._remember_count(name, entry)
        if entry.traffic:
            self._on_evict(name)

    def clear(self) -> None:
        """Evict everything that can be evicted."""
        for spare in self.reclaimable:
            spare.reclaim(spare.nbytes())
        while able := self._list_evictable():
            used = {name for entry in able.values() for name in entry.uses}
            self.evict(next(name for name in able if name not in used))

    def count_bytes(self, budget: MemoryBudget) -> int:
        """Return the bytes of all entries of one memory."""
        return _sum_bytes(self.entries.values(), budget)

    def check_idle(self) -> None:
        """Assert that nothing is pinned, expected or loading."""
        assert not self.expected
        assert all(entry.is_loaded and not entry.pins for entry in self.entries.values())

    def check_integrity(self) -> None:
        """Assert that entries are within the budget, and that what they use is present."""
        assert len(self._past_counts) <= MAX_PAST_COUNTS
        for entry in self.entries.values():
            assert entry.pins >= 0
            assert all(name in self.entries for name in entry.uses)
            entry.budget.check_integrity()
            assert self.count_bytes(entry.budget) <= entry.budget.reserved_bytes("experts")

    def _remember_count(self, name: EntryName, entry: CacheEntry[EntryName]) -> None:
        self._past_counts.pop(name, None)  # so the order is that of eviction
        if entry.count:
            self._past_counts[name] = entry.count, entry.last_used
        if len(self._past_counts) > MAX_PAST_COUNTS:
            del self._past_counts[next(iter(self._past_counts))]

    def _list_evictable(
        self, keep: Collection[EntryName] = ()
    ) -> Mapping[EntryName, CacheEntry[EntryName]]:
        """Return the entries that can be evicted, if necessary one after another."""
        kept = {n for n, e in self.entries.items() if e.pins or not e.is_loaded or n in keep}
        kept |= {used for name in kept for used in self.entries[name].uses}
        return {name: entry for name, entry in self.entries.items() if name not in kept}

    def _choose_victim(
        self, evictable: Mapping[EntryName, CacheEntry[EntryName]], budget: MemoryBudget
    ) -> EntryName:
        """Return the entry to evict first; plans go before the entries here that they use."""
        used = {name for entry in evictable.values() for name in entry.uses}
        here = {name for name, entry in self.entries.items() if entry.budget is budget}
        tickets = sorted(self.expected, reverse=True)
        places = {name: ticket for ticket in tickets for name in self.expected[ticket]}

        def order(name: EntryName) -> tuple[int, float, int]:
            entry, place = evictable[name], places.get(name, _NEVER)
            return (-place, entry.compute_priority(self.now), entry.last_used)

        free = [n for n, e in evictable.items() if n in here or not here.isdisjoint(e.uses)]
        return min((name for name in free if name not in used), key=order)

    def _exceeds_kept_share(self, kept_bytes: int, budget: MemoryBudget) -> bool:
        return kept_bytes > KEPT_SHARE * (self.count_bytes(budget) + kept_bytes)

    def _reclaim(self, budget: MemoryBudget, size: int) -> None:
        for spare in self.reclaimable:
            if spare.budget is budget and size > 0:
                some, before = min(size, spare.nbytes()), budget.free
                spare.reclaim(some)
                assert budget.free >= before + some, "what is spare can be had"
                size -= some


def _sum_bytes(entries: Iterable[CacheEntry[EntryName]], budget: MemoryBudget) -> int:
    return sum(entry.nbytes for entry in entries if entry.budget is budget)
