"""How much memory the routed experts of a base get, where not all of them fit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from expertctl.engine.moe.capacity import (
    WORKING_SHARE,
    Activations,
    by_gain,
    capacity_of,
    missed,
)
from expertctl.routing.presets import PRESETS
from expertctl.routing.request import MoeColdWish, MoeMiss

USUAL_PROMPT = 256
"""Tokens of a usual prompt."""
USUAL_TOKENS = PRESETS["default"].max_tokens + USUAL_PROMPT
"""Tokens of a text with the default preset, its prompt included."""
WHOLE_SHARE = 0.85
"""A base that takes at most so much of the memory is held whole; the rest is for texts."""
EVIDENCE = 8
"""From so many activations per expert of a layer on, counts say where slots are worth most."""
_LEAST_SHARE = 2
"""No layer gets fewer slots than its share in an even plan, divided by this."""
_WORTH = 0.99
"""Slots are shared out unevenly where misses are at most this share of those in an even plan."""
_GIB, _MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """Blocks for experts: so many slots in each layer, and a pool for experts without a slot.

    The pool holds all experts of any one layer that have no slot, for one prompt may ask for all of
    them.
    """

    layers: int
    experts: int
    slots: int
    """Of each layer, where all have the same number."""
    by_layer: tuple[int, ...] = ()
    """Of each layer, where they differ."""
    pinned: tuple[frozenset[int], ...] = ()
    """The pinned experts of each layer; empty: there are none."""
    miss: MoeMiss = "exact"
    cap: float = 1.0
    cold: MoeColdWish = "auto"

    @property
    def capacities(self) -> tuple[int, ...]:
        """How many slots each layer has."""
        return self.by_layer or (self.slots,) * self.layers

    @property
    def pins(self) -> tuple[frozenset[int], ...]:
        """The pinned experts of each layer."""
        return self.pinned or (frozenset(),) * self.layers

    @property
    def pool(self) -> int:
        """How many blocks are for experts without a slot."""
        return self.experts - min(self.capacities, default=0)

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return sum(self.capacities) + self.pool


def fits_whole(size: int, limit: int | None, *, texts: int = 0) -> bool:
    """Tell whether a base of ``size`` bytes is held whole, with ``texts`` bytes left for texts."""
    return limit is None or size <= min(WHOLE_SHARE * limit, limit - texts)


def cache_plan(
    *,
    layers: int,
    experts: int,
    block: int,
    rest: int,
    limit: int,
    miss: MoeMiss,
    cap: float,
    texts: int = 0,
) -> CachePlan:
    """Share out a memory: ``rest`` bytes are not routed experts, ``block`` bytes are one of them.

    Each layer gets as many slots as `capacity_of` says, or fewer where the pool and ``texts`` bytes
    would not fit besides; none where even one is too much. So texts that have room in a memory have
    it in a larger one, too. Where the pool is too large, the caller that reserves it reports that.
    """
    slots = capacity_of(
        recommended_gb=limit / _GIB,
        base_gb=rest / _GIB,
        layers=layers,
        slot_mb=block / _MIB,
        experts=experts,
    )
    while slots > 0:
        plan = CachePlan(layers=layers, experts=experts, slots=slots, miss=miss, cap=cap)
        if rest + plan.blocks * block <= min(WORKING_SHARE * limit, limit - texts):
            return plan
        slots -= 1
    return CachePlan(layers=layers, experts=experts, slots=0, miss=miss, cap=cap)


def adapted(plan: CachePlan, activations: Activations, *, least: int = 1) -> CachePlan:
    """Return a plan of no more blocks, with slots where they serve most of what was counted.

    ``activations`` are counts of each expert in each layer. Where too little was counted, or hardly
    more would be served, the plan stays as it is. The fewer slots a layer has, the larger the pool
    must be, so no layer gets fewer than half of what it had, nor fewer than ``least``.
    """
    counted = [sum(map(float, counts)) for counts in activations]
    if plan.slots == 0 or min(counted, default=0.0) < EVIDENCE * plan.experts:
        return plan
    best = _shared_out(plan, activations, least=max(plan.slots // _LEAST_SHARE, least))
    return best if _misses(best, activations) < _WORTH * _misses(plan, activations) else plan


def _shared_out(plan: CachePlan, activations: Activations, *, least: int) -> CachePlan:
    """Share out all blocks: where no layer gets the least, some of the pool's become slots."""
    total, best = plan.blocks - plan.experts + least, plan
    while True:
        shares = by_gain(activations, total=total, least=least)
        found = replace(plan, by_layer=tuple(shares))
        if found.blocks > plan.blocks:
            return best
        best, spare = found, plan.blocks - found.blocks
        if not spare:
            return best
        total += spare


def _misses(plan: CachePlan, activations: Activations) -> float:
    shares: Sequence[float] = missed(activations, plan.capacities)
    counted = [sum(map(float, counts)) for counts in activations]
    return sum(share * count for share, count in zip(shares, counted, strict=True))
