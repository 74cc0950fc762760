"""How long a version must have been published before it is taken: time for others to look at it.

A version that is locked or installed already, or named by its digest, does not wait.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from expertctl.install.candidate import Candidate


@dataclass(frozen=True, slots=True)
class ReleaseAge:
    """The least age, and what is exempt from it; ``now`` is when the command began."""

    minimum: timedelta = timedelta()
    exclude: tuple[str, ...] = ()
    """Namespaces, and names of packages."""
    now: datetime = datetime(9999, 1, 1, tzinfo=UTC)

    @classmethod
    def starting_now(cls, minimum: timedelta | None, exclude: Iterable[str]) -> "ReleaseAge":
        """Return the rule as of this moment."""
        return cls(minimum or timedelta(), tuple(exclude), datetime.now(UTC))

    def ripe_at(self, candidate: Candidate) -> datetime | None:
        """Return when a version that is too young may be taken; None when it may be now."""
        names = {candidate.package.namespace, str(candidate.package)}
        if candidate.published is None or names & set(self.exclude) or not self.minimum:
            return None
        ripe = candidate.published + self.minimum
        return ripe if ripe > self.now else None


def shown(moment: datetime) -> str:
    """Return a moment as messages show it."""
    return moment.strftime("%Y-%m-%d %H:%M UTC")
