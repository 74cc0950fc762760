"""The ledger of memory: one limit over base, experts, KV and buffers that is never exceeded.

Bytes are entered before they are allocated and struck out after they are freed, so the ledger never
says less than what is live.

What lies in memory, and what goes when room is needed: the rules, without threads.

What is pinned stays, and so does what a resident plan uses in place, and what is on its way. Two
classes share the rest: experts, which are entries here, and kept keys and values, among which their
owners choose. Kept ones go first while they take more than their share of both, else experts do; if
one class has nothing left to give, the other does. Of the experts, those that no request expects go
first, then those that are expected last; of those expected alike, the lowest priority goes first,
``count * 0.25 ** (age / 128)`` with the age in requests. The count is one for each use, less what
fades: ``0.25 ** (requests since / 512)`` is left of it. Counts outlive their entries, so what is in
demand again need not begin at one. Why that formula, and no other, is in
``docs/adr/0016-residency.md``.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

from expertctl.errors import BudgetError
from expertctl.settings import format_limit, format_size

Purpose = Literal["base", "experts", "kv", "buffers"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
BUDGET_HINTS: dict[Purpose, str] = {
    "base": "raise --memory-budget, hold a large base in --dtype int8, or choose a smaller one",
    "experts": "use fewer experts with --max-experts, or raise --memory-budget",
    "kv": "lower --max-tokens, shorten the prompt, or raise --memory-budget",
    "buffers": "lower --max-tokens, shorten the prompt, or raise --memory-budget",
}

CACHED_KV_DIVISOR = 4
"""Keys and values that are kept for later requests may take this part of a server's budget."""


def choose_kv_cache_limit(requested: int | None, budget: int) -> int:
    """Return how many bytes of a budget keys and values may take between requests."""
    return budget // CACHED_KV_DIVISOR if requested is None else min(requested, budget)


class MemoryBudget:
    """How many bytes of one memory are held, by purpose; between threads, `AdapterCache` guards it."""

    def __init__(self, limit: int) -> None:
        """Start with nothing held."""
        self.limit = limit
        self._held: dict[Purpose, int] = dict.fromkeys(PURPOSES, 0)
        self._peak = 0

    @property
    def used(self) -> int:
        """Bytes held now."""
        return sum(self._held.values())

    @property
    def free(self) -> int:
        """Bytes that can still be reserved."""
        return self.limit - self.used

    @property
    def peak(self) -> int:
        """The most that was ever held."""
        return self._peak

    def reserved_bytes(self, purpose: Purpose) -> int:
        """Bytes held now for one purpose."""
        return self._held[purpose]

    def reserve(self, purpose: Purpose, size: int, *, what: str) -> None:
        """Enter bytes that are about to be allocated.

        Raises:
            BudgetError: when they do not fit; nothing is entered then.
        """
        if size < 0:
            raise ValueError(f"{size} bytes cannot be reserved")
        if size > self.free:
            raise self.make_error(purpose, size, what=what)
        self._held[purpose] += size
        self._peak = max(self._peak, self.used)

    def release(self, purpose: Purpose, size: int) -> None:
        """Strike out bytes that were freed."""
        if not 0 <= size <= self._held[purpose]:
            raise ValueError(f"{size} bytes of {purpose} are not held")
        self._held[purpose] -= size

    @contextmanager
    def reserve_during(self, purpose: Purpose, size: int, *, what: str) -> Iterator[None]:
        """Hold bytes for the length of a ``with`` block.

        Raises:
            BudgetError: when they do not fit.
        """
        self.reserve(purpose, size, what=what)
        try:
            yield
        finally:
            self.release(purpose, size)

    def make_error(self, purpose: Purpose, size: int, *, what: str) -> BudgetError:
        """Return the error that says what does not fit beside what."""
        held = ", ".join(f"{p} {format_size(n)}" for p, n in self._held.items() if n) or "nothing"
        needed, free = _format_distinct_sizes(size, self.free)
        return BudgetError(
            f"{what}: {needed} needed, but only {free} of the budget of "
            f"{format_limit(self.limit)} are free (held: {held})",
            hint=BUDGET_HINTS[purpose],
        )

    def check_integrity(self) -> None:
        """Assert what must always hold."""
        assert 0 <= self.used <= self._peak <= self.limit
        assert all(size >= 0 for size in self._held.values())


def _format_distinct_sizes(first: int, second: int) -> tuple[str, str]:
    """Return two sizes so that a person sees which is the larger."""
    shown = format_size(first), format_size(second)
    return shown if shown[0] != shown[1] else (f"{first:,} B", f"{second:,} B")


DECAY = 0.25
AGE_PERIOD = 128
COUNT_HALVING = 512
"""After so many requests a use counts a quarter."""
MAX_PAST_COUNTS = 1024
"""The counts of so many that went last are known; of others little would be left."""
KEPT_SHARE = 0.5
"""How much of what experts and kept keys and values hold is left to the latter."""
ABSENT = object()
"""The value of what has not come yet, or is gone."""
ExpectationId = int
"""Names one expectation; the lower, the sooner it is needed."""
_NEVER: ExpectationId = 1 << 62
EntryName = TypeVar("EntryName", bound=Hashable)


@dataclass(slots=True, eq=False)
class CacheEntry(Generic[EntryName]):
    """Something that holds memory; it can be used once it has ``landed``."""

    budget: MemoryBudget
    nbytes: int
    last_used: int
    uses: tuple[EntryName, ...] = ()
    value: object = ABSENT
    traffic: bool = True
    is_loaded: bool = False
    count: float = 0.0
    """Its uses, and those of earlier entries of its name, as of ``last_used``."""
    is_used: bool = False
    pins: int = 0

    def record_use(self, now: int) -> None:
        """Count a use."""
        self.count = decay_count(self.count, now - self.last_used) + 1
        self.last_used, self.is_used = now, True

    def compute_priority(self, now: int) -> float:
        """How much it is worth to keep."""
        age = now - self.last_used
        return float(self.count * DECAY ** (age / AGE_PERIOD))


