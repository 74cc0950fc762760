"""How many routed experts of each layer have a slot, and how many bytes they may take.

`capacity_of` is the formula for layers that are alike. Two rules share a number of slots out among
layers that are not: `by_demand` by how many different experts a layer asks for, `by_gain` by
where another slot serves most activations. Both give away every slot that some layer can use.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WORKING_SHARE = 0.71
"""The share of the recommended memory that is used."""
ROUNDED_FROM, STEP = 16, 8
HEADROOM = 1.3
"""Slots for each expert that a layer asked for."""
LEAST = 32
CELLS = 256
"""A context takes a multiple of so many rows."""
_EXACT = 1e-9
Capacities = list[int]
Activations = Sequence[Sequence[float] | NDArray[np.floating | np.integer]]


def capacity_of(
    *, recommended_gb: float, base_gb: float, layers: int, slot_mb: float, experts: int
) -> int:
    """Return how many slots each layer gets; 0 where slots have no size to divide by."""
    room = WORKING_SHARE * recommended_gb - base_gb
    a_slot_in_all_layers = layers * slot_mb / 1024
    if not (a_slot_in_all_layers > 0 and math.isfinite(room)):
        return 0
    slots = math.floor(room / a_slot_in_all_layers)
    if slots >= ROUNDED_FROM:
        slots -= slots % STEP
    return min(max(slots, 0), experts)


def by_demand(unique: Sequence[int], *, total: int, experts: int, least: int = LEAST) -> Capacities:
    """Share out slots by how many different experts layers ask for: 1.3 each, scaled to the total.

    Each layer has at least ``least`` slots, or an even share of the total where that is less.
    """
    total, least = _feasible(len(unique), total=total, experts=experts, least=least)
    wants = [max(HEADROOM * count, 1.0) for count in unique]
    low, high = 0.0, float(experts)
    for _ in range(60):  # the scale at which rounded down shares just fit
        scale = (low + high) / 2
        fits = sum(_share(want * scale, least, experts) for want in wants) <= total
        low, high = (scale, high) if fits else (low, scale)
    shares = [_share(want * low, least, experts) for want in wants]
    rest = total - sum(shares)
    order = sorted(range(len(wants)), key=lambda i: (shares[i] - wants[i] * low, i))
    while rest:
        for layer in order:
            if rest and shares[layer] < experts:
                shares[layer], rest = shares[layer] + 1, rest - 1
    return shares


def by_gain(activations: Activations, *, total: int, least: int = LEAST) -> Capacities:
    """Share out slots so that most activations are served.

    ``activations`` are counts of each expert in each layer. Slots are first shared out evenly; then
    they move from where the last one serves least to where one more would serve most, as long as
    that serves more.
    """
    layers, experts = len(activations), len(activations[0]) if activations else 0
    total, least = _feasible(layers, total=total, experts=experts, least=least)
    ranked = [sorted(map(float, counts), reverse=True) for counts in activations]
    shares = [total // layers + (layer < total % layers) for layer in range(layers)]
    while True:
        more = [ranked[i][share] if share < experts else -1.0 for i, share in enumerate(shares)]
        less = [
            ranked[i][share - 1] if share > least else math.inf for i, share in enumerate(shares)
        ]
        gains, gives = max(more, default=-1.0), min(less, default=math.inf)
        if gains <= gives:
            return shares
        shares[more.index(gains)] += 1
        shares[less.index(gives)] -= 1


def missed(activations: Activations, capacities: Sequence[int]) -> list[float]:
    """Return which share of each layer's activations its top ``capacity`` experts do not serve."""
    shares = []
    for counts, capacity in zip(activations, capacities, strict=True):
        ranked = sorted(map(float, counts), reverse=True)
        shares.append(sum(ranked[capacity:]) / (sum(ranked) or 1.0))
    return shares


@dataclass(frozen=True, slots=True)
class CacheRows:
    """Bytes that one layer keeps of a token: its key, and its value where it has one.

    ``window`` is how far back it looks, where that is limited.
    """

    key_bytes: int
    value_bytes: int
    window: int | None = None


def kv_reserve(layers: Iterable[CacheRows], *, context: int, streams: int, batch: int) -> int:
    """Return the bytes that keys and values of ``streams`` texts may take.

    A layer with a window keeps only the window of each text and what one batch adds.
    """
    padded = -(-context // CELLS) * CELLS * streams
    reserve = 0
    for layer in layers:
        rows = padded if layer.window is None else min(padded, layer.window * streams + batch)
        reserve += rows * (layer.key_bytes + layer.value_bytes)
    return reserve


def auto_budget_mib(*, free: float, kv: float, reserve: float) -> int:
    """Return how many whole MiB are left for routed experts; 0 when none is."""
    left = free - kv - reserve
    return math.floor(left) if math.isfinite(left) and left > 0 else 0


def _feasible(layers: int, *, total: int, experts: int, least: int) -> tuple[int, int]:
    """Return how many slots can be used at all, and the least for each layer."""
    total = max(0, min(total, layers * experts))
    return total, min(least, experts, total // layers if layers else 0)


def _share(wanted: float, least: int, experts: int) -> int:
    return min(max(math.floor(wanted + _EXACT), least), experts)
