"""How many routed experts of each layer have a slot in memory, and what the cache takes in bytes.

`plan_cache` gives all layers the same number of slots, as many as `compute_capacity` allows.
`adapt_plan` moves slots to the layers where they serve more requests (`distribute_by_gain`), once
enough was counted.

*Pinned* experts are loaded first and keep their slots, whatever is chosen later.

The bookkeeping of routed experts is many small arrays: for 48 layers with 128 experts, of which a
token uses 8, 12 MB without the transition model (`estimate_transition_bytes`). It grows with the
passes, so its memory is reserved once for all; a test compares the estimate with what is used.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.layer_slots import estimate_transition_bytes
from expertctl.engine.moe.usage_profile import UsageProfile
from expertctl.engine_config import MoeColdOption, MoeMiss, Pins, SharePins, TopPins
from expertctl.errors import UsageError
from expertctl.package.architectures import MAX_EXPERTS_PER_LAYER, ExpertsConfig
from expertctl.routing.request import PRESETS

WORKING_SHARE = 0.71
"""The share of the recommended memory that is used."""
ROUNDING_THRESHOLD, SLOT_STEP = 16, 8
MIN_SLOTS = 32
Activations = Sequence[Sequence[float] | NDArray[np.floating | np.integer]]


def compute_capacity(
    *, recommended_gb: float, base_gb: float, layers: int, slot_mb: float, experts: int
) -> int:
    """Return the number of slots of each layer; 0 where the size of a slot is not positive."""
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
) -> list[int]:
    """Distribute slots over layers so that they serve most activations; return slots by layer.

    ``activations`` counts the activations of each expert in each layer. The slots start evenly
    distributed and move from the layer whose last slot serves least to the one whose next slot
    would serve most, as long as that serves more.
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
    """Return the share of activations outside the ``capacity`` top experts, by layer."""
    shares = []
    for counts, capacity in zip(activations, capacities, strict=True):
        ranked = sorted(map(float, counts), reverse=True)
        shares.append(sum(ranked[capacity:]) / (sum(ranked) or 1.0))
    return shares