def decay_count(count: float, requests: int) -> float:
    """Return what is left of a count after so many requests."""
    return float(count * DECAY ** (requests / COUNT_HALVING))


@dataclass(frozen=True, slots=True)
class ReclaimableMemory:
    """Rows of keys and values that their owner keeps until room is needed."""

    budget: MemoryBudget
    nbytes: Callable[[], int]
    reclaim: Callable[[int], None]


class EntryTable(Generic[EntryName]):
    """The owner of the entries; a caller with several threads guards it with a lock."""

    def __init__(self, *, on_evict: Callable[[EntryName], None]) -> None:
        """Begin with nothing; ``evicted`` is told which experts and plans went."""
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
        """Return what is left of the uses of an entry that went."""
        count, last_used = self._past_counts.get(name, (0.0, self.now))
        return decay_count(count, self.now - last_used)

    def count_reclaimable(self, budget: MemoryBudget) -> int:
        """Return how many bytes can be had without evicting an entry, besides those free."""
        return sum(spare.nbytes() for spare in self.reclaimable if spare.budget is budget)

    def count_available(self, budget: MemoryBudget, *, keep: Collection[EntryName] = ()) -> int:
        """Return how many bytes are free or can be had at once, ``spared`` staying."""
        able = self._list_evictable(keep)
        return budget.free + self.count_reclaimable(budget) + _sum_bytes(able.values(), budget)

    def count_loading(self, budget: MemoryBudget) -> int:
        """Return how many bytes can be had once what is on its way, but not pinned, has landed."""
        return _sum_bytes((e for e in self.entries.values() if not (e.is_loaded or e.pins)), budget)

    def free_memory(
        self, budget: MemoryBudget, size: int, *, keep: Collection[EntryName] = ()
    ) -> None:
        """Let go of one thing after the other until so many bytes are free; `room` has them."""
        while size > (free := budget.free):
            able, spare = self._list_evictable(keep), self.count_reclaimable(budget)
            if spare and (
                self._exceeds_kept_share(spare, budget) or not _sum_bytes(able.values(), budget)
            ):
                self._reclaim(budget, min(spare, size - free))
            else:
                self.evict(self._choose_victim(able, budget))

    def list_needed_by(self, ticket: ExpectationId) -> set[EntryName]:
        """Return what is expected by then."""
        return {name for t, names in self.expected.items() if t <= ticket for name in names}

    def evict_if_unused(self, name: EntryName) -> None:
        """Let go of what was brought and never used, unless it is still expected."""
        entry = self.find_loaded(name)
        if entry is None or entry.is_used:
            return
        if not any(name in names for names in self.expected.values()):
            self.evict(name)

    def evict_dependents(self, name: EntryName) -> None:
        """Let go of what uses the memory of an entry."""
        for user in [other for other, entry in self.entries.items() if name in entry.uses]:
            self.evict(user)

    def evict(self, name: EntryName) -> None:
        """Let go of an entry, and of its bytes."""
        assert not self.entries[name].pins, "what is pinned stays"
        entry = self.entries.pop(name)
        entry.value = ABSENT  # what is freed is gone before its bytes are struck out
        entry.budget.release("experts", entry.nbytes)
        self._remember_count(name, entry)
        if entry.traffic:
            self._on_evict(name)

    def clear(self) -> None:
        """Let go of all that may go."""
        for spare in self.reclaimable:
            spare.reclaim(spare.nbytes())
        while able := self._list_evictable():
            used = {name for entry in able.values() for name in entry.uses}
            self.evict(next(name for name in able if name not in used))

    def count_bytes(self, budget: MemoryBudget) -> int:
        """Return the bytes of all entries of one memory."""
        return _sum_bytes(self.entries.values(), budget)

    def check_idle(self) -> None:
        """Assert that nothing is pinned, expected or on its way."""
        assert not self.expected
        assert all(entry.is_loaded and not entry.pins for entry in self.entries.values())

    def check_integrity(self) -> None:
        """Assert that entries are within the ledger, and that what they use is there."""
        assert len(self._past_counts) <= MAX_PAST_COUNTS
        for entry in self.entries.values():
            assert entry.pins >= 0
            assert all(name in self.entries for name in entry.uses)
            entry.budget.check_integrity()
            assert self.count_bytes(entry.budget) <= entry.budget.reserved_bytes("experts")

    def _remember_count(self, name: EntryName, entry: CacheEntry[EntryName]) -> None:
        self._past_counts.pop(name, None)  # the order is that of going
        if entry.count:
            self._past_counts[name] = entry.count, entry.last_used
        if len(self._past_counts) > MAX_PAST_COUNTS:
            del self._past_counts[next(iter(self._past_counts))]

    def _list_evictable(
        self, keep: Collection[EntryName] = ()
    ) -> Mapping[EntryName, CacheEntry[EntryName]]:
        """Return what can go, if need be one after the other."""
        kept = {n for n, e in self.entries.items() if e.pins or not e.is_loaded or n in keep}
        kept |= {used for name in kept for used in self.entries[name].uses}
        return {name: entry for name, entry in self.entries.items() if name not in kept}

    def _choose_victim(
        self, evictable: Mapping[EntryName, CacheEntry[EntryName]], budget: MemoryBudget
    ) -> EntryName:
        """Return what goes first in one memory; a plan elsewhere goes before what it uses here."""
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
