"""What each observed expert is worth, by one of five rules; a planner takes the best first.

*flat* (the usual one) ranks the experts of each layer and takes the first of every layer, then the
second of every layer. *balanced* ranks them too, but a layer with more experts goes first. The
other three multiply hits with a weight of the layer: *pressure* by how much the layer suffers from
cold experts, *smooth* the same, damped and never below 1, *time* by the layer's total time.
``curve``, from 0 to 1, says how far weights may go. In these three a hot hit counts a twentieth
more, so that a profile does not undo itself. The rules are those of llama.cpp's hot cache.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from expertctl.engine.moe.activity_document import LayerActivity

Weighting = Literal["flat", "balanced", "pressure", "smooth", "time"]
WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)
CURVE = 0.5
STICKY = 0.05
"""How much more a hot hit counts."""
_RANK = 10**6
Layers = Sequence[LayerActivity]


@dataclass(frozen=True, slots=True)
class Scored:
    """An expert of a layer and what it is worth; never 0."""

    layer: int
    expert: int
    score: int


def scores(layers: Layers, *, weighting: Weighting = "flat", curve: float = CURVE) -> list[Scored]:
    """Return all experts that were asked for, the best first; ties by layer, then by expert.

    A ``curve`` outside 0 to 1 stands for the usual one.
    """
    curve = curve if 0 <= curve <= 1 else CURVE
    match weighting:
        case "flat":
            most = max((len(layer.hits) for layer in layers), default=0)
            found = [scored for layer in layers for scored in _ranked(layer, most)]
        case "balanced":
            found = [scored for layer in layers for scored in _ranked(layer, len(layer.hits))]
        case "pressure":
            found = _weighted(layers, _pressure_weights(layers, curve))
        case "smooth":
            found = _weighted(layers, _smooth_weights(layers, curve))
        case "time":
            found = _weighted(layers, _time_weights(layers, curve))
    return sorted(found, key=lambda scored: (-scored.score, scored.layer, scored.expert))


def _ranked(layer: LayerActivity, highest: int) -> Iterable[Scored]:
    """Yield the experts of a layer, whose rank counts before their hits."""
    order = sorted(layer.hits.items(), key=lambda item: (-item[1], item[0]))
    for rank, (expert, hits) in enumerate(order):
        yield Scored(layer.layer, expert, (highest - rank) * _RANK + min(hits, _RANK - 1))


def _weighted(layers: Layers, weights: Sequence[float]) -> list[Scored]:
    """Multiply without rounding: ten times 0.85, which is a little less, is not yet 8.5."""
    found = []
    for layer, weight in zip(layers, weights, strict=True):
        of_hit, of_weight = weight.as_integer_ratio()
        of_hot, of_sticky = STICKY.as_integer_ratio()
        whole = 2 * max(of_weight, of_sticky)  # all are powers of two
        of_hit, of_hot = of_hit * whole // of_weight, of_hot * whole // of_sticky
        for expert, hits in layer.hits.items():
            score = hits * of_hit + layer.hot.get(expert, 0) * of_hot
            found.append(Scored(layer.layer, expert, max(1, (score + whole // 2) // whole)))
    return found


def _pressure_weights(layers: Layers, curve: float) -> list[float]:
    """``1 + c (p / average - 1)``, from ``1 - 0.3 c`` to ``1 + 0.6 c``."""
    pressures = [layer.pressure for layer in layers]
    average = float(np.mean(_known(pressures)))

    def weight(pressure: float) -> float:
        raw = 1 + curve * (pressure / average - 1)
        return min(max(raw, 1 - 0.3 * curve), 1 + 0.6 * curve)

    return _each(pressures, weight)


def _smooth_weights(layers: Layers, curve: float) -> list[float]:
    """``1 + 0.3 c √((p - p10) / (p90 - p10))``, between the percentiles 10 and 90."""
    pressures = [layer.pressure for layer in layers]
    low, high = map(float, np.percentile(_known(pressures), [10, 90]))
    if high <= low:
        return [1.0] * len(layers)
    return _each(
        pressures,
        lambda p: 1 + 0.3 * curve * math.sqrt(min(max((p - low) / (high - low), 0.0), 1.0)),
    )


def _time_weights(layers: Layers, curve: float) -> list[float]:
    """From ``1 - 0.6 c`` for the fastest layer to ``1 + 0.8 c`` for the slowest.

    Where the time of a whole call is not told, it is that of its lanes side by side, or else the
    sum of both; a layer that tells none of these is weighed by its pressure.
    """
    times = [_time(layer) or layer.pressure for layer in layers]
    low, high = min(_known(times)), max(_known(times))
    if high <= low:
        return [1.0] * len(layers)
    least, most = 1 - 0.6 * curve, 1 + 0.8 * curve
    return _each(times, lambda time: least + (most - least) * (time - low) / (high - low))


def _time(layer: LayerActivity) -> float:
    times = layer.times
    lanes = times.parallel_hot_lane_wall + times.parallel_cold_lane_wall
    return times.total_moe or times.parallel_region_wall or lanes


def _known(values: Iterable[float]) -> list[float]:
    """Return the values that are known; a 1 if none is."""
    return [value for value in values if value > 0] or [1.0]


def _each(values: Iterable[float], weight: Callable[[float], float]) -> list[float]:
    """Weigh each layer; one of which nothing is known has weight 1."""
    return [weight(value) if value > 0 else 1.0 for value in values]
