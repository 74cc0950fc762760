"""The largest experts of a server, for which slots of routed experts leave room.

Slots are given out once, when the base is read; which experts will be asked for is not known then.
So there is room for the largest of those that are installed, which others take turns with.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from expertctl.engine.loaded_base import OpenBase
from expertctl.engine.moe.cache_plan import USUAL_TOKENS
from expertctl.engine.preparation import lacking, plan_request, prepare_on
from expertctl.engine.request import RunRequest
from expertctl.errors import ExpertError
from expertctl.routing.candidate import Installed, misfit
from expertctl.routing.planner import Planned, Planner
from expertctl.routing.presets import SamplingWishes
from expertctl.routing.request import Forced
from expertctl.routing.session import PlanningSession


@dataclass(frozen=True, slots=True)
class LargestExperts:
    """Finds them, and what a usual text with one of them takes in a batch of ``rows``.

    ``request`` is any that is answered by the base alone, ``limit`` all of the memory.
    """

    planner: Planner
    session: PlanningSession
    request: RunRequest
    limit: int
    rows: int

    def beside(self, base: OpenBase, open_beside: Callable[[int], OpenBase]) -> OpenBase:
        """Return the base, with fewer slots where the largest expert has no room but for that.

        Where it has none beside no slots at all, the next one counts. ``open_beside`` opens the
        base so that as many bytes are left beside it.
        """
        least = base
        for expert in self._fitting(base):
            request = self._asking_for(expert)
            with suppress(ExpertError):  # who asks for it is told
                planned = plan_request(self.session, request, {})
                missing = self._lacking(base, request, planned)
                if not missing:
                    return base
                if least is base or not self._lacking(least, request, planned):
                    fewer = open_beside(missing)
                    if not self._lacking(fewer, request, planned):
                        return fewer
                    least = fewer  # too large an expert left no slots
        return base

    def _fitting(self, base: OpenBase) -> list[Installed]:
        """Return the experts for a base of routed experts, the largest first."""
        if base.config.experts is None:
            return []
        identity, installed = base.stored.identity, self.session.inventory.experts
        fitting = (one for one in installed if not misfit(one, identity, allow_mismatch=False))
        return sorted(fitting, key=lambda expert: expert.resident_bytes, reverse=True)

    def _asking_for(self, expert: Installed) -> RunRequest:
        wishes = SamplingWishes(max_tokens=USUAL_TOKENS)
        route = replace(self.request.route, base_alone=False, wishes=wishes)
        return replace(self.request, route=route, experts=(Forced(expert.digest),))

    def _lacking(self, base: OpenBase, request: RunRequest, planned: Planned) -> int:
        prepared = prepare_on(base, self.planner, request, planned, {})
        return lacking(self.planner, prepared, {}, limit=self.limit, rows=self.rows)
