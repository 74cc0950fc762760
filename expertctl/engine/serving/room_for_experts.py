"""Room for the experts of a server beside the slots of routed experts.

Slots are given out once, when the base is read; which experts will be asked for is not known then.
So they leave room for a text with the one that takes most; the others take turns with it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
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

MEASURED, SECONDS = 100, 10.0
"""Of so many experts, those with the largest files, it is worked out what they take. That may last
so long, and so may looking for room for one after the other; one is looked at in any case."""
_TRIES = 2
_NAMED = 3
"""So many of those who have no room are named."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a text with an expert takes beside the base."""

    size: int
    ref: str
    planned: Planned


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
        room beside no slots at all, or beside those that are pinned, does not count.
        """
        if base.config.experts is None:
            return base
        wishes = sorted(self._wishes(base), key=lambda one: one.size, reverse=True)
        until, found, without = time.monotonic() + SECONDS, base, list[str]()
        for wish in wishes:
            if base.weight_bytes + wish.size <= self.limit:
                break
            in_time = not without or time.monotonic() < until
            fewer = self._with_room(wish, open_beside) if in_time else None
            if fewer is not None:
                self.tell(f"slots of routed experts leave room for {wish.ref}")
                found = fewer
                break
            without.append(wish.ref)
        if without:
            self.tell(f"{WARNING}there is no room for {_named(without)}")
        return found

    def _wishes(self, base: OpenBase) -> Iterator[_Wish]:
        """Yield what experts take, each on its own; who cannot answer takes nothing."""
        until = time.monotonic() + SECONDS
        identity, installed = base.stored.identity, self.session.inventory.experts
        fitting = [one for one in installed if not misfit(one, identity, allow_mismatch=False)]
        fitting.sort(key=lambda expert: expert.resident_bytes, reverse=True)
        for number, expert in enumerate(fitting):
            if number == MEASURED or (number and time.monotonic() > until):
                self.tell(f"what experts take was worked out for {number} of {len(fitting)}")
                return
            with suppress(ExpertError):  # who asks for it is told
                planned = self._planned(expert)
                yield _Wish(self._beside(base, planned), expert.ref, planned)

    def _with_room(self, wish: _Wish, open_beside: Callable[[int], OpenBase]) -> OpenBase | None:
        """Return the base with room for an expert; None where it can have none.

        It may take more than beside the base as it was: what its gains are computed from is read
        where slots come and go.
        """
        size = wish.size
        for _ in range(_TRIES):
            try:
                fewer = open_beside(size)
                size = self._beside(fewer, wish.planned)
            except ExpertError as error:  # as many slots are pinned, say
                self.tell(f"{WARNING}{wish.ref}: {error.message}")
                return None
            if fewer.weight_bytes + size <= self.limit:
                return fewer
        return None

    def _planned(self, expert: Installed) -> Planned:
        route = replace(self.request.route, base_alone=False, force=(Forced(expert.digest),))
        return self.session.plan(route, base=self.request.base)

    def _beside(self, base: OpenBase, planned: Planned) -> int:
        """Return what a text takes: a usual prompt, and as long an answer as there may be."""
        planner, message = self.session.planner, UserMessage(prompt="? " * USUAL_PROMPT)
        request = replace(self.request, message=message, truncate=True)
        prepared = prepare_on(base, planner, request, planned, {})
        return beside_base(planner, prepared, {}, rows=self.rows)


def _named(refs: Sequence[str]) -> str:
    others = len(refs) - _NAMED
    return ", ".join(refs[:_NAMED]) + (f" and {others} others" if others > 0 else "")
