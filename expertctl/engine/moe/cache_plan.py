"""How much memory the routed experts of a base get, where not all of them fit."""

from dataclasses import dataclass

from expertctl.engine.moe.capacity import WORKING_SHARE, capacity_of
from expertctl.routing.request import MoeCold, MoeMiss

WHOLE_SHARE = 0.85
"""A base that takes at most so much of the memory is held whole; the rest is for texts."""
_GIB, _MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """Blocks for experts: so many slots in each layer, and a pool for all that have none.

    The pool holds all experts of any one layer that have no slot there, for one prompt may ask for
    all of them.
    """

    layers: int
    experts: int
    slots: int
    miss: MoeMiss = "exact"
    cap: float = 1.0
    cold: MoeCold = "read"

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return self.layers * self.slots + self.experts - self.slots


def fits_whole(size: int, limit: int | None) -> bool:
    """Tell whether a base of so many bytes is held whole."""
    return limit is None or size <= WHOLE_SHARE * limit


def cache_plan(
    *, layers: int, experts: int, block: int, rest: int, limit: int, miss: MoeMiss, cap: float
) -> CachePlan:
    """Share a memory out: ``rest`` bytes are no routed experts, a ``block`` is one of them.

    Each layer gets as many slots as the rule of `capacity_of` says, or fewer where the pool would
    not fit besides; none where even that is too much, which whoever reserves it will say.
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
        if rest + plan.blocks * block <= WORKING_SHARE * limit:
            return plan
        slots -= 1
    return CachePlan(layers=layers, experts=experts, slots=0, miss=miss, cap=cap)
