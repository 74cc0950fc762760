"""Rank routed experts by what was observed, and place them in the memories of devices.

Five rules weigh experts. *flat*, the default, ranks the experts of each layer and takes the first
of every layer, then the second of every layer. *balanced* ranks them too, but a layer with more
experts goes first. The other three multiply hits with a weight of the layer: *pressure* by how much
the layer suffers from cold experts, *smooth* the same, damped and at least 1, *time* by the layer's
total time. ``curve``, from 0 to 1, limits how far these weights may go. In these three a hot hit
counts a twentieth more, so that a profile does not undo itself. The rules are those of llama.cpp's
hot cache.

A placement takes experts in their order while they fit. The first expert of a layer in a memory
also pays for the all-zero dummy, which stands for every expert that is not resident there and is as
large as that first expert. An expert that does not fit is skipped, and the next one is tried.

There are up to three *lanes*: memories of devices, each with its budget. *warm* fills the first
lane, then the next. *hot-even* gives each expert to the lane that has the fewest of its layer, so
that lanes share the work of each layer. *even-split* gives each lane a band of layers in proportion
to its budget, and goes through the layers of a band in turn.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, get_args

import numpy as np

from expertctl.engine.moe.usage_profile import LayerUsage
from expertctl.errors import UsageError

Weighting = Literal["flat", "balanced", "pressure", "smooth", "time"]
WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)
DEFAULT_CURVE = 0.5
HOT_BONUS = 0.05
"""How much more a hot hit counts."""
_RANK_FACTOR = 10**6
Layers = Sequence[LayerUsage]


@dataclass(frozen=True, slots=True)
class ScoredExpert:
    """An expert of a layer and its score; never 0."""

    layer: int
    expert: int
    score: int


def score_experts(
    layers: Layers, *, weighting: Weighting = "flat", curve: float = DEFAULT_CURVE
) -> list[ScoredExpert]:
    """Return all experts that were chosen, the best first; ties by layer, then by expert.

    A ``curve`` outside 0 to 1 is replaced by the default.
    """
    curve = curve if 0 <= curve <= 1 else DEFAULT_CURVE
    match weighting:
        case "flat":
            most = max((len(layer.hits) for layer in layers), default=0)
            found = [scored for layer in layers for scored in _score_by_rank(layer, most)]
        case "balanced":
            found = [
                scored for layer in layers for scored in _score_by_rank(layer, len(layer.hits))
            ]
        case "pressure":
            found = _score_by_weight(layers, _weigh_by_pressure(layers, curve))
        case "smooth":
            found = _score_by_weight(layers, _weigh_smoothly(layers, curve))
        case "time":
            found = _score_by_weight(layers, _weigh_by_time(layers, curve))
    return sorted(found, key=lambda scored: (-scored.score, scored.layer, scored.expert))


def _score_by_rank(layer: LayerUsage, highest: int) -> Iterable[ScoredExpert]:
    """Yield the experts of a layer; the rank counts before the hits."""
    order = sorted(layer.hits.items(), key=lambda item: (-item[1], item[0]))
    for rank, (expert, hits) in enumerate(order):
        yield ScoredExpert(
            layer.layer, expert, (highest - rank) * _RANK_FACTOR + min(hits, _RANK_FACTOR - 1)
        )


def _score_by_weight(layers: Layers, weights: Sequence[float]) -> list[ScoredExpert]:
    """Multiply without rounding: ten times 0.85, which is a little less, is below 8.5."""
    found = []
    for layer, weight in zip(layers, weights, strict=True):
        of_hit, of_weight = weight.as_integer_ratio()
        of_hot, of_sticky = HOT_BONUS.as_integer_ratio()
        whole = 2 * max(of_weight, of_sticky)  # all are powers of two
        of_hit, of_hot = of_hit * whole // of_weight, of_hot * whole // of_sticky
        for expert, hits in layer.hits.items():
            score = hits * of_hit + layer.hot.get(expert, 0) * of_hot
            found.append(ScoredExpert(layer.layer, expert, max(1, (score + whole // 2) // whole)))
    return found


def _weigh_by_pressure(layers: Layers, curve: float) -> list[float]:
    """``1 + c (p / average - 1)``, from ``1 - 0.3 c`` to ``1 + 0.6 c``."""
    pressures = [layer.pressure for layer in layers]
    average = float(np.mean(_positive_values(pressures)))

    def weight(pressure: float) -> float:
        raw = 1 + curve * (pressure / average - 1)
        return min(max(raw, 1 - 0.3 * curve), 1 + 0.6 * curve)

    return _weigh_layers(pressures, weight)


def _weigh_smoothly(layers: Layers, curve: float) -> list[float]:
    """``1 + 0.3 c √((p - p10) / (p90 - p10))``, between the percentiles 10 and 90."""
    pressures = [layer.pressure for layer in layers]
    low, high = map(float, np.percentile(_positive_values(pressures), [10, 90]))
    if high <= low:
        return [1.0] * len(layers)
    return _weigh_layers(
        pressures,
        lambda p: 1 + 0.3 * curve * math.sqrt(min(max((p - low) / (high - low), 0.0), 1.0)),
    )


def _weigh_by_time(layers: Layers, curve: float) -> list[float]:
    """From ``1 - 0.6 c`` for the fastest layer to ``1 + 0.8 c`` for the slowest.

    If the time of a whole call is unknown, that of its lanes side by side is used, or else the sum
    of both; a layer without any of these is weighed by its pressure.
    """
    times = [_layer_time(layer) or layer.pressure for layer in layers]
    low, high = min(_positive_values(times)), max(_positive_values(times))
    if high <= low:
        return [1.0] * len(layers)
    least, most = 1 - 0.6 * curve, 1 + 0.8 * curve
    return _weigh_layers(times, lambda time: least + (most - least) * (time - low) / (high - low))


def _layer_time(layer: LayerUsage) -> float:
    times = layer.times
    lanes = times.parallel_hot_lane_wall + times.parallel_cold_lane_wall
    return times.total_moe or times.parallel_region_wall or lanes


def _positive_values(values: Iterable[float]) -> list[float]:
    """Return the values that are known; a 1 if there are none."""
    return [value for value in values if value > 0] or [1.0]


def _weigh_layers(values: Iterable[float], weight: Callable[[float], float]) -> list[float]:
    """Return the weight of each layer; 1 if its value is unknown."""
    return [weight(value) if value > 0 else 1.0 for value in values]


MAX_LANES = 3
SHUFFLE_SEED = 0x6D6F65
"""Fixes the order of experts that were not observed, everywhere and in all versions."""
_ADDRESSABLE = 2**64 - 1
Strategy = Literal["warm", "hot-even", "even-split"]
LayerExpert = tuple[int, int]
"""The number of a layer in the base, and of an expert in it."""
Sizes = Mapping[LayerExpert, int]
"""Bytes of each expert of a base."""


@dataclass(slots=True)
class PlacementLane:
    """The experts in one memory, in the order of placement."""

    budget: int
    used: int = 0
    experts: list[LayerExpert] = field(default_factory=list)
    layer_counts: Counter[int] = field(default_factory=Counter)

    def list_layer(self, layer: int) -> list[int]:
        """Return the experts of a layer, in the order of their slots; the dummy is behind them."""
        return [expert for number, expert in self.experts if number == layer]

    def try_add(self, place: LayerExpert, size: int) -> bool:
        """Place an expert if it fits; return whether it did."""
        layer, _ = place
        cost = size if self.layer_counts[layer] else 2 * size
        if cost > min(self.budget, _ADDRESSABLE) - self.used:
            return False
        self.used += cost
        self.experts.append(place)
        self.layer_counts[layer] += 1
        return True


@dataclass(frozen=True, slots=True)
class Placement:
    """Which lane holds which experts; the others are cold."""

    lanes: tuple[PlacementLane, ...]

    def check_integrity(self, sizes: Sizes) -> None:
        """Assert that no expert is placed twice and each lane is within its budget."""
        everywhere = [place for lane in self.lanes for place in lane.experts]
        assert len(set(everywhere)) == len(everywhere)
        for lane in self.lanes:
            first = {
                layer: lane.list_layer(layer)[0]
                for layer in lane.layer_counts
                if lane.list_layer(layer)
            }
            dummies = sum(sizes[place] for place in first.items())
            assert lane.used == dummies + sum(sizes[place] for place in lane.experts)
            assert lane.used <= lane.budget


def list_observed(scored: Iterable[ScoredExpert]) -> list[LayerExpert]:
    """Return the experts without their scores, in the same order."""
    return [(expert.layer, expert.expert) for expert in scored]


def append_unobserved(order: Sequence[LayerExpert], sizes: Sizes) -> list[LayerExpert]:
    """Return an order with all other experts of the base behind it, in a fixed shuffle.

    Sorted by layer and number, they are shuffled by numpy's ``RandomState``, whose sequence never
    changes. So spare memory is used as well.
    """
    rest = sorted(sizes.keys() - set(order))
    shuffled = np.random.RandomState(SHUFFLE_SEED).permutation(len(rest))
    return [*order, *(rest[at] for at in shuffled)]


def place_experts(
    order: Iterable[LayerExpert],
    sizes: Sizes,
    *,
    budgets: Sequence[int],
    strategy: Strategy = "warm",
) -> Placement:
    """Place experts in their order; those that the base does not have are ignored.

    Raises:
        UsageError: when there are no budgets, or more than there can be lanes.
    """
    if not 1 <= len(budgets) <= MAX_LANES:
        raise UsageError(
            f"{len(budgets)} budgets for routed experts, but there are one to {MAX_LANES} lanes",
            hint="give one budget for each device",
        )
    lanes = tuple(PlacementLane(budget) for budget in budgets)
    wanted = [place for place in dict.fromkeys(order) if place in sizes]
    match strategy:
        case "warm":
            _place_in_order(wanted, sizes, lanes)
        case "hot-even":
            for place in wanted:
                _place_in_first(
                    place,
                    sizes,
                    sorted(lanes, key=lambda lane: (lane.layer_counts[place[0]], lane.used)),
                )
        case "even-split":
            _place_in_bands(wanted, sizes, lanes)
    return Placement(lanes)


def _place_in_order(
    wanted: Iterable[LayerExpert], sizes: Sizes, lanes: Sequence[PlacementLane]
) -> None:
    for place in wanted:
        _place_in_first(place, sizes, lanes)


def _place_in_first(place: LayerExpert, sizes: Sizes, lanes: Iterable[PlacementLane]) -> None:
    """Place an expert in the first lane where it fits."""
    any(lane.try_add(place, sizes[place]) for lane in lanes)


def _place_in_bands(
    wanted: Sequence[LayerExpert], sizes: Sizes, lanes: Sequence[PlacementLane]
) -> None:
    layers = sorted({layer for layer, _ in sizes})
    ends = _band_ends([lane.budget for lane in lanes], len(layers))
    for lane, begin, end in zip(lanes, [0, *ends], ends, strict=False):
        queues: dict[int, list[LayerExpert]] = {layer: [] for layer in layers[begin:end]}
        for place in wanted:
            if place[0] in queues:
                queues[place[0]].append(place)
        _place_in_order(interleave(queues.values()), sizes, [lane])


def _band_ends(budgets: Sequence[int], layers: int) -> list[int]:
    """Return where the band of each lane ends, by its share of budgets, halves rounded up."""
    total, ends, sums = sum(budgets) or 1, [], 0
    for budget in budgets:
        sums += budget
        ends.append((2 * sums * layers + total) // (2 * total))
    return ends


def interleave(orders: Iterable[Iterable[LayerExpert]]) -> Iterator[LayerExpert]:
    """Yield the first of every layer, then the second of every layer, and so on."""
    for each in zip_longest(*orders):
        yield from (place for place in each if place is not None)
