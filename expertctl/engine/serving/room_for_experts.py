"""Room for the experts of a server beside the slots of routed experts.

Slots are given out once, when the base is read; which experts will be asked for is not known then.
So they leave room for a text with the one that takes most; the others take turns with it.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from expertctl.engine.loaded_base import OpenBase
from expertctl.engine.message import UserMessage
from expertctl.engine.moe.cache_plan import USUAL_PROMPT
from expertctl.engine.preparation import beside_base, prepare_on
from expertctl.engine.request import RunRequest
from expertctl.errors import ExpertError
from expertctl.routing.candidate import Installed, misfit
from expertctl.routing.planner import Planned
from expertctl.routing.request import Forced
from expertctl.routing.session import PlanningSession
from expertctl.telling import WARNING, Tell

MEASURED = 100
"""Of so many experts it is worked out what they take: of those with the largest files."""


@dataclass(frozen=True, slots=True)
class RoomForExperts:
    """Finds out how much that is, and has the base opened with fewer slots where it has to be.

    ``request`` is any that the base answers alone, ``limit`` all of the memory; a batch has
    ``rows``. ``tell`` gets what whoever runs the server should know.
    """

    session: PlanningSession
    request: RunRequest
    limit: int
    rows: int
    tell: Tell

    def leave(self, base: OpenBase, open_beside: Callable[[int], OpenBase]) -> OpenBase:
        """Return the base, with fewer slots where an expert has no room but for that.

        ``open_beside`` opens the base so that as many bytes are left beside it. Who would have no
        room beside no slots at all does not count.
        """
        if base.config.experts is None:
            return base
        without, fewest = 0, base
        wanted = sorted(self._measured(base), key=lambda one: one[0], reverse=True)
        for size, ref, planned in wanted:
            if self._fits(base, planned):
                break
            if fewest is base or self._fits(fewest, planned):
                try:
                    fewest = open_beside(size)
                except ExpertError as error:  # as many slots are pinned, say
                    self.tell(f"{WARNING}there is no room for {ref}: {error.message}")
                    break
                if self._fits(fewest, planned):
                    self.tell(f"slots of routed experts leave room for {ref}")
                    self._tell_who_is_without(without)
                    return fewest
            without += 1
        self._tell_who_is_without(without)
        return base

    def _measured(self, base: OpenBase) -> Iterator[tuple[int, str, Planned]]:
        """Yield what experts take beside a base, their names, and plans of each on its own."""
        identity, installed = base.stored.identity, self.session.inventory.experts
        fitting = (one for one in installed if not misfit(one, identity, allow_mismatch=False))
        by_size = sorted(fitting, key=lambda expert: expert.resident_bytes, reverse=True)
        for expert in by_size[:MEASURED]:
            with suppress(ExpertError):  # who asks for it is told
                planned = self._planned(expert)
                yield self._beside(base, planned), expert.ref, planned

    def _planned(self, expert: Installed) -> Planned:
        route = replace(self.request.route, base_alone=False, force=(Forced(expert.digest),))
        return self.session.plan(route, base=self.request.base)

    def _fits(self, base: OpenBase, planned: Planned) -> bool:
        return base.weight_bytes + self._beside(base, planned) <= self.limit

    def _beside(self, base: OpenBase, planned: Planned) -> int:
        """Return what a text takes whose prompt is a usual one, and whose answer as long as ever.

        Some depends on the base: gains of an expert that is not in memory are read for.
        """
        planner, message = self.session.planner, UserMessage(prompt="? " * USUAL_PROMPT)
        request = replace(self.request, message=message, truncate=True)
        prepared = prepare_on(base, planner, request, planned, {})
        return beside_base(planner, prepared, {}, rows=self.rows)

    def _tell_who_is_without(self, count: int) -> None:
        if count:
            self.tell(f"{WARNING}there is no room for {count} of the installed experts")
