"""Memory of the serving engine: the start-up report and headroom.

Everything that grows with requests is in the budget: experts, buffers, keys and values. Outside of
it are the interpreter, its libraries and compiled kernels, and the data of active requests, stored
jobs and cached plans, which the server bounds.

The memory outside is measured twice. After the base was loaded it is the resident set minus the
reserved bytes; that is too little where reserved memory has not been written yet, such as the slots
of routed experts. Before the base is loaded it is the whole resident set. The larger one counts.

Slots of routed experts are allocated once, when the base is read, before it is known which adapters
will be requested. So they leave headroom for a sequence with the largest adapter; the others take
turns in it.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from expertctl.engine.load_plan import OpenBase
from expertctl.engine.moe.cache_plan import TYPICAL_PROMPT_TOKENS, TYPICAL_SEQUENCE_TOKENS
from expertctl.engine.preparation import count_bytes_without_base, prepare_for_base
from expertctl.engine.request import RunRequest
from expertctl.errors import WARNING_PREFIX, ExpertError, Notify
from expertctl.routing.candidate import InstalledExpert, explain_misfit
from expertctl.routing.planner import PlannedPrompt
from expertctl.routing.request import (
    ForcedExpert,
)
from expertctl.routing.session import PlanningSession
from expertctl.settings import format_limit, format_size
from expertctl.user_request import UserMessage

REQUEST_BYTES = 128 << 20
"""Allowance for requests, answers and jobs in the report; they seldom use half of it."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of a server's process at its start, in bytes."""

    before: int
    """Resident before the base was loaded."""
    resident: int
    """Resident after the base was loaded and run once."""
    entered: int
    """Reserved in the budget then, whether resident yet or not."""

    @property
    def outside(self) -> int:
        """Resident memory outside the budget."""
        return max(self.resident - self.entered, self.before)


def estimate_memory_bound(process: ProcessMemory, *, budget: int) -> int:
    """Return the maximum bytes of a server's process."""
    return budget + process.outside + REQUEST_BYTES


def describe_memory(
    process: ProcessMemory | None, *, budget: int, kept_kv: int, weights: int
) -> str:
    """Return the start-up message about memory; sizes are bytes.

    ``process`` is None where it is unknown, or where the budget is that of a device.
    """
    within = (
        f"the budget is {format_limit(budget)}: {format_size(weights)} for the base, up to "
        f"{format_size(kept_kv)} for keys and values of earlier requests (--prefix-cache-memory), "
        "the rest for experts and requests that run"
    )
    if process is None:
        return f"memory: {within}"
    bound = estimate_memory_bound(process, budget=budget)
    overhead = format_size(bound - budget)
    return f"memory: at most {format_size(bound)}; {within}; {overhead} outside it for the program"


def describe_context_limit(base: OpenBase, *, limit: int, rows: int) -> str | None:
    """Return a message about the longest sequence; None where typical ones fit.

    ``limit`` is the memory of the server in bytes, ``rows`` the size of a batch. A sequence with
    experts takes more than one without. A server reads two tokens before it starts, so those fit.
    """
    typical = min(TYPICAL_SEQUENCE_TOKENS, base.context)

    def is_too_long(tokens: int) -> bool:
        needed = base.kv_bytes(tokens) + base.buffer_bytes(tokens, rows=rows)
        return base.weight_bytes + needed > limit

    if not is_too_long(typical):
        return None
    longest = bisect_left(range(1, typical), True, key=is_too_long)
    return (
        f"memory suffices for sequences of up to {longest} tokens, prompt and answer together; "
        "raise the memory budget for longer ones"
    )


MAX_MEASURED, MAX_MEASURE_SECONDS = 100, 10.0
"""Experts with the largest files whose memory is computed, and the time for it. After that time
neither this nor the search for headroom starts another expert; each handles at least one."""
_TRIES = 2
_NAMED = 3
"""Number of experts named in a message."""


@dataclass(frozen=True, slots=True)
class _AdapterFootprint:
    """Memory of a sequence with an expert, without the base."""

    size: int
    ref: str
    planned: PlannedPrompt


