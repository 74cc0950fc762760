"""Which residents a profile would replace: the exchange of experts while a base stays loaded.

In each layer the experts with the best scores are wanted, as many as are resident. Each absent one
is paired with the resident that scores worst; the gain is the difference of their scores. The pairs
that gain most are exchanged, up to a share of all residents. Pinned experts stay.

This works in one lane. Where several devices hold experts, a new placement is planned instead.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.updates import MOST_SWAPS, Swap
from expertctl.errors import UsageError

_EXACT = 1e-9
"""0.07 * 100 is a little more than 7, which is no reason to exchange an eighth."""
Scores = Mapping[int, int | float]
"""What each observed expert of a layer is worth."""


@dataclass(frozen=True, slots=True)
class Exchanges:
    """What to swap now, how many pairs would gain something, and how many may be swapped."""

    swaps: tuple[Swap, ...]
    candidates: int
    max_exchange: int


def exchanges(
    slots: Mapping[int, LayerSlots], scores: Mapping[int, Scores], *, rate: float, lanes: int = 1
) -> Exchanges:
    """Return what a profile exchanges at a rate from 0, nothing, to 1, everything that gains.

    Raises:
        UsageError: when there are several lanes.
    """
    if lanes != 1:
        raise UsageError(
            f"experts are exchanged in one lane only, and there are {lanes}",
            hint="load the base again with the new profile, or use one device",
        )
    pairs: list[tuple[float, Swap]] = []
    for layer, residents in slots.items():
        pairs += _pairs(layer, residents, scores.get(layer, {}))
    pairs.sort(key=lambda pair: (-pair[0], pair[1].layer, pair[1].add))
    hot = sum(len(residents.residents) for residents in slots.values())
    most = max_exchange(rate=rate, hot=hot, candidates=len(pairs))
    return Exchanges(tuple(swap for _, swap in pairs[:most]), len(pairs), most)


def affordable(
    swaps: Iterable[Swap],
    done: Iterable[Swap],
    *,
    layer_budget: int,
    swaps_a_layer: int = MOST_SWAPS,
) -> list[Swap]:
    """Return the swaps that an update may do besides those it did: the first ones, in order.

    Together they are no more in a layer, and in no more layers, than one update may do.
    """
    taken, fit = Counter(swap.layer for swap in done), []
    for swap in swaps:
        is_new = not taken[swap.layer]
        layers = sum(count > 0 for count in taken.values())
        if taken[swap.layer] < swaps_a_layer and (not is_new or layers < layer_budget):
            taken[swap.layer] += 1
            fit.append(swap)
    return fit


def max_exchange(*, rate: float, hot: int, candidates: int) -> int:
    """Return how many experts may be exchanged: that share of the hot ones, rounded up."""
    share = rate if 0 <= rate <= 1 else float(rate > 1)
    return min(candidates, math.ceil(share * hot - _EXACT))


def _pairs(layer: int, slots: LayerSlots, scores: Scores) -> list[tuple[float, Swap]]:
    """Return the exchanges of one layer that gain something, and what they gain."""
    ranked = sorted(
        (expert for expert in scores if 0 <= expert < slots.experts and scores[expert] > 0),
        key=lambda expert: (-scores[expert], expert),
    )
    residents = slots.residents
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
