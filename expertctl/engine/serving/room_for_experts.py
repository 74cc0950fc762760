"""Room for the experts of a server beside the slots of routed experts.

Slots are given out once, when the base is read; which experts will be asked for is not known then.
So they leave room for a text with the expert that takes most; the others take turns with it.
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
"""Of so many experts, those with the largest files, the need is worked out. After so long neither
that nor the search for room goes on to a next expert; each looks at one in any case."""
_TRIES = 2
_NAMED = 3
"""How many of the experts that have no room are named."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a text with an expert takes beside the base."""

    size: int
    ref: str
    planned: Planned


@dataclass(frozen=True, slots=True)
class RoomForExperts:
    """Finds out how much room experts need, and opens the base with fewer slots where necessary.

    ``request`` is any that the base answers alone, ``limit`` all of the memory; a batch has
    ``rows``. ``tell`` gets what the operator of the server should know.
    """

    session: PlanningSession
    request: RunRequest
    limit: int
    rows: int
    tell: Tell

    def leave(self, base: OpenBase, open_beside: Callable[[int], OpenBase]) -> OpenBase:
        """Return the base, with fewer slots where an expert would have no room otherwise.

        ``open_beside`` opens the base so that so many bytes are left beside it. An expert that has
        no room even without slots, or beside those that are pinned, does not count.
        """
        if base.config.experts is None:
            return base
        until, found = time.monotonic() + SECONDS, base
        wishes = sorted(self._wishes(base, until), key=lambda one: one.size, reverse=True)
        without, refusals = list[str](), list[str]()
        for number, wish in enumerate(wishes):
            if base.weight_bytes + wish.size <= self.limit:
                break
            if number and time.monotonic() >= until:
                self.tell(f"{WARNING}room was sought for {number} of {len(wishes)} experts")
                break
            fewer = self._with_room(wish, base, open_beside, refusals)
            if fewer is not None:
                self.tell(f"slots of routed experts leave room for {wish.ref}")
                found = fewer
                break
            without.append(wish.ref)
        for first in refusals[:1]:  # the other refusals say nearly the same
            self.tell(f"{WARNING}{first}")
        if without:
            self.tell(f"{WARNING}there is no room for {_named(without)}")
        return found

    def _wishes(self, base: OpenBase, until: float) -> Iterator[_Wish]:
        """Yield what each expert takes on its own, except for those that cannot answer."""
        identity, installed = base.stored.identity, self.session.inventory.experts
        fitting = [one for one in installed if not misfit(one, identity, allow_mismatch=False)]
        fitting.sort(key=lambda expert: expert.resident_bytes, reverse=True)
        for number, expert in enumerate(fitting):
            if number == MEASURED or (number and time.monotonic() > until):
                seen = f"{number} of {len(fitting)} experts"
                self.tell(f"{WARNING}what experts take was worked out for {seen}")
                return
            with suppress(ExpertError):  # told to requests that ask for it
                planned = self._planned(expert)
                yield _Wish(self._beside(base, planned), expert.ref, planned)

    def _with_room(
        self,
        wish: _Wish,
        base: OpenBase,
        open_beside: Callable[[int], OpenBase],
        refusals: list[str],
    ) -> OpenBase | None:
        """Return the base with room for an expert; None where it can have none.

        The reason why the base cannot be opened so goes to ``refusals``. An expert may take more
        than beside a whole base: routed experts that its gains are computed from are read anew.
        """
        size = wish.size
        if base.backend.least_bytes + size > self.limit:
            return None  # to open the base takes time, and a smaller wish may be granted
        for _ in range(_TRIES):
            try:
                fewer = open_beside(size)
                size = self._beside(fewer, wish.planned)
            except ExpertError as error:  # too many slots are pinned, for example
                refusals.append(f"{wish.ref}: {error.message}")
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