@dataclass(frozen=True, slots=True)
class AdapterHeadroom:
    """Computes the headroom that experts need, and reopens the base with fewer slots for it.

    ``request`` is any request for the base alone, ``limit`` the whole memory; a batch has ``rows``.
    ``tell`` gets messages for the operator.
    """

    session: PlanningSession
    request: RunRequest
    limit: int
    rows: int
    tell: Notify

    def reserve(self, base: OpenBase, open_with_headroom: Callable[[int], OpenBase]) -> OpenBase:
        """Return the base, with fewer slots where an expert would not fit otherwise.

        ``open_with_headroom`` opens the base so that so many bytes are left. An expert that does
        not fit even without slots, or together with pinned ones, is ignored.
        """
        if base.config.experts is None:
            return base
        until, found = time.monotonic() + MAX_MEASURE_SECONDS, base
        wishes = sorted(self._measure_adapters(base, until), key=lambda one: one.size, reverse=True)
        without, refusals = list[str](), list[str]()
        for number, wish in enumerate(wishes):
            if base.weight_bytes + wish.size <= self.limit:
                break
            if number and time.monotonic() >= until:
                seen = f"{number} of {len(wishes)} experts"
                self.tell(f"{WARNING_PREFIX}headroom was computed for {seen}")
                break
            fewer = self._open_with_room(wish, base, open_with_headroom, refusals)
            if fewer is not None:
                self.tell(f"fewer slots of routed experts leave room for {wish.ref}")
                found = fewer
                break
            without.append(wish.ref)
        for first in refusals[:1]:  # the others say nearly the same
            self.tell(f"{WARNING_PREFIX}{first}")
        if without:
            self.tell(f"{WARNING_PREFIX}there is not enough memory for {_format_refs(without)}")
        return found

    def _measure_adapters(self, base: OpenBase, until: float) -> Iterator[_AdapterFootprint]:
        """Yield the memory of each expert alone, except for those that cannot answer."""
        identity, installed = base.stored.identity, self.session.inventory.experts
        fitting = [
            one for one in installed if not explain_misfit(one, identity, allow_mismatch=False)
        ]
        fitting.sort(key=lambda expert: expert.resident_bytes, reverse=True)
        for number, expert in enumerate(fitting):
            if number == MAX_MEASURED or (number and time.monotonic() > until):
                seen = f"{number} of {len(fitting)} experts"
                self.tell(f"{WARNING_PREFIX}memory was estimated for {seen}")
                return
            with suppress(ExpertError):  # reported to requests that use it
                planned = self._plan_expert(expert)
                yield _AdapterFootprint(self._count_bytes(base, planned), expert.ref, planned)

    def _open_with_room(
        self,
        footprint: _AdapterFootprint,
        base: OpenBase,
        open_with_headroom: Callable[[int], OpenBase],
        refusals: list[str],
    ) -> OpenBase | None:
        """Return the base with headroom for an expert; None where that is impossible.

        Errors from opening the base are added to ``refusals``. An expert may then need more than
        with all slots: routed experts for its DoRA scales have to be read again.
        """
        size = footprint.size
        if base.backend.min_weight_bytes + size > self.limit:
            return None  # opening the base takes time, and a smaller expert may fit
        for _ in range(_TRIES):
            try:
                fewer = open_with_headroom(size)
                size = self._count_bytes(fewer, footprint.planned)
            except ExpertError as error:  # too many slots are pinned, for example
                refusals.append(f"{footprint.ref}: {error.message}")
                return None
            if fewer.weight_bytes + size <= self.limit:
                return fewer
        return None

    def _plan_expert(self, expert: InstalledExpert) -> PlannedPrompt:
        route = replace(self.request.route, base_alone=False, force=(ForcedExpert(expert.digest),))
        return self.session.plan(route, base=self.request.base)

    def _count_bytes(self, base: OpenBase, planned: PlannedPrompt) -> int:
        """Return the memory of a sequence: a typical prompt, and the longest possible answer."""
        planner, message = self.session.planner, UserMessage(prompt="? " * TYPICAL_PROMPT_TOKENS)
        request = replace(self.request, message=message, truncate=True)
        prepared = prepare_for_base(base, planner, request, planned, {})
        return count_bytes_without_base(planner, prepared, {}, rows=self.rows)


def _format_refs(refs: Sequence[str]) -> str:
    others = len(refs) - _NAMED
    return ", ".join(refs[:_NAMED]) + (f" and {others} others" if others > 0 else "")
