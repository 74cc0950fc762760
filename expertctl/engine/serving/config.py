"""What a batch is: its base, its limits, and what it does where memory is short.

What the log of a server says at its start about the memory that it may come to take.

All that grows with what is asked is in the budget: experts, buffers, keys and values. Outside of it
are the interpreter, its libraries and compiled kernels, and what belongs to requests that are under
way, to jobs that are kept and to plans that are remembered, which the server bounds.

What is outside is measured twice. After the base was loaded it is the resident set less the ledger;
that is too little where the ledger counts memory that nothing has written yet, such as room for
routed experts. Before the base is loaded it is the whole resident set. The larger one counts.

Room for the texts of a server: one that begins in little memory says how long they may be.

Room for the experts of a server beside the slots of routed experts.

Slots are given out once, when the base is read; which experts will be asked for is not known then.
So they leave room for a text with the expert that takes most; the others take turns with it.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from expertctl.engine.model.load_plan import OpenBase
from expertctl.engine.moe.cache_plan import TYPICAL_PROMPT_TOKENS, TYPICAL_SEQUENCE_TOKENS
from expertctl.engine.moe.warmup import DEFAULT_WARMUP, WarmupConfig
from expertctl.engine.preparation import count_bytes_without_base, prepare_for_base
from expertctl.engine.request import RunRequest
from expertctl.engine.text.prompt import UserMessage
from expertctl.errors import ExpertError
from expertctl.messages import WARNING_PREFIX, Notify
from expertctl.routing.candidate import InstalledExpert, explain_misfit
from expertctl.routing.planner import PlannedPrompt
from expertctl.routing.request import (
    DEFAULT_SKIP_CAP,
    AdapterDtype,
    DeviceName,
    Dtype,
    ForcedExpert,
    MoeColdOption,
    MoeMiss,
)
from expertctl.routing.session import PlanningSession
from expertctl.settings import format_limit, format_size

DEFAULT_ROWS, DEFAULT_QUEUE = 16, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One base in one form, and how many texts of it are written at a time."""

    base: str | None = None
    """Its name; None: the only one there is, or the one that `expertctl base` prefers."""
    budget: int | None = None
    """Bytes of the device's memory; None: as much as `run` would take."""
    kept_kv: int | None = None
    """Bytes of keys and values that are kept for later requests; None: a part of the budget."""
    device: DeviceName = "cpu"
    dtype: Dtype | None = None
    adapter_dtype: AdapterDtype = "published"
    deterministic: bool = False
    moe_miss: MoeMiss = "exact"
    moe_skip_cap: float = DEFAULT_SKIP_CAP
    moe_cold: MoeColdOption = "auto"
    moe: WarmupConfig = DEFAULT_WARMUP
    """How routed experts begin, where not all of them fit."""
    rows: int = DEFAULT_ROWS
    """How many texts are written at a time."""
    queue: int = DEFAULT_QUEUE
    """How many jobs may wait; more are refused."""
    on_budget: Literal["queue", "fewer"] = "queue"
    """What is done when experts do not fit: wait, or leave out those that never would."""
    warm_experts: bool = True
    """Whether kernels are compiled at the start for each kind of the installed experts."""
    tell_memory: bool = True
    """Whether the operator is told at the start what the memory is used for."""
    files: tuple[Path, ...] = ()
    """The ``.expert`` files that jobs may name; each is read into memory once, at the start."""
    warm: tuple[str, ...] = ()
    """Prompts that are answered with a few tokens before the first job is taken."""


REQUEST_BYTES = 128 << 20
"""Room that is stated for requests, answers and jobs; in use it is seldom half of that."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What the process of a server had at its start, in bytes."""

    before: int
    """Resident before its base was loaded."""
    resident: int
    """Resident when its base is in memory and was run once."""
    entered: int
    """In the budget then, whether it is resident yet or not."""

    @property
    def outside(self) -> int:
        """What is resident beside the budget."""
        return max(self.resident - self.entered, self.before)


def estimate_memory_bound(process: ProcessMemory, *, budget: int) -> int:
    """Return how many bytes a server's process takes at most."""
    return budget + process.outside + REQUEST_BYTES


def describe_memory(
    process: ProcessMemory | None, *, budget: int, kept_kv: int, weights: int
) -> str:
    """Return the sentence of the log; sizes are bytes.

    ``process`` is None where the system does not tell, or the budget is that of a device.
    """
    within = (
        f"the budget is {format_limit(budget)}: {format_size(weights)} for the base, up to "
        f"{format_size(kept_kv)} for keys and values of earlier requests (--prefix-cache-memory), "
        "the rest for experts and requests that run"
    )
    if process is None:
        return f"memory: {within}"
    bound = estimate_memory_bound(process, budget=budget)
    beside = format_size(bound - budget)
    return f"memory: at most {format_size(bound)}; {within}; {beside} beside it for the program"


