"""How many routed experts of each layer have a slot, and how many bytes they may take.

`compute_capacity` is the formula for layers that are alike. Two rules share a number of slots out among
layers that are not: `distribute_by_unique_experts` by how many different experts a layer asks for, `distribute_by_gain` by
where another slot serves most activations. Both give away every slot that some layer can use.

How much memory the routed experts of a base get, where not all of them fit.

The bytes of what is known of routed experts: which have a slot, which were asked for, how often.

These are many small arrays and tables, each with its own owner. For a base of 48 layers with 128
experts, of which a token uses 8, they come to 12 MB, without the chances of which expert follows
which (`estimate_transition_bytes`). They grow with what passes ask for, so memory is set aside for all of
them at once; a test compares that with what is taken.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.prefetch import estimate_transition_bytes
from expertctl.package.architectures import ExpertsConfig
from expertctl.routing.request import MoeColdOption, MoeMiss
from expertctl.routing.sampling_presets import PRESETS

WORKING_SHARE = 0.71
"""The share of the recommended memory that is used."""
ROUNDING_THRESHOLD, SLOT_STEP = 16, 8
MIN_SLOTS = 32
Capacities = list[int]
Activations = Sequence[Sequence[float] | NDArray[np.floating | np.integer]]


def compute_capacity(
    *, recommended_gb: float, base_gb: float, layers: int, slot_mb: float, experts: int
) -> int:
    """Return how many slots each layer gets; 0 where slots have no size to divide by."""
    room = WORKING_SHARE * recommended_gb - base_gb
    a_slot_in_all_layers = layers * slot_mb / 1024
    if not (a_slot_in_all_layers > 0 and math.isfinite(room)):
        return 0
    slots = math.floor(room / a_slot_in_all_layers)
    if slots >= ROUNDING_THRESHOLD:
        slots -= slots % SLOT_STEP
    return min(max(slots, 0), experts)


def distribute_by_gain(
    activations: Activations, *, total: int, minimum: int = MIN_SLOTS
) -> Capacities:
    """Share out slots so that most activations are served.

    ``activations`` are counts of each expert in each layer. Slots are first shared out evenly; then
    they move from where the last one serves least to where one more would serve most, as long as
    that serves more.
    """
    layers, experts = len(activations), len(activations[0]) if activations else 0
    total, minimum = _clamp_total(layers, total=total, experts=experts, minimum=minimum)
    ranked = [sorted(map(float, counts), reverse=True) for counts in activations]
    shares = [total // layers + (layer < total % layers) for layer in range(layers)]
    while True:
        more = [ranked[i][share] if share < experts else -1.0 for i, share in enumerate(shares)]
        less = [
            ranked[i][share - 1] if share > minimum else math.inf for i, share in enumerate(shares)
        ]
        gains, gives = max(more, default=-1.0), min(less, default=math.inf)
        if gains <= gives:
            return shares
        shares[more.index(gains)] += 1
        shares[less.index(gives)] -= 1


def compute_miss_shares(activations: Activations, capacities: Sequence[int]) -> list[float]:
    """Return which share of each layer's activations its top ``capacity`` experts do not serve."""
    shares = []
    for counts, capacity in zip(activations, capacities, strict=True):
        ranked = sorted(map(float, counts), reverse=True)
        shares.append(sum(ranked[capacity:]) / (sum(ranked) or 1.0))
    return shares


