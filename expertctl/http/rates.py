"""How often something may happen: one token bucket for each of many keys.

The buckets live in the memory of one process and are bounded in number; the one that was taken
from longest ago is forgotten first. A forgotten bucket counts as full, so a flood of addresses can
refill buckets, but it never takes more memory than the bound.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_KEYS = 100_000
MINUTE = 60.0


@dataclass(slots=True)
class Rates:
    """Buckets of ``per_minute`` each, which fill again evenly; times come from ``clock``."""

    per_minute: int
    clock: Callable[[], float]
    max_keys: int = MAX_KEYS
    _buckets: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)

    def take(self, key: str) -> int:
        """Take one from the bucket of ``key``; return 0, or the seconds until there is one."""
        now = self.clock()
        level = self._level(key, now)
        if level < 1:
            return self._seconds(level)
        self._buckets[key] = (level - 1, now)
        self._buckets.move_to_end(key)
        while len(self._buckets) > self.max_keys:
            self._buckets.popitem(last=False)
        return 0

    def spend(self, key: str, amount: int) -> None:
        """Take so much from the bucket of ``key``, more than there is, if need be."""
        now = self.clock()
        self._buckets[key] = (self._level(key, now) - amount, now)
        self._buckets.move_to_end(key)
        while len(self._buckets) > self.max_keys:
            self._buckets.popitem(last=False)

    def wait(self, key: str) -> int:
        """Return the seconds until something can be taken, 0 when it can; takes nothing."""
        level = self._level(key, self.clock())
        return 0 if level >= 1 else self._seconds(level)

    def standing(self, key: str) -> tuple[int, float]:
        """Return how much can be taken now, and the seconds until the bucket is full again."""
        level = self._level(key, self.clock())
        lacking = self.per_minute - level
        seconds = lacking * MINUTE / self.per_minute if self.per_minute else MINUTE
        return max(0, math.floor(level)), seconds

    def __len__(self) -> int:
        """Return how many buckets are remembered."""
        return len(self._buckets)

    def _level(self, key: str, now: float) -> float:
        level, then = self._buckets.get(key, (float(self.per_minute), now))
        return min(float(self.per_minute), level + (now - then) * self.per_minute / MINUTE)

    def _seconds(self, level: float) -> int:
        if self.per_minute < 1:
            return int(MINUTE)
        return max(1, math.ceil((1 - level) * MINUTE / self.per_minute))
