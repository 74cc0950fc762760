"""Which experts swap slots between two passes, and how often.

`plan_updates` works by recent requests. `RequestBuffer` keeps the choices of passes, one entry per
pass. The last may still be in flight, so it waits for the next update, and the experts it chose
stay resident. Every activation of the other passes is counted. Then missing experts replace
residents that were neither chosen nor pinned, the least valuable first: at most ten in a layer, and
in no more layers than the budget allows; other layers only count. If more are missing than may be
added, the most valuable are; if more layers could swap than may, those that gain most do. An expert
is added only if it is worth more than the one it replaces. Without that rule an expert that is
chosen once evicts one that is chosen every other token, and is evicted in turn.

`UpdatePolicy` says when to update, and in how many layers: the more requests miss, the sooner;
while nothing changes, seldom. The numbers are those of flash-moe, from which this policy comes.

`plan_profile_swaps` works by the scores of a profile, while a base stays loaded. In each layer the
experts with the best scores are wanted, as many as are resident. Each absent one is paired with the
resident that scores worst; the gain is the difference of their scores. The pairs that gain most are
swapped, up to a share of all residents. Pinned experts stay.

`plan_pin_swaps` gives slots to pinned experts when pins change: free ones, then those of the least
valuable experts, so pins evict as little as possible.

Nothing here moves bytes or changes `LayerSlots`: the owner of the slots does both, in that order.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from expertctl.engine.moe.layer_slots import EMPTY_SLOT, Ids, LayerSlots

MAX_SWAPS_PER_LAYER = 10
"""Of one layer in one update."""
MAX_PASSES = 256
"""Passes that are kept while there is no update; older ones are dropped uncounted."""
_EMPTY_WORTH = -1.0
"""Worth of an empty slot: less than any expert."""


@dataclass(frozen=True, slots=True)
class Swap:
    """An expert to put into a slot, and the one it evicts; None if the slot is empty."""

    layer: int
    slot: int
    evict: int | None
    add: int


@dataclass(frozen=True, slots=True)
class SwapUpdate:
    """What an update counted, and what to swap.

    ``requests`` and ``misses`` are by layer: different experts that were chosen, and those of them
    that were not resident.
    """

    swaps: tuple[Swap, ...]
    requests: tuple[int, ...]
    misses: tuple[int, ...]

    @property
    def fallback_rate(self) -> float:
        """Unique misses by unique requests; 0 without requests."""
        return sum(self.misses) / (sum(self.requests) or 1)


class RequestBuffer:
    """The choices of the last passes, oldest first."""

    def __init__(self) -> None:
        """Start empty."""
        self._passes: deque[tuple[Ids, ...]] = deque(maxlen=MAX_PASSES)

    def append(self, selected: Sequence[Ids]) -> None:
        """Keep a copy of the choices of a pass, [tokens, k] of each layer."""
        self._passes.append(tuple(np.array(asked) for asked in selected))

    def take_settled(self) -> tuple[tuple[Ids, ...], ...]:
        """Remove and return all passes but the last."""
        return tuple(self._passes.popleft() for _ in range(len(self._passes) - 1))

    @property
    def in_flight(self) -> tuple[Ids, ...]:
        """The choices of the last pass, by layer; empty before the first."""
        return self._passes[-1] if self._passes else ()


def plan_updates(
    slots: Sequence[LayerSlots],
    buffer: RequestBuffer,
    *,
    layer_budget: int,
    swaps_per_layer: int = MAX_SWAPS_PER_LAYER,
) -> SwapUpdate:
    """Count the choices of settled passes, and return what to swap now.

    A layer is an index into ``slots``, as in the passes of the buffer.
    """
    settled, in_flight = buffer.take_settled(), buffer.in_flight
    if not settled:
        return SwapUpdate((), (0,) * len(slots), (0,) * len(slots))
    planned: list[_LayerUpdate] = []
    for number, layer in enumerate(slots):
        requested = np.concatenate([selected[number] for selected in settled])
        layer.record_tokens(requested)
        planned.append(
            _plan_layer(number, layer, requested, in_flight[number], limit=swaps_per_layer)
        )
    evictable = sorted((plan for plan in planned if plan.swaps), key=lambda plan: -plan.gain)
    chosen = sorted(evictable[: max(layer_budget, 0)], key=lambda plan: plan.swaps[0].layer)
    return SwapUpdate(
        tuple(swap for plan in chosen for swap in plan.swaps),
        tuple(plan.requests for plan in planned),
        tuple(plan.misses for plan in planned),
    )


@dataclass(frozen=True, slots=True)
class _LayerUpdate:
    """What one layer requested, and what it would swap."""

    requests: int
    misses: int
    swaps: tuple[Swap, ...] = ()
    gain: float = 0.0


def _plan_layer(
    number: int, layer: LayerSlots, asked: Ids, in_flight: Ids, *, limit: int
) -> _LayerUpdate:
    requested = _list_distinct(asked, layer)
    missing = [expert for expert in requested if not layer.hit_mask[expert]]
    if not missing or limit <= 0:
        return _LayerUpdate(len(requested), len(missing))
    worth = layer.worths()
    wanted = sorted(missing, key=lambda expert: (-worth[expert], expert))[:limit]
    slots = layer.free_slots[: len(wanted)]
    worths = [_EMPTY_WORTH] * len(slots)
    if len(slots) < len(wanted):
        stay = [*requested, *_list_distinct(in_flight, layer)]
        evictable = layer.rank_evictable(stay, worths=worth)[: len(wanted)]
        slots, worths = slots + evictable, worths + worth[layer.ids[evictable]].tolist()
    gains = [float(worth[expert]) - least for expert, least in zip(wanted, worths, strict=False)]
    fit = sum(gain > 0 for gain in gains)  # gains fall, so the first do
    adds = sorted(wanted[:fit])
    swaps = (_make_swap(number, layer, slot, add) for add, slot in zip(adds, slots, strict=False))
    return _LayerUpdate(len(requested), len(missing), tuple(swaps), sum(gains[:fit]))


def _make_swap(number: int, layer: LayerSlots, slot: int, add: int) -> Swap:
    evicted = int(layer.ids[slot])
    return Swap(number, slot, None if evicted < 0 else evicted, add)


def _list_distinct(asked: Ids, layer: LayerSlots) -> list[int]:
    """Return the different experts that were chosen, ascending."""
    different = sorted(set(asked.ravel().tolist()))
    if different and not 0 <= different[0] <= different[-1] < layer.experts:
        return [expert for expert in different if 0 <= expert < layer.experts]
    return different


LOW_MISS_RATE = 0.005
"""A window that misses at most this share is a low one."""


@dataclass(frozen=True, slots=True)
class UpdateSchedule:
    """Update after ``interval`` tokens, swapping in at most ``layer_budget`` layers."""

    interval: int
    layer_budget: int


@dataclass(frozen=True, slots=True)
class UpdateHistory:
    """The updates of a sequence so far: its tokens, the last miss rate and two streaks."""

    tokens: int = 0
    fallback_rate: float = 0.0
    no_swap_streak: int = 0
    """Consecutive updates that swapped nothing."""
    low_streak: int = 0
    """Consecutive updates with a low window."""


def choose_schedule(history: UpdateHistory) -> UpdateSchedule:
    """Return when to update next, and in how many layers."""
    schedule = _choose_base_schedule(history)
    rate = history.fallback_rate
    if history.no_swap_streak >= 4 and rate < 0.15:
        schedule = UpdateSchedule(schedule.interval * 2, max(8, schedule.layer_budget // 2))
    if history.low_streak >= 6 and rate < 0.08:
        schedule = UpdateSchedule(max(schedule.interval, 12), 8)
    if history.low_streak >= 12 and rate < 0.05:
        schedule = UpdateSchedule(max(schedule.interval, 20), 8)
    return schedule


def _choose_base_schedule(history: UpdateHistory) -> UpdateSchedule:
    """Return the schedule for a high miss rate, else that for the length of the sequence."""
    for least, schedule in (
        (0.35, UpdateSchedule(1, 48)),
        (0.20, UpdateSchedule(1, 32)),
        (0.10, UpdateSchedule(2, 24)),
    ):
        if history.fallback_rate >= least:
            return schedule
    for most, schedule in ((32, UpdateSchedule(2, 24)), (96, UpdateSchedule(3, 16))):
        if history.tokens <= most:
            return schedule
    return UpdateSchedule(4, 12)


class UpdatePolicy:
    """When the next update of a sequence is due."""

    def __init__(self) -> None:
        """Start with a sequence without tokens."""
        self.history = UpdateHistory()
        self._since = 0

    @property
    def layer_budget(self) -> int:
        """In how many layers the next update may swap."""
        return choose_schedule(self.history).layer_budget

    def is_due(self) -> bool:
        """Tell whether to update now."""
        return self._since >= choose_schedule(self.history).interval

    def count_tokens(self, tokens: int = 1) -> None:
        """Count tokens of the sequence."""
        self._since += tokens
        self.history = replace(self.history, tokens=self.history.tokens + tokens)

    def record_update(self, update: SwapUpdate) -> None:
        """Record the result of an update; one without requests is ignored."""
        self._since = 0
        if not sum(update.requests):
            return
        rate, history = update.fallback_rate, self.history
        self.history = replace(
            history,
            fallback_rate=rate,
            no_swap_streak=0 if update.swaps else history.no_swap_streak + 1,
            low_streak=history.low_streak + 1 if rate <= LOW_MISS_RATE else 0,
        )


_EPSILON = 1e-9
"""0.07 * 100 is slightly above 7, which must not round up to 8."""
ExpertScores = Mapping[int, int | float]
"""Score of each observed expert of a layer."""


def plan_profile_swaps(
    slots: Mapping[int, LayerSlots], scores: Mapping[int, ExpertScores], *, rate: float
) -> tuple[Swap, ...]:
    """Return the swaps of a profile at a rate from 0, none, to 1, all that gain."""
    pairs: list[tuple[float, Swap]] = []
    for layer, residents in slots.items():
        pairs += _rank_swaps(layer, residents, scores.get(layer, {}))
    pairs.sort(key=lambda pair: (-pair[0], pair[1].layer, pair[1].add))
    hot = sum(len(residents.resident_ids) for residents in slots.values())
    most = compute_max_swaps(rate=rate, resident_count=hot, candidates=len(pairs))
    return tuple(swap for _, swap in pairs[:most])


def limit_swaps(
    swaps: Iterable[Swap],
    applied: Iterable[Swap],
    *,
    layer_budget: int,
    swaps_per_layer: int = MAX_SWAPS_PER_LAYER,
) -> list[Swap]:
    """Return the first swaps that still fit into an update besides the ``applied`` ones.

    Together they are no more in a layer, and in no more layers, than one update may do.
    """
    taken, fit = Counter(swap.layer for swap in applied), []
    for swap in swaps:
        is_new = not taken[swap.layer]
        layers = sum(count > 0 for count in taken.values())
        if taken[swap.layer] < swaps_per_layer and (not is_new or layers < layer_budget):
            taken[swap.layer] += 1
            fit.append(swap)
    return fit


def compute_max_swaps(*, rate: float, resident_count: int, candidates: int) -> int:
    """Return how many experts may be swapped: a share of the residents, rounded up."""
    share = rate if 0 <= rate <= 1 else float(rate > 1)
    return min(candidates, math.ceil(share * resident_count - _EPSILON))


def _rank_swaps(layer: int, slots: LayerSlots, scores: ExpertScores) -> list[tuple[float, Swap]]:
    """Return the swaps of one layer with a positive gain, and their gains."""
    ranked = sorted(
        (expert for expert in scores if 0 <= expert < slots.experts and scores[expert] > 0),
        key=lambda expert: (-scores[expert], expert),
    )
    residents = slots.resident_ids
    wanted = {*ranked[: len(residents)]}
    adds = [expert for expert in ranked[: len(residents)] if expert not in residents]
    worst = sorted(
        (expert for expert in residents if expert not in wanted | slots.pinned),
        key=lambda expert: (scores.get(expert, 0), int(slots.lookup[expert])),
    )
    found = []
    for add, evict in zip(adds, worst, strict=False):
        if (gain := scores[add] - scores.get(evict, 0)) > 0:
            found.append((gain, Swap(layer, int(slots.lookup[evict]), evict, add)))
    return found


def plan_pin_swaps(slots: Sequence[LayerSlots]) -> list[Swap]:
    """Return the swaps that put all pinned experts into slots, layer by layer.

    A layer is an index into ``slots``.
    """
    return [swap for number, layer in enumerate(slots) for swap in _plan_layer_pins(number, layer)]


def _plan_layer_pins(number: int, layer: LayerSlots) -> Iterator[Swap]:
    absent = [expert for expert in sorted(layer.pinned) if not layer.hit_mask[expert]]
    if not absent:
        return
    slots = [
        *layer.free_slots,
        *layer.rank_evictable(),
    ]  # enough: there are no more pins than slots
    for slot, expert in zip(slots, absent, strict=False):
        evicted = int(layer.ids[slot])
        yield Swap(number, slot, None if evicted == EMPTY_SLOT else evicted, expert)