def _clamp_total(layers: int, *, total: int, experts: int, minimum: int) -> tuple[int, int]:
    """Return how many slots can be used at all, and the least for each layer."""
    total = max(0, min(total, layers * experts))
    return total, min(minimum, experts, total // layers if layers else 0)


TYPICAL_PROMPT_TOKENS = 256
"""Tokens of a usual prompt."""
TYPICAL_SEQUENCE_TOKENS = PRESETS["default"].max_tokens + TYPICAL_PROMPT_TOKENS
"""Tokens of a text with the default preset, its prompt included."""
RESIDENT_SHARE = 0.85
"""A base that takes at most so much of the memory is held whole; the rest is for texts."""
MIN_EVIDENCE = 8
"""From so many activations per expert of a layer on, counts say where slots are worth most."""
_MIN_SHARE_DIVISOR = 2
"""No layer gets fewer slots than its share in an even plan, divided by this."""
_MAX_MISS_RATIO = 0.99
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
    slots_by_layer: tuple[int, ...] = ()
    """Of each layer, where they differ."""
    pinned: tuple[frozenset[int], ...] = ()
    """The pinned experts of each layer; empty: there are none."""
    miss: MoeMiss = "exact"
    cap: float = 1.0
    cold: MoeColdOption = "auto"

    @property
    def capacities(self) -> tuple[int, ...]:
        """How many slots each layer has."""
        return self.slots_by_layer or (self.slots,) * self.layers

    @property
    def pinned_by_layer(self) -> tuple[frozenset[int], ...]:
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


def fits_in_memory(size: int, limit: int | None, *, sequence_bytes: int = 0) -> bool:
    """Tell whether a base of ``size`` bytes is held whole, with ``texts`` bytes left for texts."""
    return limit is None or size <= min(RESIDENT_SHARE * limit, limit - sequence_bytes)


def plan_cache(
    *,
    layers: int,
    experts: int,
    block_bytes: int,
    other_bytes: int,
    limit: int,
    miss: MoeMiss,
    cap: float,
    sequence_bytes: int = 0,
) -> CachePlan:
    """Share out a memory: ``rest`` bytes are not routed experts, ``block`` bytes are one of them.

    Each layer gets as many slots as `compute_capacity` says, or fewer where the pool and ``texts`` bytes
    would not fit besides; none where even one is too much. So texts that have room in a memory have
    it in a larger one, too. Where the pool is too large, the caller that reserves it reports that.
    """
    slots = compute_capacity(
        recommended_gb=limit / _GIB,
        base_gb=other_bytes / _GIB,
        layers=layers,
        slot_mb=block_bytes / _MIB,
        experts=experts,
    )
    while slots > 0:
        plan = CachePlan(layers=layers, experts=experts, slots=slots, miss=miss, cap=cap)
        if other_bytes + plan.blocks * block_bytes <= min(
            WORKING_SHARE * limit, limit - sequence_bytes
        ):
            return plan
        slots -= 1
    return CachePlan(layers=layers, experts=experts, slots=0, miss=miss, cap=cap)


def adapt_plan(plan: CachePlan, activations: Activations, *, minimum: int = 1) -> CachePlan:
    """Return a plan of no more blocks, with slots where they serve most of what was counted.

    ``activations`` are counts of each expert in each layer. Where too little was counted, or hardly
    more would be served, the plan stays as it is. The fewer slots a layer has, the larger the pool
    must be, so no layer gets fewer than half of what it had, nor fewer than ``least``.
    """
    counted = [sum(map(float, counts)) for counts in activations]
    if plan.slots == 0 or min(counted, default=0.0) < MIN_EVIDENCE * plan.experts:
        return plan
    best = _distribute_slots(
        plan, activations, minimum=max(plan.slots // _MIN_SHARE_DIVISOR, minimum)
    )
    return (
        best
        if _count_misses(best, activations) < _MAX_MISS_RATIO * _count_misses(plan, activations)
        else plan
    )


def _distribute_slots(plan: CachePlan, activations: Activations, *, minimum: int) -> CachePlan:
    """Share out all blocks: where no layer gets the least, some of the pool's become slots."""
    total, best = plan.blocks - plan.experts + minimum, plan
    while True:
        shares = distribute_by_gain(activations, total=total, minimum=minimum)
        found = replace(plan, slots_by_layer=tuple(shares))
        if found.blocks > plan.blocks:
            return best
        best, spare = found, plan.blocks - found.blocks
        if not spare:
            return best
        total += spare


def _count_misses(plan: CachePlan, activations: Activations) -> float:
    shares: Sequence[float] = compute_miss_shares(activations, plan.capacities)
    counted = [sum(map(float, counts)) for counts in activations]
    return sum(share * count for share, count in zip(shares, counted, strict=True))


_BYTES_PER_EXPERT = 512
"""For each expert: slot, place, worth and counts, also in passes not counted yet, and in habits.

The arrays take 160 of it.
"""
_BYTES_PER_RESIDENT_EXPERT = 256
"""For each expert where all are in memory, and none has a slot."""
_BYTES_PER_CHOICE = 48
"""For each choice of a token in a layer: its id while it is kept, and what counting it takes."""
_KEPT_TOKENS = 512
"""So many tokens are kept and counted at once."""


def estimate_bookkeeping_bytes(config: ExpertsConfig) -> int:
    """Return the bytes set aside where experts may be missing, without `estimate_transition_bytes`."""
    return _table_bytes(config, _BYTES_PER_EXPERT)


def estimate_resident_bookkeeping_bytes(config: ExpertsConfig) -> int:
    """Return the bytes set aside where no expert is ever missing."""
    return _table_bytes(config, _BYTES_PER_RESIDENT_EXPERT)


def estimate_cache_metadata_bytes(config: ExpertsConfig) -> int:
    """Return the bytes of what is known where experts may be missing, with `estimate_transition_bytes`."""
    followers = estimate_transition_bytes(layers=len(config.layers), experts=config.count)
    return followers + estimate_bookkeeping_bytes(config)


def _table_bytes(config: ExpertsConfig, per_expert: int) -> int:
    return len(config.layers) * (
        config.count * per_expert + _KEPT_TOKENS * config.used * _BYTES_PER_CHOICE
    )