def _clamp_total(layers: int, *, total: int, experts: int, minimum: int) -> tuple[int, int]:
    """Return how many slots can be used at all, and the minimum of each layer."""
    total = max(0, min(total, layers * experts))
    return total, min(minimum, experts, total // layers if layers else 0)


TYPICAL_PROMPT_TOKENS = 256
"""Tokens of a typical prompt."""
TYPICAL_SEQUENCE_TOKENS = PRESETS["default"].max_tokens + TYPICAL_PROMPT_TOKENS
"""Tokens of a sequence with the default preset, its prompt included."""
RESIDENT_SHARE = 0.85
"""A base that takes at most this share of the memory is kept whole; the rest is for sequences."""
MIN_EVIDENCE = 8
"""Activations per expert of a layer from which counts decide how slots are distributed."""
_MIN_SHARE_DIVISOR = 2
"""A layer keeps at least its slots of the even plan divided by this."""
_MAX_MISS_RATIO = 0.99
"""An uneven plan is used if its misses are at most this share of those of the even plan."""
_GIB, _MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """Memory blocks for experts: slots in each layer, and a pool for experts without a slot.

    The pool can hold all experts of one layer that have no slot, because one prompt may choose all
    of them.
    """

    layers: int
    experts: int
    slots: int
    """Of each layer, if all have the same number."""
    slots_by_layer: tuple[int, ...] = ()
    """Of each layer, if they differ."""
    pinned: tuple[frozenset[int], ...] = ()
    """The pinned experts of each layer; empty if none is pinned."""
    miss: MoeMiss = "exact"
    cap: float = 1.0
    cold: MoeColdOption = "auto"

    @property
    def capacities(self) -> tuple[int, ...]:
        """The number of slots of each layer."""
        return self.slots_by_layer or (self.slots,) * self.layers

    @property
    def pinned_by_layer(self) -> tuple[frozenset[int], ...]:
        """The pinned experts of each layer."""
        return self.pinned or (frozenset(),) * self.layers

    @property
    def pool(self) -> int:
        """The number of blocks for experts without a slot."""
        return self.experts - min(self.capacities, default=0)

    @property
    def blocks(self) -> int:
        """The number of all blocks."""
        return sum(self.capacities) + self.pool


def fits_in_memory(size: int, limit: int | None, *, sequence_bytes: int = 0) -> bool:
    """Tell whether a base of ``size`` bytes is kept whole, beside ``sequence_bytes``."""
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
    """Return a plan with the same number of slots in each layer.

    ``block_bytes`` is the size of an expert, ``other_bytes`` that of all other weights. A layer
    gets as many slots as `compute_capacity` returns, or fewer if the pool and ``sequence_bytes``
    would not fit; none if even one does not fit. So a sequence that fits in a memory also fits in a
    larger one. If the pool is too large, the caller that reserves it reports that.
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
    """Return a plan with at most as many blocks whose slots serve more of what was counted.

    ``activations`` counts the activations of each expert in each layer. The plan stays as it is if
    too little was counted or hardly more would be served. The fewer slots a layer has, the larger
    the pool must be, so each layer keeps at least half of its slots, and ``minimum``.
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
    """Distribute all blocks: if each layer has more than the minimum, the pool can give up some."""
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


_PINS = re.compile(r"([0-9]{1,4})(%?)")
_PERCENT = 100


def parse_pins(text: str) -> Pins:
    """Parse a number of experts, such as ``8``, or a share of prompts, such as ``50%``.

    Raises:
        UsageError: for anything else.
    """
    match = _PINS.fullmatch(text.strip())
    number = int(match[1]) if match else -1
    if match and match[2] and number <= _PERCENT:
        return SharePins(number / _PERCENT)
    if match and not match[2] and number <= MAX_EXPERTS_PER_LAYER:
        return TopPins(number)
    raise UsageError(
        f"{text[:40]!r} is neither a number of experts to pin nor a share up to 100%",
        hint="write 8, the most frequent of each layer, or 50%, those that half of the tokens use",
    )


def select_pinned(
    pins: Pins, profile: UsageProfile, layer: int, *, capacity: int
) -> frozenset[int]:
    """Return the pinned experts of a layer with ``capacity`` slots.

    A share pins no more experts than there are slots.

    Raises:
        UsageError: when a number is larger than the slots, or a share pins some and there are none.
    """
    match pins:
        case TopPins(count):
            if count > capacity:
                raise UsageError(
                    f"cannot pin {count} routed experts of each layer: layer {layer} has "
                    f"{capacity} slots",
                    hint="pin fewer experts, or give more memory",
                )
            return frozenset(profile.rank_experts(layer)[:count])
        case SharePins(share):
            universal = set(profile.list_universal(layer, share))
            ranked = [expert for expert in profile.rank_experts(layer) if expert in universal]
            if ranked and not capacity:
                raise UsageError(
                    f"cannot pin {len(ranked)} routed experts of layer {layer}: it has no slots",
                    hint="pin none, or give more memory",
                )
            return frozenset(ranked[:capacity])


_BYTES_PER_EXPERT = 512
"""Slot, place, worth and counts of an expert, also those of unfinished passes and the usage store.

The arrays take 160 bytes of it.
"""
_BYTES_PER_RESIDENT_EXPERT = 256
"""The same if all experts are in memory, where none has a slot."""
_BYTES_PER_CHOICE = 48
"""A choice of a token in a layer: the id that is kept, and the temporary memory of counting it."""
_KEPT_TOKENS = 512
"""Tokens that are kept and counted at once."""


def estimate_bookkeeping_bytes(config: ExpertsConfig) -> int:
    """Return the bytes reserved if experts may be missing, without the transition model."""
    return _table_bytes(config, _BYTES_PER_EXPERT)


def estimate_resident_bookkeeping_bytes(config: ExpertsConfig) -> int:
    """Return the bytes reserved if all experts are in memory."""
    return _table_bytes(config, _BYTES_PER_RESIDENT_EXPERT)


def estimate_cache_metadata_bytes(config: ExpertsConfig) -> int:
    """Return the bytes reserved if experts may be missing, with the transition model."""
    followers = estimate_transition_bytes(layers=len(config.layers), experts=config.count)
    return followers + estimate_bookkeeping_bytes(config)


def _table_bytes(config: ExpertsConfig, per_expert: int) -> int:
    return len(config.layers) * (
        config.count * per_expert + _KEPT_TOKENS * config.used * _BYTES_PER_CHOICE
    )
