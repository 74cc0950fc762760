"""How the routed experts of a base would be held in a memory: what `base plan` shows.

The slots and the pool are those of a run. What is known of the base, from a profile or from its
habits, says how much of what was asked for they serve. The lanes are memories of devices: this
engine runs one, on a processor, and plans up to three.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from expertctl.engine.moe.cache_plan import CachePlan, cache_plan, fits_whole
from expertctl.engine.moe.guide import Guide
from expertctl.engine.moe.placement import (
    Placement,
    Sizes,
    Strategy,
    filled_up,
    observed,
    placed,
)
from expertctl.engine.moe.start import Start
from expertctl.engine.moe.weighting import CURVE, WEIGHTINGS, Weighting, scores
from expertctl.engine.packed_backend import SCHEMES, PackedBackend
from expertctl.engine.packed_base import expert_shape
from expertctl.errors import IncompatibleError
from expertctl.package.experts_config import ExpertsConfig
from expertctl.package.model_config import ModelConfig
from expertctl.routing.request import Dtype
from expertctl.schema.strict_json import JsonObject

NamedLanes = Mapping[str, int]
"""The bytes of each lane, by a name for a person; in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer: its slots, in an even plan and in this one, and what they serve."""

    layer: int
    even: int
    slots: int
    pinned: int
    asked: int
    """How many of its experts were asked for at all."""
    served_even: float | None
    served: float | None
    """The share of what was asked for; None where nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlan:
    """One lane under one weighting."""

    name: str
    budget: int
    used: int
    experts: int
    dummies: int
    """Bytes of the zeros that each layer which has experts there needs besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedPlan:
    """Which experts lie in which lane by one weighting."""

    weighting: Weighting
    lanes: tuple[LanePlan, ...]
    served: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedPlan:
    """How one base would be held; sizes in bytes."""

    base: str
    dtype: Dtype
    limit: int
    whole: bool
    """Whether all of it fits, so that nothing has to be planned."""
    rest: int
    """What is no routed expert."""
    expert: int
    compact: int | None
    """Bytes of one in the copy that is read, see `expert_copies.compact_bytes`."""
    plan: CachePlan
    known: str | None
    """Where what is known comes from."""
    texts: int
    """What a text that is asked for without further wishes takes besides."""
    layers: tuple[LayerPlan, ...]
    asked_in_slots: int
    """How often experts in slots were asked for, all together."""
    asked_beyond: tuple[int, ...]
    """How often each of the others was, the largest count first."""
    weightings: tuple[WeightedPlan, ...]
    has_lanes: bool = False
    """Whether lanes were asked for: else one is as large as all slots."""

    @property
    def planned(self) -> int:
        """What is no routed expert, and all blocks: what a run takes before any text."""
        return self.rest + self.plan.blocks * self.expert

    @property
    def least(self) -> int:
        """What a run takes so, with a text and without experts that are installed."""
        return self.planned + self.texts

    @property
    def fits(self) -> bool:
        """Whether a run can begin."""
        return self.whole or self.least <= self.limit

    @property
    def block(self) -> int:
        """Bytes of an expert in memory."""
        return self.compact or self.expert

    @property
    def grows(self) -> bool:
        """Whether more fit once a run has kept a copy, in which experts are shorter."""
        return not self.whole and self.compact is None

    @property
    def pool(self) -> int:
        """How many blocks are for experts without a slot: all that the planned bytes hold."""
        held = min(self.plan.blocks * self.expert // self.block, self._all)
        return held - sum(self.plan.capacities)

    @property
    def served(self) -> float | None:
        """The share of what was asked for that the slots of all layers serve."""
        return _share(self.asked_in_slots, self._asked)

    @property
    def served_with_pool(self) -> float | None:
        """The same where the pool holds those that are asked for most among the others.

        A run keeps in it what is worth most to it at the time, which may serve more or less.
        """
        return _share(self.asked_in_slots + sum(self.asked_beyond[: self.pool]), self._asked)

    @property
    def _asked(self) -> int:
        return self.asked_in_slots + sum(self.asked_beyond)

    @property
    def _all(self) -> int:
        return self.plan.layers * self.plan.experts

    def to_json(self) -> JsonObject:
        """Return the document of ``base plan --json``."""
        return {
            "base": self.base,
            "dtype": self.dtype,
            "memory": self.limit,
            "whole": self.whole,
            "fits": self.fits,
            "rest_bytes": self.rest,
            "expert_bytes": self.expert,
            "block_bytes": self.block,
            "slots": sum(self.plan.capacities),
            "pool": self.pool,
            "planned_bytes": self.planned,
            "texts_bytes": self.texts,
            "least_bytes": self.least,
            "known": self.known,
            "served": _rounded(self.served),
            "served_with_pool": _rounded(self.served_with_pool),
            "layers": [_layer_json(layer) for layer in self.layers],
            "weightings": [_weighted_json(each) for each in self.weightings],
        }


def routed_plan(
    config: ModelConfig,
    dtype: Dtype,
    *,
    base: str,
    limit: int,
    start: Start,
    lanes: NamedLanes,
    compact: int | None = None,
    strategy: Strategy = "warm",
    curve: float = CURVE,
) -> RoutedPlan:
    """Plan a base in a memory; without lanes, one is as large as all slots.

    ``compact`` is what an expert takes in the copy of the base, see `expert_copies.compact_bytes`.

    Raises:
        IncompatibleError: when it has no routed experts, or kernels do not support its sizes.
        UsageError: when there are too many lanes, or more pins than slots.
    """
    routed, scheme = config.experts, SCHEMES[dtype]
    if routed is None:
        raise IncompatibleError(
            f"{base} has no routed experts", hint="`expertctl base list` shows the bases"
        )
    held = PackedBackend.of(config, dtype)
    block, texts = expert_shape(config, scheme).nbytes, held.text_bytes()
    layers, rest, guide = len(routed.layers), held.least_bytes, start.guide
    whole = fits_whole(held.weight_bytes, limit, texts=texts)
    if whole:
        rest = held.weight_bytes - layers * routed.count * block
        even = CachePlan(
            layers=layers, experts=routed.count, slots=routed.count, miss="exact", cap=1.0
        )
        plan, compact = even, None  # no copy is read, and no expert is pinned
    else:
        even = cache_plan(
            layers=layers,
            experts=routed.count,
            block=block,
            rest=rest,
            limit=limit,
            miss="exact",
            cap=1.0,
            texts=texts,
        )
        plan = start.planned(even, routed.layers)
    each = compact or block
    in_slots, beyond = _asked(routed, plan, guide)
    budgets = lanes or {"ram": sum(plan.capacities) * each}
    return RoutedPlan(
        base=base,
        dtype=dtype,
        limit=limit,
        whole=whole,
        rest=rest,
        expert=block,
        compact=compact,
        plan=plan,
        known=None if guide is None else guide.what,
        texts=texts,
        layers=tuple(_layers(routed, even, plan, guide)),
        asked_in_slots=in_slots,
        asked_beyond=beyond,
        weightings=_weighted(routed, guide, budgets, strategy, block=each, curve=curve),
        has_lanes=bool(lanes),
    )


def _layers(
    routed: ExpertsConfig, even: CachePlan, plan: CachePlan, guide: Guide | None
) -> list[LayerPlan]:
    found = []
    for place, number in enumerate(routed.layers):
        counts = {} if guide is None else guide.counts(number)
        ranked = sorted(counts.values(), reverse=True)
        found.append(
            LayerPlan(
                layer=number,
                even=even.slots,
                slots=plan.capacities[place],
                pinned=len(plan.pins[place]),
                asked=len(counts),
                served_even=_share(sum(ranked[: even.slots]), sum(ranked)),
                served=_share(sum(ranked[: plan.capacities[place]]), sum(ranked)),
            )
        )
    return found


def _asked(
    routed: ExpertsConfig, plan: CachePlan, guide: Guide | None
) -> tuple[int, tuple[int, ...]]:
    """Return how often experts were asked for: all that slots hold together, and each other."""
    in_slots, beyond = 0, list[int]()
    for number, slots in zip(routed.layers, plan.capacities, strict=True):
        ranked = sorted(({} if guide is None else guide.counts(number)).values(), reverse=True)
        in_slots += sum(ranked[:slots])
        beyond += ranked[slots:]
    return in_slots, tuple(sorted(beyond, reverse=True))


def _weighted(
    routed: ExpertsConfig,
    guide: Guide | None,
    lanes: NamedLanes,
    strategy: Strategy,
    *,
    block: int,
    curve: float,
) -> tuple[WeightedPlan, ...]:
    """Place experts by each rule; where nothing is known, all rules are one."""
    sizes = {(layer, n): block for layer in routed.layers for n in range(routed.count)}
    budgets = list(lanes.values())
    if guide is None:
        placement = placed(filled_up([], sizes), sizes, budgets=budgets, strategy=strategy)
        return (_told("flat", placement, lanes, sizes, None),)
    found = []
    for weighting in WEIGHTINGS:
        scored = scores(guide.activity.layers, weighting=weighting, curve=curve)
        order = filled_up(observed(scored), sizes)
        placement = placed(order, sizes, budgets=budgets, strategy=strategy)
        found.append(_told(weighting, placement, lanes, sizes, _served(placement, guide)))
    return tuple(found)


def _served(placement: Placement, guide: Guide) -> float | None:
    """Return how much of what was asked for lies in some lane."""
    counts = {
        (layer, expert): count
        for layer, each in guide.usage.layers.items()
        for expert, count in each.items()
    }
    there = sum(counts.get(place, 0) for lane in placement.lanes for place in lane.experts)
    return _share(there, sum(counts.values()))


def _told(
    weighting: Weighting,
    placement: Placement,
    lanes: NamedLanes,
    sizes: Sizes,
    served: float | None,
) -> WeightedPlan:
    told = tuple(
        LanePlan(
            name=name,
            budget=lane.budget,
            used=lane.used,
            experts=len(lane.experts),
            dummies=lane.used - sum(sizes[place] for place in lane.experts),
        )
        for name, lane in zip(lanes, placement.lanes, strict=True)
    )
    return WeightedPlan(weighting=weighting, lanes=told, served=served)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _layer_json(layer: LayerPlan) -> JsonObject:
    return {
        "layer": layer.layer,
        "slots_even": layer.even,
        "slots": layer.slots,
        "pinned": layer.pinned,
        "asked": layer.asked,
        "served_even": _rounded(layer.served_even),
        "served": _rounded(layer.served),
    }


def _weighted_json(each: WeightedPlan) -> JsonObject:
    return {
        "weighting": each.weighting,
        "served": _rounded(each.served),
        "lanes": [
            {
                "name": lane.name,
                "budget": lane.budget,
                "used": lane.used,
                "experts": lane.experts,
                "dummy_bytes": lane.dummies,
            }
            for lane in each.lanes
        ],
    }


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 6)
