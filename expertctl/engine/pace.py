"""How many workers a step is worth, by how long steps took.

Other processes want the same cores, and how many of them are free changes. So now and then a few
steps try another number of workers, the nearest first; it stays if it was faster. After a trial
that lost, the next one waits until the loss is small beside the steps between; steps that suddenly
take long start it at once. Which worker computes what changes no bit of a result (`kernels.crew`),
so neither does their number.
"""

import time
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from statistics import median

RECENT, TRIAL = 8, 3
"""How many steps the present number of workers and the tried one are judged by."""
SOON, SELDOM = 16, 512
"""How many steps lie between two trials, at least and at most."""
COST = 0.02
"""What trials that lose may cost, of the time of the steps between them."""
GAIN = 0.95
"""A number of workers is taken up when its steps take less than this share of the present time."""
WALL = 1.2
"""Where steps take so many times as long, numbers still farther off are not tried."""
ALARM = 1.5
"""Steps that take so many times as long as usual call for a trial."""
LOUD = 2
"""So many of them in a row are needed; one alone is chance."""
_CREEP = 1.02
"""The factor by which the usual time may grow with each step: texts get longer."""


class Pace:
    """The numbers of workers of one crew, for each kind of step."""

    def __init__(self, limit: int) -> None:
        """Choose between one worker and ``limit``."""
        self.limit = max(limit, 1)
        self._courses: dict[Hashable, Course] = {}

    @contextmanager
    def step(self, kind: Hashable) -> Iterator[int]:
        """Give the workers for one step, and measure it; steps of a kind do equal work."""
        course = self._courses.setdefault(kind, Course(self.limit))
        workers = course.workers
        begun = time.perf_counter()
        yield workers
        course.record(workers, time.perf_counter() - begun)

    def workers(self, kind: Hashable) -> int:
        """Return how many workers the next step of a kind gets."""
        course = self._courses.get(kind)
        return self.limit if course is None else course.workers


class Course:
    """What was learnt of one kind of step."""

    def __init__(self, limit: int) -> None:
        """Begin with all the workers there may be."""
        self._counts = worker_counts(limit)
        self._chosen = 0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._usual, self._loud = 0.0, 0
        self._tried: int | None = None
        self._trial: list[float] = []
        self._lost: set[int] = set()
        self._left = SOON

    @property
    def workers(self) -> int:
        """How many the next step gets."""
        return self._counts[self._chosen if self._tried is None else self._tried]

    def record(self, workers: int, seconds: float) -> None:
        """Take in how long a step took; one that began before the last change tells nothing."""
        if workers != self.workers or len(self._counts) == 1:
            return
        if self._tried is None:
            self._watch(seconds)
        else:
            self._trial.append(seconds)
            self._judge(self._tried)

    def _watch(self, seconds: float) -> None:
        self._recent.append(seconds)
        self._left -= 1
        usual = self._usual or seconds
        self._loud = self._loud + 1 if seconds > ALARM * usual else 0
        if self._loud == LOUD:
            self._hear()
        elif self._loud == 0:
            self._usual = min(usual * _CREEP, max(seconds, usual / _CREEP))
        if self._left <= 0:
            self._try_next()

    def _hear(self) -> None:
        """Judge only by the steps after the change, which are usual from now on."""
        self._recent = deque(list(self._recent)[-LOUD:], maxlen=RECENT)
        self._usual, self._loud = min(self._recent), 0
        self._lost.clear()
        self._left = 0

    def _try_next(self) -> None:
        places = set(range(len(self._counts))) - {self._chosen}
        if self._lost >= places:
            self._lost.clear()
        self._tried = min(places - self._lost, key=lambda place: abs(place - self._chosen))
        self._trial = []

    def _judge(self, tried: int) -> None:
        present = median(self._recent)
        hopeless = self._trial[-1] > 2 * present
        if len(self._trial) < TRIAL and not hopeless:
            return
        if not hopeless and median(self._trial) < GAIN * present:
            self._take_up(tried)
        else:
            self._lose(tried, present)
        self._tried = None

    def _take_up(self, tried: int) -> None:
        self._chosen, self._usual = tried, median(self._trial)
        self._recent = deque(self._trial, maxlen=RECENT)
        self._lost.clear()
        self._left = SOON

    def _lose(self, tried: int, present: float) -> None:
        beyond = range(tried + 1, len(self._counts)) if tried > self._chosen else range(tried)
        self._lost.add(tried)
        if max(self._trial) > WALL * present:
            self._lost.update(beyond)
        self._left = _between(sum(self._trial) / present - len(self._trial))


def _between(lost: float) -> int:
    """Return how many steps pass before the next trial when one has lost the time of so many."""
    return int(min(max(lost / COST, SOON), SELDOM))


def worker_counts(limit: int) -> tuple[int, ...]:
    """Return the numbers of workers to choose from: all, all but one, and halves of that."""
    counts = {limit, max(limit - 1, 1)}
    while limit > 1:
        limit //= 2
        counts.add(limit)
    return tuple(sorted(counts, reverse=True))
