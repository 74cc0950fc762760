"""What lies in memory, and what goes when room is needed: the rules, without threads.

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

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from expertctl.engine.budget import Budget

DECAY = 0.25
PERIOD = 128
FADING = 512
"""After so many requests a use counts a quarter."""
REMEMBERED = 1024
"""The counts of so many that went last are known; of others little would be left."""
KEPT_SHARE = 0.5
"""How much of what experts and kept keys and values hold is left to the latter."""
ABSENT = object()
"""The value of what has not come yet, or is gone."""
Ticket = int
"""Names one expectation; the lower, the sooner it is needed."""
_NEVER: Ticket = 1 << 62
Name = TypeVar("Name", bound=Hashable)


@dataclass(slots=True, eq=False)
class Entry(Generic[Name]):
    """Something that holds memory; it can be used once it has ``landed``."""

    budget: Budget
    nbytes: int
    last_used: int
    uses: tuple[Name, ...] = ()
    value: object = ABSENT
    traffic: bool = True
    landed: bool = False
    count: float = 0.0
    """Its uses, and those of earlier entries of its name, as of ``last_used``."""
    is_used: bool = False
    pins: int = 0

    def use(self, now: int) -> None:
        """Count a use."""
        self.count = faded(self.count, now - self.last_used) + 1
        self.last_used, self.is_used = now, True

    def priority(self, now: int) -> float:
        """How much it is worth to keep."""
        age = now - self.last_used
        return float(self.count * DECAY ** (age / PERIOD))


def faded(count: float, requests: int) -> float:
    """Return what is left of a count after so many requests."""
    return float(count * DECAY ** (requests / FADING))


@dataclass(frozen=True, slots=True)
class Spare:
    """Rows of keys and values that their owner keeps until room is needed."""

    budget: Budget
    nbytes: Callable[[], int]
    give_up: Callable[[int], None]


class Occupancy(Generic[Name]):
    """The owner of the entries; a caller with several threads guards it with a lock."""

    def __init__(self, *, evicted: Callable[[Name], None]) -> None:
        """Begin with nothing; ``evicted`` is told which experts and plans went."""
        self.entries: dict[Name, Entry[Name]] = {}
        self.expected: dict[Ticket, frozenset[Name]] = {}
        self.spares: list[Spare] = []
        self.now = 0
        self._counts: dict[Name, tuple[float, int]] = {}
        self._evicted = evicted

    def landed(self, name: Name) -> Entry[Name] | None:
        """Return an entry that can be used."""
        entry = self.entries.get(name)
        return entry if entry is not None and entry.landed else None

    def count_before(self, name: Name) -> float:
        """Return what is left of the uses of an entry that went."""
        count, last_used = self._counts.get(name, (0.0, self.now))
        return faded(count, self.now - last_used)

    def spare(self, budget: Budget) -> int:
        """Return how many bytes can be had without evicting an entry, besides those free."""
        return sum(spare.nbytes() for spare in self.spares if spare.budget is budget)

    def room(self, budget: Budget, *, spared: Collection[Name] = ()) -> int:
        """Return how many bytes are free or can be had at once, ``spared`` staying."""
        able = self._able(spared)
        return budget.free + self.spare(budget) + _sum(able.values(), budget)

    def coming(self, budget: Budget) -> int:
        """Return how many bytes can be had once what is on its way, but not pinned, has landed."""
        return _sum((e for e in self.entries.values() if not (e.landed or e.pins)), budget)

    def make_room(self, budget: Budget, size: int, *, spared: Collection[Name] = ()) -> None:
        """Let go of one thing after the other until so many bytes are free; `room` has them."""
        while size > (free := budget.free):
            able, spare = self._able(spared), self.spare(budget)
            if spare and (self._is_crowded(spare, budget) or not _sum(able.values(), budget)):
                self._give_up(budget, min(spare, size - free))
            else:
                self.evict(self._victim(able, budget))

    def sooner(self, ticket: Ticket) -> set[Name]:
        """Return what is expected by then."""
        return {name for t, names in self.expected.items() if t <= ticket for name in names}

    def drop_unneeded(self, name: Name) -> None:
        """Let go of what was brought and never used, unless it is still expected."""
        entry = self.landed(name)
        if entry is None or entry.is_used:
            return
        if not any(name in names for names in self.expected.values()):
            self.evict(name)

    def drop_users(self, name: Name) -> None:
        """Let go of what uses the memory of an entry."""
        for user in [other for other, entry in self.entries.items() if name in entry.uses]:
            self.evict(user)

    def evict(self, name: Name) -> None:
        """Let go of an entry, and of its bytes."""
        assert not self.entries[name].pins, "what is pinned stays"
        entry = self.entries.pop(name)
        entry.value = ABSENT  # what is freed is gone before its bytes are struck out
        entry.budget.release("experts", entry.nbytes)
        self._remember(name, entry)
        if entry.traffic:
            self._evicted(name)

    def clear(self) -> None:
        """Let go of all that may go."""
        for spare in self.spares:
            spare.give_up(spare.nbytes())
        while able := self._able():
            used = {name for entry in able.values() for name in entry.uses}
            self.evict(next(name for name in able if name not in used))

    def held(self, budget: Budget) -> int:
        """Return the bytes of all entries of one memory."""
        return _sum(self.entries.values(), budget)

    def check_idle(self) -> None:
        """Assert that nothing is pinned, expected or on its way."""
        assert not self.expected
        assert all(entry.landed and not entry.pins for entry in self.entries.values())

    def check_integrity(self) -> None:
        """Assert that entries are within the ledger, and that what they use is there."""
        assert len(self._counts) <= REMEMBERED
        for entry in self.entries.values():
            assert entry.pins >= 0
            assert all(name in self.entries for name in entry.uses)
            entry.budget.check_integrity()
            assert self.held(entry.budget) <= entry.budget.held("experts")

    def _remember(self, name: Name, entry: Entry[Name]) -> None:
        self._counts.pop(name, None)  # the order is that of going
        if entry.count:
            self._counts[name] = entry.count, entry.last_used
        if len(self._counts) > REMEMBERED:
            del self._counts[next(iter(self._counts))]

    def _able(self, spared: Collection[Name] = ()) -> Mapping[Name, Entry[Name]]:
        """Return what can go, if need be one after the other."""
        kept = {n for n, e in self.entries.items() if e.pins or not e.landed or n in spared}
        kept |= {used for name in kept for used in self.entries[name].uses}
        return {name: entry for name, entry in self.entries.items() if name not in kept}

    def _victim(self, able: Mapping[Name, Entry[Name]], budget: Budget) -> Name:
        """Return what goes first in one memory; a plan elsewhere goes before what it uses here."""
        used = {name for entry in able.values() for name in entry.uses}
        here = {name for name, entry in self.entries.items() if entry.budget is budget}
        tickets = sorted(self.expected, reverse=True)
        places = {name: ticket for ticket in tickets for name in self.expected[ticket]}

        def order(name: Name) -> tuple[int, float, int]:
            entry, place = able[name], places.get(name, _NEVER)
            return (-place, entry.priority(self.now), entry.last_used)

        free = [n for n, e in able.items() if n in here or not here.isdisjoint(e.uses)]
        return min((name for name in free if name not in used), key=order)

    def _is_crowded(self, kept: int, budget: Budget) -> bool:
        return kept > KEPT_SHARE * (self.held(budget) + kept)

    def _give_up(self, budget: Budget, size: int) -> None:
        for spare in self.spares:
            if spare.budget is budget and size > 0:
                some, before = min(size, spare.nbytes()), budget.free
                spare.give_up(some)
                assert budget.free >= before + some, "what is spare can be had"
                size -= some


def _sum(entries: Iterable[Entry[Name]], budget: Budget) -> int:
    return sum(entry.nbytes for entry in entries if entry.budget is budget)
