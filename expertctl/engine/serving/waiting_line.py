"""Which job is next: a bounded line, by priority, and fair among the owners of jobs.

The next turn goes to the owner of a job of the highest priority; of several such owners, to the one
that was served least of late. Service counts from the moment an owner comes, so no owner saves up
turns while away (start-time fair queueing, Goyal et al. 1996). Owners that are not served rise by
one priority every `RISE_SECONDS`, and so does each job among those of its owner: no owner and no
job waits for ever.

So that one owner with many jobs does not keep others out, all owners that asked within
`ASKED_SECONDS` have equal shares of the places; an owner that asks alone has them all.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

RISE_SECONDS = 10.0
ASKED_SECONDS = 60.0


class Waiting(Protocol):
    """What the line needs to know of a job."""

    @property
    def owner(self) -> str:
        """Who asked."""

    @property
    def priority(self) -> int:
        """0 to 9; 9 is served first."""

    @property
    def cost(self) -> float:
        """How much of a turn it takes; 1 is one answer."""


Item = TypeVar("Item", bound=Waiting)


@dataclass(frozen=True, slots=True)
class _Place(Generic[Item]):
    item: Item
    number: int
    since: float

    def level(self, now: float, served: float) -> int:
        """Its priority, risen since it came or, if later, since its owner was last served."""
        return self.item.priority + int((now - max(self.since, served)) / RISE_SECONDS)

    def order(self, now: float) -> tuple[int, int]:
        """Its place among the jobs of its owner: risen since it came."""
        return -self.level(now, self.since), self.number


class WaitingLine(Generic[Item]):
    """Jobs on which no work has begun; times are seconds of one clock."""

    def __init__(self, bound: int) -> None:
        """Let at most so many jobs wait."""
        self.bound = bound
        self._places: list[_Place[Item]] = []
        self._served: dict[str, float] = {}
        self._last: dict[str, float] = {}
        """When owners that wait were last served."""
        self._asked: dict[str, float] = {}
        """When owners last asked for a place."""
        self._begun = 0.0
        """How much the owner of the job that was taken last had been served before."""
        self._numbers = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._places)

    def __iter__(self) -> Iterator[Item]:
        """Yield the jobs that wait, in the order in which they came."""
        return iter([place.item for place in self._places])

    @property
    def is_full(self) -> bool:
        """Whether no more may come."""
        return len(self._places) >= self.bound

    def add(self, item: Item, *, now: float) -> bool:
        """Put a job into the line; False when the line or its owner's share of it is full."""
        self._asked = {o: at for o, at in self._asked.items() if now - at < ASKED_SECONDS}
        self._asked[item.owner] = now
        share = max(1, self.bound // len(self._asked))
        own = sum(place.item.owner == item.owner for place in self._places)
        if self.is_full or own >= share:
            return False
        self._numbers += 1
        self._places.append(_Place(item, self._numbers, now))
        self._served[item.owner] = max(self._served.get(item.owner, 0.0), self._begun)
        return True

    def take(self, *, now: float) -> Item | None:
        """Take the next job out of the line; None when none waits."""
        if not self._places:
            return None
        owner = min(self._places, key=lambda place: self._turn(place, now)).item.owner
        own = (place for place in self._places if place.item.owner == owner)
        place = min(own, key=lambda place: place.order(now))
        self._places.remove(place)
        self._begun = self._served[owner]
        self._served[owner] += place.item.cost
        self._last[owner] = now
        self._forget_absent()
        return place.item

    def ahead(self, item: Item | None, *, now: float) -> int:
        """Return about how many jobs come before one; all of them, if it is not in the line.

        Of its owner count jobs that are served before it, of each other owner all of higher
        priority or, if more, as many of no lower one as it takes to catch up with its owner.
        """
        own = next((place for place in self._places if place.item is item), None)
        if own is None:
            return len(self._places)
        turns = dict[str, list[tuple[float, float, int]]]()
        for place in self._places:
            turns.setdefault(place.item.owner, []).append(self._turn(place, now))
        owner = own.item.owner
        del turns[owner]
        level, served, _ = self._turn(own, now)
        mine = (place for place in self._places if place.item.owner == owner)
        of_owner = sum(place.order(now) < own.order(now) for place in mine)
        ahead = of_owner
        for theirs in turns.values():
            higher = sum(turn[0] < level for turn in theirs)
            at_least = sum(turn[0] <= level for turn in theirs)
            catch_up = math.ceil(served + of_owner - theirs[0][1])
            ahead += max(higher, min(at_least, catch_up))
        return ahead

    def remove(self, item: Item) -> bool:
        """Take a job that is no longer wanted out of the line; False when it was not there."""
        for place in self._places:
            if place.item is item:
                self._places.remove(place)
                self._forget_absent()
                return True
        return False

    def check_integrity(self) -> None:
        """Assert what always holds."""
        assert len(self._places) <= self.bound
        assert {place.item.owner for place in self._places} <= self._served.keys()
        numbers = [place.number for place in self._places]
        assert numbers == sorted(set(numbers))

    def _turn(self, place: _Place[Item], now: float) -> tuple[float, float, int]:
        owner = place.item.owner
        level = place.level(now, self._last.get(owner, place.since))
        return -level, self._served[owner], place.number

    def _forget_absent(self) -> None:
        """Forget absent owners that would come back just as new ones do."""
        here = {place.item.owner for place in self._places}
        self._last = {owner: at for owner, at in self._last.items() if owner in here}
        self._served = {
            owner: served
            for owner, served in self._served.items()
            if owner in here or served > self._begun
        }
