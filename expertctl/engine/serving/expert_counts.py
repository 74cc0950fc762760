"""`ExpertCounts`: how many jobs each expert had a part in, for a bounded number of experts.

Users may install experts of any name, and versions come and go: the first so many that answer
have a number of their own, all others share one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

MOST = 1_000
OTHERS = "other"
"""Stands for all without a number of their own; no reference, for those have a slash."""


@dataclass(slots=True)
class ExpertCounts:
    """The owner of the numbers."""

    most: int = MOST
    _jobs: dict[str, int] = field(default_factory=dict)

    def count(self, refs: Iterable[str]) -> None:
        """Count a job once for each expert of its plan, however often the plan has it."""
        for ref in sorted(set(refs)):
            is_known = ref in self._jobs or len(self._jobs) < self.most
            name = ref if is_known else OTHERS
            self._jobs[name] = self._jobs.get(name, 0) + 1

    def of(self, ref: str) -> int:
        """Return how many jobs an expert had a part in; 0 where it has no number of its own."""
        return self._jobs.get(ref, 0)

    def copy(self) -> "ExpertCounts":
        """Return a copy of what was counted so far."""
        return ExpertCounts(self.most, dict(self._jobs))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield references and numbers."""
        return iter(self._jobs.items())
