"""Which experts are placed in which memory, from what was observed and what there is room for.

The planner takes experts in their order while they fit. The first of a layer in a memory also pays
for the all-zero dummy, which stands for every expert that is not resident there; it is as large as
that first expert. An expert that is too expensive is skipped, and the next is tried.

There are up to three *lanes*: memories of devices, each with its budget. *warm* fills the first
lane, then the next. *hot-even* gives each expert to the lane that has the fewest of its layer, so
that lanes share the work of each layer. *even-split* gives each lane a band of layers as large as
its part of all budgets, and goes through a band's layers in turn.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.weighting import Scored
from expertctl.errors import UsageError

MOST_LANES = 3
COLD = -1
SHUFFLE_SEED = 0x6D6F65
"""Decides the order of experts that were not observed, the same everywhere and for ever."""
_ADDRESSABLE = 2**64 - 1
Strategy = Literal["warm", "hot-even", "even-split"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
LayerExpert = tuple[int, int]
"""The number of a layer, and of an expert in it."""
Sizes = Mapping[LayerExpert, int]
"""Bytes of each expert that a base has."""


@dataclass(slots=True)
class Lane:
    """What one memory holds, in the order in which it was placed."""

    budget: int
    used: int = 0
    experts: list[LayerExpert] = field(default_factory=list)
    of_layer: Counter[int] = field(default_factory=Counter)

    def slots(self, layer: int) -> list[int]:
        """Return the experts of a layer, by slot; the dummy is behind them."""
        return [expert for number, expert in self.experts if number == layer]

    def takes(self, place: LayerExpert, size: int) -> bool:
        """Place an expert if it fits; tell whether it did."""
        layer, _ = place
        cost = size if self.of_layer[layer] else 2 * size
        if cost > min(self.budget, _ADDRESSABLE) - self.used:
            return False
        self.used += cost
        self.experts.append(place)
        self.of_layer[layer] += 1
        return True


@dataclass(frozen=True, slots=True)
class Placement:
    """Which lane holds which experts; the others are cold."""

    lanes: tuple[Lane, ...]

    def lane_map(self, layer: int, *, experts: int) -> NDArray[np.int32]:
        """Return the lane of each expert of a layer, `COLD` for none."""
        lanes: NDArray[np.int32] = np.full(experts, COLD, np.int32)
        for number, lane in enumerate(self.lanes):
            lanes[lane.slots(layer)] = number
        return lanes

    def slot_map(self, layer: int, *, experts: int) -> NDArray[np.int32]:
        """Return the slot of each expert in its lane, `COLD` for none."""
        slots: NDArray[np.int32] = np.full(experts, COLD, np.int32)
        for lane in self.lanes:
            held = lane.slots(layer)
            slots[held] = np.arange(len(held))
        return slots

    def check_integrity(self, sizes: Sizes) -> None:
        """Assert that no expert is placed twice and each lane is within its budget."""
        everywhere = [place for lane in self.lanes for place in lane.experts]
        assert len(set(everywhere)) == len(everywhere)
        for lane in self.lanes:
            first = {layer: lane.slots(layer)[0] for layer in lane.of_layer if lane.slots(layer)}
            dummies = sum(sizes[place] for place in first.items())
            assert lane.used == dummies + sum(sizes[place] for place in lane.experts)
            assert lane.used <= lane.budget


def observed(scored: Iterable[Scored]) -> list[LayerExpert]:
    """Return the experts that were asked for, in their order."""
    return [(expert.layer, expert.expert) for expert in scored]


def filled_up(order: Sequence[LayerExpert], sizes: Sizes) -> list[LayerExpert]:
    """Return an order with all other experts of the base behind it, in a fixed shuffle.

    Sorted by layer and number, they are shuffled by numpy's ``RandomState``, which never changes.
    Memory that is left is better used for them than for nothing.
    """
    rest = sorted(sizes.keys() - set(order))
    shuffled = np.random.RandomState(SHUFFLE_SEED).permutation(len(rest))
    return [*order, *(rest[at] for at in shuffled)]


def placed(
    order: Iterable[LayerExpert],
    sizes: Sizes,
    *,
    budgets: Sequence[int],
    strategy: Strategy = "warm",
) -> Placement:
    """Place experts in their order; those that the base does not have are left out.

    Raises:
        UsageError: when there are no budgets, or more than there can be lanes.
    """
    if not 1 <= len(budgets) <= MOST_LANES:
        raise UsageError(
            f"{len(budgets)} budgets for routed experts, but there are one to {MOST_LANES} lanes",
            hint="give one budget for each device",
        )
    lanes = tuple(Lane(budget) for budget in budgets)
    wanted = [place for place in dict.fromkeys(order) if place in sizes]
    match strategy:
        case "warm":
            _place(wanted, sizes, lanes)
        case "hot-even":
            for place in wanted:
                _offer(place, sizes, sorted(lanes, key=lambda lane: _load(lane, place)))
        case "even-split":
            _split(wanted, sizes, lanes)
    return Placement(lanes)


def _place(wanted: Iterable[LayerExpert], sizes: Sizes, lanes: Sequence[Lane]) -> None:
    for place in wanted:
        _offer(place, sizes, lanes)


def _offer(place: LayerExpert, sizes: Sizes, lanes: Iterable[Lane]) -> None:
    """Offer an expert to one lane after the other."""
    any(lane.takes(place, sizes[place]) for lane in lanes)


def _load(lane: Lane, place: LayerExpert) -> tuple[int, int]:
    """Return what makes another lane the better one: experts of that layer, then bytes."""
    return lane.of_layer[place[0]], lane.used


def _split(wanted: Sequence[LayerExpert], sizes: Sizes, lanes: Sequence[Lane]) -> None:
    layers = sorted({layer for layer, _ in sizes})
    ends = _boundaries([lane.budget for lane in lanes], len(layers))
    for lane, begin, end in zip(lanes, [0, *ends], ends, strict=False):
        queues: dict[int, list[LayerExpert]] = {layer: [] for layer in layers[begin:end]}
        for place in wanted:
            if place[0] in queues:
                queues[place[0]].append(place)
        _place(in_turn(queues.values()), sizes, [lane])


def _boundaries(budgets: Sequence[int], layers: int) -> list[int]:
    """Return where each lane's band of layers ends: its part of all budgets, halves rounded up."""
    total, ends, sums = sum(budgets) or 1, [], 0
    for budget in budgets:
        sums += budget
        ends.append((2 * sums * layers + total) // (2 * total))
    return ends


def in_turn(orders: Iterable[Iterable[LayerExpert]]) -> Iterator[LayerExpert]:
    """Yield the first of every layer, then the second of every layer, as far as there is one."""
    for each in zip_longest(*orders):
        yield from (place for place in each if place is not None)
