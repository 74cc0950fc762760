"""Residency: which experts and compiled plans are in which memory, within one budget.

SSD → RAM → device. RAM holds an expert's verified bytes, the device tier what is computed with: the
compiled plan. Without an accelerator both tiers lie in the same memory and share one `Budget`.

Rules: what does not fit is made room for *before* it is loaded; the entry of the lowest priority,
``count * 0.25 ** (age / 128)`` with the age in requests, goes first; what is pinned stays, and so
does what a resident plan uses in place. Borrowing is by ``with``, so nothing is left pinned.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from expertctl.digest import Digest
from expertctl.engine.budget import PURPOSES, Budget, Purpose

DECAY = 0.25
PERIOD = 128
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
class _Entry:
    value: object
    nbytes: int
    last_used: int
    uses: tuple[Key, ...]
    purpose: Purpose = "experts"
    count: int = 0
    pins: int = 0


@dataclass(slots=True)
class Traffic:
    """How often something was there already, and how often it had to be brought."""

    hits: int = 0
    loads: int = 0
    evictions: int = 0


class Tiers:
    """The one owner of what is resident; used by one thread, which may load with several."""

    def __init__(self, *, ram: Budget, device: Budget, workers: int = 2) -> None:
        """Start empty; give the same budget twice where both are one memory."""
        self._budgets = {Tier.RAM: ram, Tier.DEVICE: device}
        self._workers = workers
        self._entries: dict[Key, _Entry] = {}
        self._request = 0
        self.traffic = {tier: Traffic() for tier in Tier}

    def begin_request(self) -> None:
        """Let everything grow older by one request."""
        self._request += 1

    def holds(self, key: Key) -> bool:
        """Tell whether an entry is resident."""
        return key in self._entries

    def has_room(self, tier: Tier, size: int) -> bool:
        """Tell whether so many bytes fit without evicting anything."""
        return size <= self._budgets[tier].free

    @contextmanager
    def pin(self, wanted: Sequence[Wanted[Resident]]) -> Iterator[list[Resident]]:
        """Borrow entries of one tier, loading those that are absent, several at once.

        Raises:
            BudgetError: when they cannot fit beside what is pinned; nothing is evicted then.
        """
        keys = [item.key for item in wanted]
        self._hold(wanted)
        del wanted  # what loads an entry may refer to others, which must be free to go meanwhile
        try:
            yield [self._entries[key].value for key in keys]  # type: ignore[misc]  # a key always names the same kind
        finally:
            self._unpin(keys)

    @contextmanager
    def resident(self, key: Key) -> Iterator[object]:
        """Borrow an entry that is there."""
        self._pin([key])
        self.traffic[key[0]].hits += 1
        try:
            yield self._entries[key].value
        finally:
            self._unpin([key])

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
        self._make_room(budget, purpose, size, what=what)
        budget.reserve(purpose, size, what=what)

    def release(self, tier: Tier, purpose: Purpose, size: int) -> None:
        """Strike out bytes that `reserve` entered."""
        self._budgets[tier].release(purpose, size)

    def keep(self, key: Key, value: object, nbytes: int, *, purpose: Purpose) -> None:
        """Take over something and the bytes held for it; it goes before all other entries."""
        self.forget(key)
        self._entries[key] = _Entry(value, nbytes, self._request, (), purpose=purpose)

    def kept(self, key: Key) -> object | None:
        """Look at what was kept, if it is still there."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def take(self, key: Key) -> object | None:
        """Hand over what was kept, if it is still there; its bytes stay held, for the caller."""
        entry = self._entries.pop(key, None)
        return None if entry is None else entry.value

    def forget(self, key: Key) -> None:
        """Drop an entry, if it is there, and what uses its memory; nothing of it may be pinned."""
        for user in [k for k, entry in self._entries.items() if key in entry.uses]:
            self._evict(user)
        if key in self._entries:
            self._evict(key)

    def clear(self) -> None:
        """Drop everything that is not pinned."""
        while victims := self._victims(set(self._budgets.values())):
            self._evict(victims[0])

    def check_integrity(self) -> None:
        """Assert what must always hold."""
        for budget in set(self._budgets.values()):
            budget.check_integrity()
            entries = [e for k, e in self._entries.items() if self._budgets[k[0]] is budget]
            for purpose in PURPOSES:
                resident = sum(entry.nbytes for entry in entries if entry.purpose == purpose)
                assert resident <= budget.held(purpose)
        for entry in self._entries.values():
            assert entry.pins >= 0
            assert all(key in self._entries for key in entry.uses)

    def _hold(self, wanted: Sequence[Wanted[Resident]]) -> None:
        """Pin what is there, load the rest and pin that too; all or nothing."""
        present = {item.key: item for item in wanted if item.key in self._entries}
        absent = {item.key: item for item in wanted if item.key not in self._entries}
        self._pin(present)
        try:
            self._load(list(absent.values()))
        except BaseException:
            self._unpin(present)
            raise
        self._pin(absent)
        for item in present.values():
            self.traffic[item.key[0]].hits += item.traffic
        for item in absent.values():
            self.traffic[item.key[0]].loads += item.traffic

    def _pin(self, keys: Iterable[Key]) -> None:
        for key in dict.fromkeys(keys):
            entry = self._entries[key]
            entry.pins += 1
            entry.count += 1
            entry.last_used = self._request

    def _unpin(self, keys: Iterable[Key]) -> None:
        for key in dict.fromkeys(keys):
            self._entries[key].pins -= 1

    def _load(self, absent: Sequence[Wanted[Resident]]) -> None:
        """Enter the cost of all, then bring them; what fails is struck out again."""
        if not absent:
            return
        budget, what = self._budgets[absent[0].key[0]], ", ".join(item.what for item in absent)
        total = sum(item.nbytes for item in absent)
        self._make_room(budget, "experts", total, what=what)
        with ExitStack() as undo:
            budget.reserve("experts", total, what=what)
            undo.callback(budget.release, "experts", total)
            values = self._bring(absent)
            undo.pop_all()
        for item, value in zip(absent, values, strict=True):
            self._entries[item.key] = _Entry(value, item.nbytes, self._request, item.uses)

    def _bring(self, absent: Sequence[Wanted[Resident]]) -> list[Resident]:
        if len(absent) < 2:
            return [item.load() for item in absent]
        with ThreadPoolExecutor(self._workers, thread_name_prefix="load") as pool:
            return list(pool.map(lambda item: item.load(), absent))

    def _make_room(self, budget: Budget, purpose: Purpose, size: int, *, what: str) -> None:
        if size > budget.free + self._evictable(budget):
            raise budget.refusal(purpose, size, what=what)
        while size > budget.free:
            self._evict(self._victims({budget})[0])

    def _evictable(self, budget: Budget) -> int:
        """Bytes that could be freed: all but what is pinned and what pinned plans use."""
        kept = {key for key, entry in self._entries.items() if entry.pins}
        kept |= {used for key in kept for used in self._entries[key].uses}
        return sum(
            entry.nbytes
            for key, entry in self._entries.items()
            if key not in kept and self._budgets[key[0]] is budget
        )

    def _victims(self, budgets: set[Budget]) -> list[Key]:
        """What may go now, the lowest priority first."""
        used = {key for entry in self._entries.values() for key in entry.uses}
        free = [
            key
            for key, entry in self._entries.items()
            if not entry.pins and key not in used and self._budgets[key[0]] in budgets
        ]
        return sorted(free, key=self._priority)

    def _priority(self, key: Key) -> tuple[bool, float, int]:
        entry = self._entries[key]
        age = self._request - entry.last_used
        return (entry.purpose == "experts", entry.count * DECAY ** (age / PERIOD), entry.last_used)

    def _evict(self, key: Key) -> None:
        assert not self._entries[key].pins, "what is pinned stays"
        entry = self._entries.pop(key)
        purpose, size = entry.purpose, entry.nbytes
        del entry  # what is freed is gone before its bytes are struck out
        self._budgets[key[0]].release(purpose, size)
        self.traffic[key[0]].evictions += 1
