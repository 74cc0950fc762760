"""`PlanningSession`: many prompts on one reading of a home.

Installed experts are read once, and who of them may answer is worked out once for each base and
each way of asking; it is worked out again when vectors or what was learnt from runs have changed.
So is what was planned for a prompt, which is remembered where the caller wants that.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from expertctl.routing.candidate import Installed
from expertctl.routing.decision_cache import DecisionCache, Question, as_asked
from expertctl.routing.planner import Planned, Planner
from expertctl.routing.request import RouteRequest
from expertctl.routing.roster import Roster
from expertctl.store.base_record import StoredBase

ROSTERS = 16
"""How many are kept: whoever asks may leave out other experts every time."""

_Key = tuple[object, ...]


class PlanningSession:
    """Plans prompts one after the other; what is installed meanwhile is not seen."""

    def __init__(self, planner: Planner) -> None:
        """Begin with the experts that are installed now."""
        self.planner = planner
        self.inventory = planner.inventory()
        self._rosters: dict[_Key, Roster] = {}
        self._revision = ""
        self._cache = DecisionCache()

    def plan(self, request: RouteRequest, *, base: str | None = None) -> Planned:
        """Plan one prompt as `Planner.plan` does; raises as it does."""
        return self.planner.plan_from(self.inventory, request, base=base, roster=self._roster)

    def recall(self, request: RouteRequest, *, base: str | None = None) -> Planned:
        """Plan one prompt; what was planned for the same prompt before is given again.

        Of its candidates only the first are left then, and the plan has a seed of its own. Raises
        as `plan` does.
        """
        start = time.perf_counter()
        question = Question.of(request, base)
        known = self._cache.find(question, revision=self._now())
        if known is not None:
            return as_asked(known, request, took_ms=(time.perf_counter() - start) * 1000)
        planned = self.plan(request, base=base)
        self._cache.find(question, revision=self._now())  # planning may have added vectors
        self._cache.keep(question, planned)
        return planned

    def check_integrity(self) -> None:
        """Check that no roster names an expert that was not read, and that there are few."""
        self._cache.check_integrity()
        assert len(self._rosters) <= ROSTERS
        known = {expert.digest for expert in self.inventory.experts}
        for roster in self._rosters.values():
            assert {expert.digest for expert in roster.experts} <= known

    def _roster(
        self, request: RouteRequest, base: StoredBase, experts: Sequence[Installed]
    ) -> Roster:
        if self._now() != self._revision:
            self._rosters.clear()
        key = (base.name, base.identity, request.exclude, request.allow_base_mismatch)
        if key not in self._rosters:
            while len(self._rosters) >= ROSTERS:
                del self._rosters[next(iter(self._rosters))]
            self._rosters[key] = self.planner.roster(request, base, experts)
        self._revision = self._now()  # making one may have added vectors
        return self._rosters[key]

    def _now(self) -> str:
        planner = self.planner
        bases = _changed_ns(planner.bases.folder)
        return f"{planner.index.revision} {planner.catalogue.revision()} {bases}"


def _changed_ns(folder: Path) -> int:
    """Return when something was added to a folder or removed; 0 where it is not there."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0
