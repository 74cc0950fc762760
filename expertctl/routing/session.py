"""`PlanningSession`: many prompts to one home, reading again only what has changed.

Installed experts are read again when any process added or removed one, changed trust, learnt that
one was yanked, or changed a lock file or list that names an exact version. Which of
them may answer is worked out once for each base and each way of asking, until one of these, the
vectors or what was learnt from runs changes. The same holds for the plan of a prompt, which is
remembered for a while where the caller wants that.
"""

import time
from collections.abc import Callable, Sequence

from expertctl.routing.candidate import Installed
from expertctl.routing.decision_cache import DecisionCache, Question, as_asked
from expertctl.routing.planner import Inventory, Planned, Planner
from expertctl.routing.request import RouteRequest
from expertctl.routing.roster import Roster
from expertctl.store.base_record import StoredBase
from expertctl.store.file_mark import stamp_of
from expertctl.store.flags import FILE as FLAGGED_FILE
from expertctl.store.pins import PinFiles

ROSTERS = 16
"""How many rosters are kept: every request may leave out other experts."""

_Key = tuple[object, ...]


class PlanningSession:
    """Plans prompts one after the other."""

    def __init__(self, planner: Planner, *, clock: Callable[[], float] = time.time) -> None:
        """Remember the planner; nothing is read yet."""
        self.planner = planner
        flagged = planner.index.folder / FLAGGED_FILE
        self._trust = str(planner.trust.path)
        self._yanked = str(planner.home.yanked)
        self._pins = PinFiles(planner.home, planner.folder)
        self._beside = (str(planner.bases.folder), str(flagged))
        self._kept: tuple[_Key, Inventory] | None = None
        self._rosters: dict[_Key, Roster] = {}
        self._revision: _Key = ()
        self._cache = DecisionCache(clock=clock)

    @property
    def inventory(self) -> Inventory:
        """The experts that are installed now."""
        mark, kept = self._installed(), self._kept
        if kept is None or kept[0] != mark:
            self._rosters.clear()
            kept = self._kept = (mark, self.planner.inventory())
        return kept[1]

    def plan(
        self, request: RouteRequest, *, base: str | None = None, files: Sequence[Installed] = ()
    ) -> Planned:
        """Plan one prompt as `Planner.plan` does; raises as it does."""
        roster = None if files else self._roster  # rosters with files are not worth keeping
        inventory = self.inventory
        return self.planner.plan_from(inventory, request, base=base, files=files, roster=roster)

    def recall(
        self, request: RouteRequest, *, base: str | None = None, files: Sequence[Installed] = ()
    ) -> Planned:
        """Plan one prompt; a plan made before for the same prompt is returned again.

        Such a plan keeps only its first candidates and gets its own seed. With ``files`` nothing is
        remembered. Raises as `plan` does.
        """
        start = time.perf_counter()
        question, before = Question.of(request, base), self._changes()
        known = None if files else self._cache.find(question, revision=self._with_vectors(before))
        if known is not None:
            return as_asked(known, request, took_ms=(time.perf_counter() - start) * 1000)
        planned = self.plan(request, base=base, files=files)
        if not files and self._changes() == before:
            now = self._with_vectors(before)  # planning may have added some
            self._cache.find(question, revision=now)
            self._cache.keep(question, planned)
        return planned

    def check_integrity(self) -> None:
        """Check that no roster names an expert that was not read, and that there are few."""
        self._cache.check_integrity()
        assert len(self._rosters) <= ROSTERS
        experts = self._kept[1].experts if self._kept else ()
        known = {expert.digest for expert in experts}
        for roster in self._rosters.values():
            assert {expert.digest for expert in roster.experts} <= known

    def _roster(
        self, request: RouteRequest, base: StoredBase, experts: Sequence[Installed]
    ) -> Roster:
        changes = self._changes()  # before anything is read: what changes meanwhile is seen next
        if self._with_vectors(changes) != self._revision:
            self._rosters.clear()
        key = (base.name, base.identity, request.exclude, request.allow_base_mismatch)
        if key not in self._rosters:
            while len(self._rosters) >= ROSTERS:
                del self._rosters[next(iter(self._rosters))]
            self._rosters[key] = self.planner.roster(request, base, experts)
        self._revision = self._with_vectors(changes)  # making one may have added some
        return self._rosters[key]

    def _with_vectors(self, changes: _Key) -> _Key:
        """Return a key that changes with anything that a plan depends on."""
        return self.planner.index.revision, *changes

    def _changes(self) -> _Key:
        """Return the same key without the vectors, which planning itself may add."""
        beside = map(stamp_of, self._beside)
        return *self._installed(), self.planner.catalogue.revision(), *beside

    def _installed(self) -> _Key:
        stamps = stamp_of(self._trust), stamp_of(self._yanked), self._pins.stamps()
        return self.planner.store.revision(), *stamps
