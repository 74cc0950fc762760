"""How often experts are exchanged between tokens, and in how many layers at once.

The more of what was asked for is missing, the sooner; as long as nothing changes, seldom. The
numbers are those of flash-moe, from which this policy comes.
"""

from dataclasses import dataclass

from expertctl.engine.moe.updates import Update

LOW_RATE = 0.005
"""A window that misses no more than this is a low one."""


@dataclass(frozen=True, slots=True)
class Pace:
    """An update after so many tokens, swapping in so many layers."""

    interval: int
    budget: int


@dataclass(frozen=True, slots=True)
class Course:
    """How updates went until now: the tokens of this text, the last rate and two streaks."""

    tokens: int = 0
    fallback_rate: float = 0.0
    no_swap_streak: int = 0
    """Consecutive updates that swapped nothing."""
    low_streak: int = 0
    """Consecutive updates whose window was low."""


def pace_of(course: Course) -> Pace:
    """Return when to update next, and how much."""
    pace = _usual(course)
    rate = course.fallback_rate
    if course.no_swap_streak >= 4 and rate < 0.15:
        pace = Pace(pace.interval * 2, max(8, pace.budget // 2))
    if course.low_streak >= 6 and rate < 0.08:
        pace = Pace(max(pace.interval, 12), 8)
    if course.low_streak >= 12 and rate < 0.05:
        pace = Pace(max(pace.interval, 20), 8)
    return pace


def _usual(course: Course) -> Pace:
    """Return the pace for a high rate; where it is not high, that for the length of the text."""
    for least, pace in ((0.35, Pace(1, 48)), (0.20, Pace(1, 32)), (0.10, Pace(2, 24))):
        if course.fallback_rate >= least:
            return pace
    for most, pace in ((32, Pace(2, 24)), (96, Pace(3, 16))):
        if course.tokens <= most:
            return pace
    return Pace(4, 12)


class UpdatePolicy:
    """When the next update is due, in one generation."""

    def __init__(self) -> None:
        """Begin with a text that has no token."""
        self.course = Course()
        self._since = 0

    @property
    def budget(self) -> int:
        """In how many layers the next update may swap."""
        return pace_of(self.course).budget

    def is_due(self) -> bool:
        """Tell whether to update now."""
        return self._since >= pace_of(self.course).interval

    def generated(self, tokens: int = 1) -> None:
        """Count tokens that were generated."""
        self._since += tokens
        course = self.course
        self.course = Course(
            course.tokens + tokens, course.fallback_rate, course.no_swap_streak, course.low_streak
        )

    def updated(self, update: Update) -> None:
        """Take note of what an update found; one without a request says nothing."""
        self._since = 0
        if not sum(update.requests):
            return
        rate, course = update.fallback_rate, self.course
        self.course = Course(
            course.tokens,
            rate,
            0 if update.swaps else course.no_swap_streak + 1,
            course.low_streak + 1 if rate <= LOW_RATE else 0,
        )