def describe_context_limit(base: OpenBase, *, limit: int, rows: int) -> str | None:
    """Return what an operator should know of the length of texts; None where usual ones fit.

    ``limit`` are the bytes of all that a server holds, ``rows`` the texts of a batch. A text with
    experts takes more than one without. A server reads two tokens before it begins, so those fit.
    """
    usual = min(TYPICAL_SEQUENCE_TOKENS, base.context)

    def is_too_long(tokens: int) -> bool:
        beside = base.kv_bytes(tokens) + base.buffer_bytes(tokens, rows=rows)
        return base.weight_bytes + beside > limit

    if not is_too_long(usual):
        return None
    longest = bisect_left(range(1, usual), True, key=is_too_long)
    return (
        f"there is room for texts up to {longest} tokens, prompt and answer together; raise the "
        "memory budget for longer ones"
    )


MAX_MEASURED, MAX_MEASURE_SECONDS = 100, 10.0
"""Of so many experts, those with the largest files, the need is worked out. After so long neither
that nor the search for room goes on to a next expert; each looks at one in any case."""
_TRIES = 2
_NAMED = 3
"""How many of the experts that have no room are named."""


@dataclass(frozen=True, slots=True)
class _AdapterFootprint:
    """What a text with an expert takes beside the base."""

    size: int
    ref: str
    planned: PlannedPrompt


@dataclass(frozen=True, slots=True)
class AdapterHeadroom:
    """Finds out how much room experts need, and opens the base with fewer slots where necessary.

    ``request`` is any that the base answers alone, ``limit`` all of the memory; a batch has
    ``rows``. ``tell`` gets what the operator of the server should know.
    """

    session: PlanningSession
    request: RunRequest
    limit: int
    rows: int
    tell: Notify

    def reserve(self, base: OpenBase, open_with_headroom: Callable[[int], OpenBase]) -> OpenBase:
        """Return the base, with fewer slots where an expert would have no room otherwise.

        ``open_beside`` opens the base so that so many bytes are left beside it. An expert that has
        no room even without slots, or beside those that are pinned, does not count.
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
                self.tell(f"{WARNING_PREFIX}room was sought for {number} of {len(wishes)} experts")
                break
            fewer = self._open_with_room(wish, base, open_with_headroom, refusals)
            if fewer is not None:
                self.tell(f"slots of routed experts leave room for {wish.ref}")
                found = fewer
                break
            without.append(wish.ref)
        for first in refusals[:1]:  # the other refusals say nearly the same
            self.tell(f"{WARNING_PREFIX}{first}")
        if without:
            self.tell(f"{WARNING_PREFIX}there is no room for {_format_refs(without)}")
        return found

    def _measure_adapters(self, base: OpenBase, until: float) -> Iterator[_AdapterFootprint]:
        """Yield what each expert takes on its own, except for those that cannot answer."""
        identity, installed = base.stored.identity, self.session.inventory.experts
        fitting = [
            one for one in installed if not explain_misfit(one, identity, allow_mismatch=False)
        ]
        fitting.sort(key=lambda expert: expert.resident_bytes, reverse=True)
        for number, expert in enumerate(fitting):
            if number == MAX_MEASURED or (number and time.monotonic() > until):
                seen = f"{number} of {len(fitting)} experts"
                self.tell(f"{WARNING_PREFIX}what experts take was worked out for {seen}")
                return
            with suppress(ExpertError):  # told to requests that ask for it
                planned = self._plan_expert(expert)
                yield _AdapterFootprint(self._count_bytes(base, planned), expert.ref, planned)

    def _open_with_room(
        self,
        footprint: _AdapterFootprint,
        base: OpenBase,
        open_with_headroom: Callable[[int], OpenBase],
        refusals: list[str],
    ) -> OpenBase | None:
        """Return the base with room for an expert; None where it can have none.

        The reason why the base cannot be opened so goes to ``refusals``. An expert may take more
        than beside a whole base: routed experts that its gains are computed from are read anew.
        """
        size = footprint.size
        if base.backend.min_weight_bytes + size > self.limit:
            return None  # to open the base takes time, and a smaller wish may be granted
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
        """Return what a text takes: a usual prompt, and as long an answer as there may be."""
        planner, message = self.session.planner, UserMessage(prompt="? " * TYPICAL_PROMPT_TOKENS)
        request = replace(self.request, message=message, truncate=True)
        prepared = prepare_for_base(base, planner, request, planned, {})
        return count_bytes_without_base(planner, prepared, {}, rows=self.rows)


def _format_refs(refs: Sequence[str]) -> str:
    others = len(refs) - _NAMED
    return ", ".join(refs[:_NAMED]) + (f" and {others} others" if others > 0 else "")
