"""Which experts are exchanged between two tokens, by what the tokens before asked for.

`RequestBuffer` keeps what passes asked for, one entry a pass. The last may still be in flight, so
it waits for the next update, and what it asks for stays resident. Every activation of the other
passes is counted. Then residents that were neither asked for nor pinned give way to missing
experts, the least valuable first: at most ten in a layer, and in no more layers than the budget
allows; other layers only count. Where more are missing than may come, the most valuable come; where
more layers could swap than may, those that gain most do.

An expert comes only if it is worth more than the one that would go. Without that rule an expert
that is asked for once evicts one that is asked for every other token, and is evicted in turn.

An update moves no bytes and exchanges nothing in `LayerSlots`: its owner does both, in that order.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from expertctl.engine.moe.layer_slots import Ids, LayerSlots

MOST_SWAPS = 10
"""Of one layer in one update."""
MOST_PASSES = 256
"""So many are remembered while there is no update; older ones are forgotten uncounted."""
_EMPTY = -1.0
"""What an empty slot is worth: less than any expert."""


@dataclass(frozen=True, slots=True)
class Swap:
    """An expert that comes into a slot, and the one that goes: None where the slot is empty."""

    layer: int
    slot: int
    evict: int | None
    add: int


@dataclass(frozen=True, slots=True)
class Update:
    """What an update found in its window, and what is to be swapped.

    ``requests`` and ``misses`` are of each layer: different experts asked for, and those of them
    that were not resident.
    """

    swaps: tuple[Swap, ...]
    requests: tuple[int, ...]
    misses: tuple[int, ...]

    @property
    def fallback_rate(self) -> float:
        """Unique misses by unique requests, 0 where nothing was asked for."""
        return sum(self.misses) / (sum(self.requests) or 1)


class RequestBuffer:
    """What the last passes asked for, oldest first."""

    def __init__(self) -> None:
        """Begin without a pass."""
        self._passes: deque[tuple[Ids, ...]] = deque(maxlen=MOST_PASSES)

    def append(self, selected: Sequence[Ids]) -> None:
        """Keep a copy of what a pass asked for, [tokens, k] of each layer."""
        self._passes.append(tuple(np.array(asked) for asked in selected))

    def take_settled(self) -> tuple[tuple[Ids, ...], ...]:
        """Hand out all passes but the last, which stays."""
        return tuple(self._passes.popleft() for _ in range(len(self._passes) - 1))

    @property
    def in_flight(self) -> tuple[Ids, ...]:
        """What the last pass asked for, of each layer; empty before the first."""
        return self._passes[-1] if self._passes else ()


def updates_between_tokens(
    slots: Sequence[LayerSlots],
    buffer: RequestBuffer,
    *,
    layer_budget: int,
    swaps_a_layer: int = MOST_SWAPS,
) -> Update:
    """Count what settled passes asked for, and return what is to be swapped now.

    A layer is a position in ``slots``, as in the passes of the buffer.
    """
    settled, in_flight = buffer.take_settled(), buffer.in_flight
    if not settled:
        return Update((), (0,) * len(slots), (0,) * len(slots))
    planned: list[_Planned] = []
    for number, layer in enumerate(slots):
        asked = _joined([selected[number] for selected in settled])
        layer.note(asked)
        planned.append(_plan(number, layer, asked, in_flight[number], limit=swaps_a_layer))
    able = sorted((plan for plan in planned if plan.swaps), key=lambda plan: -plan.gain)
    chosen = sorted(able[: max(layer_budget, 0)], key=lambda plan: plan.swaps[0].layer)
    return Update(
        tuple(swap for plan in chosen for swap in plan.swaps),
        tuple(plan.requests for plan in planned),
        tuple(plan.misses for plan in planned),
    )


@dataclass(frozen=True, slots=True)
class _Planned:
    """What one layer asked for, and what it would swap."""

    requests: int
    misses: int
    swaps: tuple[Swap, ...] = ()
    gain: float = 0.0


def _plan(number: int, layer: LayerSlots, asked: Ids, in_flight: Ids, *, limit: int) -> _Planned:
    requested = _experts(asked, layer)
    missing = [expert for expert in requested if not layer.hit_mask[expert]]
    if not missing or limit <= 0:
        return _Planned(len(requested), len(missing))
    worth = layer.worths()
    wanted = sorted(missing, key=lambda expert: (-worth[expert], expert))[:limit]
    slots = layer.free[: len(wanted)]
    leasts = [_EMPTY] * len(slots)
    if len(slots) < len(wanted):
        stay = [*requested, *_experts(in_flight, layer)]
        able = layer.evictable(stay, worths=worth)[: len(wanted)]
        slots, leasts = slots + able, leasts + worth[layer.ids[able]].tolist()
    gains = [float(worth[expert]) - least for expert, least in zip(wanted, leasts, strict=False)]
    fit = sum(gain > 0 for gain in gains)  # gains fall, so the first do
    adds = sorted(wanted[:fit])
    swaps = (_swap(number, layer, slot, add) for add, slot in zip(adds, slots, strict=False))
    return _Planned(len(requested), len(missing), tuple(swaps), sum(gains[:fit]))


def _joined(parts: list[Ids]) -> Ids:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _swap(number: int, layer: LayerSlots, slot: int, add: int) -> Swap:
    gone = int(layer.ids[slot])
    return Swap(number, slot, None if gone < 0 else gone, add)


def _experts(asked: Ids, layer: LayerSlots) -> list[int]:
    """Return the different experts that were asked for, ascending."""
    different = sorted(set(asked.ravel().tolist()))
    if different and not 0 <= different[0] <= different[-1] < layer.experts:
        return [expert for expert in different if 0 <= expert < layer.experts]
    return different
