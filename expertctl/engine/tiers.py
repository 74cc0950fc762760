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
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from expertctl.digest import Digest
from expertctl.engine.budget import Budget, Purpose
from expertctl.engine.eviction import ABSENT, Entry, Occupancy, Spare, Ticket

Resident = TypeVar("Resident")


class Tier(Enum):
    """A memory that holds entries."""

    RAM = "ram"
    DEVICE = "device"


Key = tuple[Tier, Digest]


@dataclass(frozen=True, slots=True)
class Wanted(Generic[Resident]):
    """Something that a request needs: how to get it, and what it will cost exactly.

    ``uses`` are entries whose memory it refers to; they stay as long as it does. What only follows
    from other entries is no ``traffic``.
    """

    key: Key
    nbytes: int
    what: str
    load: Callable[[], Resident]
    uses: tuple[Key, ...] = ()
    traffic: bool = True


@dataclass(slots=True)
class Traffic:
    """How often something was there already, and how often it had to be brought for its use."""

    hits: int = 0
    loads: int = 0
    evictions: int = 0
    waits: int = 0
    """How often a request waited for what was on its way."""
    nbytes: int = 0
    """Bytes that were brought, needed in the end or not."""


class Tiers:
    """The one owner of what is resident."""

    def __init__(self, *, ram: Budget, device: Budget, workers: int = 2) -> None:
        """Start empty; give the same budget twice where both are one memory."""
        self._budgets = {Tier.RAM: ram, Tier.DEVICE: device}
        self._workers = workers
        self._memory = Occupancy[Key](evicted=self._evicted)
        self._tickets = 0
        self._lock = threading.RLock()
        """Taken by ``with``, at once: a signal finds it held within the block, or not at all."""
        self._changed = threading.Condition(self._lock)
        self.traffic = {tier: Traffic() for tier in Tier}

    def begin_request(self) -> None:
        """Let everything grow older by one request."""
        with self._lock:
            self._memory.now += 1

    def holds(self, key: Key) -> bool:
        """Tell whether an entry is resident; where there are other threads, it was."""
        return self._memory.landed(key) is not None

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held for every decision; may be taken again by the thread that holds it."""
        return self._lock

    def spare_from(
        self, tier: Tier, *, nbytes: Callable[[], int], give_up: Callable[[int], None]
    ) -> None:
        """Register an owner that keeps rows of keys and values until room is needed.

        ``nbytes`` is what it can spare; ``give_up`` releases at least so many of them. Both are
        called by any thread, with the `lock` held, which guards the owner's state, too.
        """
        with self._lock:
            self._memory.spares.append(Spare(self._budgets[tier], nbytes, give_up))

    @contextmanager
    def pin(self, wanted: Sequence[Wanted[Resident]]) -> Iterator[list[Resident]]:
        """Borrow entries of one tier, loading those that are absent, several at once.

        Raises:
            BudgetError: when they cannot fit beside what is pinned; nothing is evicted then.
        """
        keys, held = [item.key for item in wanted], self._hold(wanted)
        del wanted  # what loads an entry may refer to others, which must be free to go meanwhile
        try:
            yield [held[key].value for key in keys]  # type: ignore[misc]  # a key always names the same kind
        finally:
            self._unpin(held.values())

    @contextmanager
    def resident(self, key: Key) -> Iterator[object | None]:
        """Borrow an entry if it is there."""
        with self._lock:
            entry = self._memory.landed(key)
            found = [] if entry is None else [entry]
            self._pin(found)
            self.traffic[key[0]].hits += sum(entry.traffic for entry in found)
        try:
            yield found[0].value if found else None
        finally:
            self._unpin(found)

    @contextmanager
    def expecting(self, keys: Iterable[Key]) -> Iterator[Ticket]:
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
                    self._memory.drop_unneeded(key)
                self._changed.notify_all()

    def fetch(self, item: Wanted[Resident], ticket: Ticket) -> None:
        """Bring what is expected, once there is room that is not needed sooner.

        Returns when it is there, on its way, or expected no more. If it fails, the request that
        needs it brings it again, and gets the error.
        """
        entry = self._begin_fetch(item, ticket)
        if entry is not None:
            with suppress(Exception):
                self._fill(entry, item)

    @contextmanager
    def holding(self, tier: Tier, purpose: Purpose, size: int, *, what: str) -> Iterator[None]:
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
            self._make_room(budget, purpose, size, what=what)
            budget.reserve(purpose, size, what=what)

    def reserve_spare(self, tier: Tier, purpose: Purpose, size: int, *, what: str) -> bool:
        """Enter bytes if that evicts nothing but kept rows; tell whether it did."""
        budget = self._budgets[tier]
        with self._lock:
            entries = self._memory.entries.keys()
            if size > self._memory.room(budget, spared=entries):
                return False
            self._memory.make_room(budget, size, spared=entries)
            budget.reserve(purpose, size, what=what)
            return True

    def release(self, tier: Tier, purpose: Purpose, size: int) -> None:
        """Strike out bytes that `reserve` entered."""
        with self._lock:
            self._budgets[tier].release(purpose, size)
            self._changed.notify_all()

    def forget(self, key: Key) -> None:
        """Drop an entry, if it is there, and what uses its memory; nothing of it may be pinned."""
        with self._lock:
            while key in self._memory.entries and not self.holds(key):
                self._changed.wait()
            self._memory.drop_users(key)
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
                assert budget.held("experts") == self._memory.held(budget)
                assert budget.held("buffers") == 0

    def check_integrity(self) -> None:
        """Assert what must always hold."""
        with self._lock:
            self._memory.check_integrity()
            for budget in self._budgets.values():
                budget.check_integrity()

    def _hold(self, wanted: Sequence[Wanted[Resident]]) -> dict[Key, Entry[Key]]:
        """Pin what is there, bring the rest and pin that too; all or nothing.

        What another request failed to bring is tried again.
        """
        missing = {item.key: item for item in wanted}
        held: dict[Key, Entry[Key]] = {}
        try:
            while missing:
                self._attempt(list(missing.values()), held)
                missing = {key: item for key, item in missing.items() if key not in held}
        except BaseException:
            self._unpin(held.values())
            raise
        return held

    def _attempt(self, wanted: Sequence[Wanted[Resident]], held: dict[Key, Entry[Key]]) -> None:
        """Add to ``held``, pinned, what is there, what others bring, and what is brought here."""
        own: dict[Key, Entry[Key]] = {}
        try:
            with self._lock:
                entries = self._memory.entries
                there = {i.key: entries[i.key] for i in wanted if i.key in entries}
                fresh = {key for key, entry in there.items() if not entry.is_used}
                self._pin(there.values())
                held.update(there)
                self._enter([item for item in wanted if item.key not in there], own)
                held.update(own)
            self._bring([item for item in wanted if item.key in own], own)
        finally:
            for key, entry in own.items():  # if one failed, those not begun, too
                self._settle(entry, key)
        with self._lock:
            self._await(there, held)
            for item in wanted:
                if item.traffic and item.key in held:
                    brought = item.key in own or item.key in fresh
                    self.traffic[item.key[0]].loads += brought
                    self.traffic[item.key[0]].hits += not brought

    def _pin(self, entries: Iterable[Entry[Key]]) -> None:
        for entry in entries:
            entry.use(self._memory.now)  # first: what is pinned was used
            entry.pins += 1

    def _unpin(self, entries: Iterable[Entry[Key]]) -> None:
        with self._lock:
            for entry in entries:
                entry.pins -= 1
            self._changed.notify_all()

    def _enter(self, absent: Sequence[Wanted[Resident]], own: dict[Key, Entry[Key]]) -> None:
        """Enter the cost of all, and into ``own`` the entries that are to be brought, pinned."""
        if not absent:
            return
        budget, what = self._budgets[absent[0].key[0]], ", ".join(item.what for item in absent)
        self._make_room(budget, "experts", sum(item.nbytes for item in absent), what=what)
        for item in absent:
            # while room was waited for, another may have begun to bring one
            if item.key not in self._memory.entries:
                own[item.key] = self._new_entry(item)
                self._announce(item, own[item.key], what)
        self._pin(own.values())

    def _new_entry(self, item: Wanted[Resident]) -> Entry[Key]:
        budget = self._budgets[item.key[0]]
        now, count = self._memory.now, self._memory.count_before(item.key)
        return Entry(budget, item.nbytes, now, item.uses, traffic=item.traffic, count=count)

    def _announce(self, item: Wanted[Resident], entry: Entry[Key], what: str) -> Entry[Key]:
        """Enter what is on its way; the caller brings it and settles it, whatever happens."""
        entry.budget.reserve("experts", item.nbytes, what=what)
        self._memory.entries[item.key] = entry
        return entry

    def _bring(self, items: Sequence[Wanted[Resident]], own: Mapping[Key, Entry[Key]]) -> None:
        """Load what was entered."""

        def bring(item: Wanted[Resident]) -> None:
            self._fill(own[item.key], item)

        with ThreadPoolExecutor(self._workers, thread_name_prefix="load") as pool:
            each = pool.map if len(items) > 1 else map
            list(each(bring, items))

    def _fill(self, entry: Entry[Key], item: Wanted[Resident]) -> None:
        try:
            entry.value = item.load()  # from here on no frame refers to it
        finally:
            self._settle(entry, item.key)

    def _settle(self, entry: Entry[Key], key: Key) -> None:
        """Let what came be used; strike out what did not, and what is not needed any more."""
        with self._lock:
            if entry.landed or self._memory.entries.get(key) is not entry:
                return
            if entry.value is ABSENT:
                del self._memory.entries[key]
                entry.budget.release("experts", entry.nbytes)
            else:
                entry.landed = True
                self.traffic[key[0]].nbytes += entry.nbytes
                self._memory.drop_unneeded(key)
            self._changed.notify_all()

    def _await(self, there: Mapping[Key, Entry[Key]], held: dict[Key, Entry[Key]]) -> None:
        """Wait for what others bring; what they could not bring is taken from ``held``."""
        for key, entry in there.items():
            self.traffic[key[0]].waits += self._arrives(key, entry)
            while self._arrives(key, entry):
                self._changed.wait()
            if not entry.landed:
                del held[key]

    def _arrives(self, key: Key, entry: Entry[Key]) -> bool:
        return not entry.landed and self._memory.entries.get(key) is entry

    def _begin_fetch(self, item: Wanted[Resident], ticket: Ticket) -> Entry[Key] | None:
        with self._lock:
            while ticket in self._memory.expected and item.key not in self._memory.entries:
                if self._has_spare_room(item, ticket):
                    return self._announce(item, self._new_entry(item), item.what)
                self._changed.wait()
            return None

    def _has_spare_room(self, item: Wanted[Resident], ticket: Ticket) -> bool:
        """Make room for what is expected, sparing what is needed sooner, if that is possible."""
        budget, sooner = self._budgets[item.key[0]], self._memory.sooner(ticket)
        if item.nbytes > self._memory.room(budget, spared=sooner):
            return False
        self._memory.make_room(budget, item.nbytes, spared=sooner)
        return True

    def _make_room(self, budget: Budget, purpose: Purpose, size: int, *, what: str) -> None:
        """Make so many bytes free, once entries on their way that are not pinned have landed."""
        while size > (room := self._memory.room(budget)):
            if size > room + self._memory.coming(budget):
                raise budget.refusal(purpose, size, what=what)
            self._changed.wait()
        self._memory.make_room(budget, size)

    def _evicted(self, key: Key) -> None:
        self.traffic[key[0]].evictions += 1
