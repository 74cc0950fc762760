"""How a base would fit into a memory: the results of `base plan`.

A base without routed experts fits as a whole or not at all, in each data type. With routed experts,
slots and pool are those of a run, and the usage of the base, from a profile or learnt, says which
share of its requests they serve. Lanes are memories of devices: this engine runs one, on a CPU, and
plans up to three.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import get_args

from expertctl.engine.backend import LoadConfig
from expertctl.engine.cpu.backend import PackedBackend
from expertctl.engine.cpu.packed_base import make_expert_shape
from expertctl.engine.cpu.quantisation_quality import find_quality
from expertctl.engine.cpu.schemes import choose_scheme
from expertctl.engine.load_plan import choose_backend
from expertctl.engine.moe.cache_plan import (
    TYPICAL_SEQUENCE_TOKENS,
    CachePlan,
    fits_in_memory,
    plan_cache,
)
from expertctl.engine.moe.placement import (
    DEFAULT_CURVE,
    WEIGHTINGS,
    Placement,
    Sizes,
    Strategy,
    Weighting,
    append_unobserved,
    list_observed,
    place_experts,
    score_experts,
)
from expertctl.engine.moe.usage_profile import UsageProfile
from expertctl.engine.moe.warmup import WarmupPlan
from expertctl.engine_config import GGUF_BLOCKS, Dtype, EngineConfig
from expertctl.errors import IncompatibleError, NotFoundError
from expertctl.package.architectures import ExpertsConfig
from expertctl.package.model_config import ModelConfig
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.store.quantised_cache import QuantisedCache

NamedLanes = Mapping[str, int]
"""The bytes of each lane by name, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypePlan:
    """A base without routed experts in one data type; sizes in bytes."""

    dtype: Dtype
    weight_bytes: int
    min_bytes: int
    """What a run takes with one sequence of usual length and without installed experts."""
    kl_divergence: float | None
    """What the base loses in it, in nats; None where it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMemoryPlan:
    """How a base without routed experts would fit, in each data type that can run it."""

    base: str
    limit: int
    dtypes: tuple[DtypePlan, ...]
    unavailable: Mapping[Dtype, str]
    """Why a data type cannot run it."""

    def fits(self, plan: DtypePlan) -> bool:
        """Return whether a run could start in a data type."""
        return plan.min_bytes <= self.limit

    def to_json(self) -> JsonObject:
        """Return the document of ``base plan --json``."""
        found = list[JsonValue]({**asdict(plan), "fits": self.fits(plan)} for plan in self.dtypes)
        unavailable: JsonObject = {str(name): why for name, why in self.unavailable.items()}
        document: JsonObject = {"base": self.base, "memory": self.limit, "dtypes": found}
        return {**document, "unavailable": unavailable}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer: its slots, in an even plan and in this one, and the share that they serve."""

    layer: int
    even_slots: int
    slots: int
    pinned: int
    requested_experts: int
    """How many of its experts were chosen at all."""
    even_served_share: float | None
    served_share: float | None
    """The share of requests; None if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlan:
    """One lane under one weighting."""

    name: str
    budget: int
    used: int
    experts: int
    dummy_bytes: int
    """Bytes of the all-zero dummies, one for each layer that has experts there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedPlan:
    """Which experts are in which lane by one weighting."""

    weighting: Weighting
    lanes: tuple[LanePlan, ...]
    served_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseMemoryPlan:
    """How one base would fit; sizes in bytes."""

    base: str
    dtype: Dtype
    limit: int
    whole: bool
    """Whether all of it fits, so that nothing has to be planned."""
    other_bytes: int
    """All weights but routed experts."""
    expert_bytes: int
    compact_bytes: int | None
    """Bytes of one in the copy that is read, see `find_compact_bytes`."""
    plan: CachePlan
    usage_source: str | None
    """Where the usage comes from; None if it is unknown."""
    sequence_bytes: int
    """Bytes of a sequence with default options."""
    layers: tuple[LayerPlan, ...]
    requests_in_slots: int
    """Requests for experts in slots, of all layers."""
    requests_beyond_slots: tuple[int, ...]
    """Requests for each of the others, the largest count first."""
    weightings: tuple[WeightedPlan, ...]
    kl_divergence: float | None = None
    """What the base loses in this data type, in nats; None where it was not measured."""
    has_lanes: bool = False
    """Whether lanes were given: else one is as large as all slots."""

    @property
    def planned_bytes(self) -> int:
        """All blocks, and all other weights: what a run takes without sequences."""
        return self.other_bytes + self.plan.blocks * self.expert_bytes

    @property
    def min_bytes(self) -> int:
        """What a run takes with one sequence and without installed experts."""
        return self.planned_bytes + self.sequence_bytes

    @property
    def fits(self) -> bool:
        """Whether a run can start."""
        return self.whole or self.min_bytes <= self.limit

    @property
    def block_bytes(self) -> int:
        """Bytes of an expert in memory."""
        return self.compact_bytes or self.expert_bytes

    @property
    def can_grow(self) -> bool:
        """Whether more fit once a run has written a copy, in which experts are compact."""
        return not self.whole and self.compact_bytes is None

    @property
    def pool_blocks(self) -> int:
        """Blocks for experts without a slot, within the planned bytes."""
        held = min(self.plan.blocks * self.expert_bytes // self.block_bytes, self._total_experts)
        return held - sum(self.plan.capacities)

    @property
    def served_share(self) -> float | None:
        """The share of requests that the slots of all layers serve."""
        return _ratio(self.requests_in_slots, self._total_requests)

    @property
    def served_with_pool(self) -> float | None:
        """The same if the pool holds the most requested of the other experts.

        A run keeps in it what is worth most at the time, which may serve more or less.
        """
        return _ratio(
            self.requests_in_slots + sum(self.requests_beyond_slots[: self.pool_blocks]),
            self._total_requests,
        )

    @property
    def _total_requests(self) -> int:
        return self.requests_in_slots + sum(self.requests_beyond_slots)

    @property
    def _total_experts(self) -> int:
        return self.plan.layers * self.plan.experts

    def to_json(self) -> JsonObject:
        """Return the document of ``base plan --json``."""
        return {
            "base": self.base,
            "dtype": self.dtype,
            "memory": self.limit,
            "whole": self.whole,
            "fits": self.fits,
            "rest_bytes": self.other_bytes,
            "expert_bytes": self.expert_bytes,
            "block_bytes": self.block_bytes,
            "slots": sum(self.plan.capacities),
            "pool": self.pool_blocks,
            "planned_bytes": self.planned_bytes,
            "texts_bytes": self.sequence_bytes,
            "least_bytes": self.min_bytes,
            "kl_divergence": self.kl_divergence,
            "known": self.usage_source,
            "served": _round_share(self.served_share),
            "served_with_pool": _round_share(self.served_with_pool),
            "layers": [_layer_json(layer) for layer in self.layers],
            "weightings": [_weighted_json(each) for each in self.weightings],
        }


def plan_dense_base(
    config: ModelConfig,
    engine: EngineConfig,
    *,
    base: str,
    limit: int,
    copies: QuantisedCache | None,
    storages: Mapping[str, str],
    dtypes: Sequence[Dtype] | None = None,
) -> DenseMemoryPlan:
    """Plan a base in data types, as ``engine`` runs it otherwise, with all of it in memory.

    ``storages`` is what its matrices are stored as. ``dtypes`` None: all that are possible.
    """
    if dtypes is None:
        has_blocks = not GGUF_BLOCKS.isdisjoint(storages.values())
        dtypes = [dtype for dtype in get_args(Dtype) if dtype != "gguf" or has_blocks]
    tokens = min(TYPICAL_SEQUENCE_TOKENS, config.max_positions)
    found, unavailable = list[DtypePlan](), dict[Dtype, str]()
    for dtype in dtypes:
        try:
            backend, _ = choose_backend(config, LoadConfig(dtype, engine, storages=storages))
            weights = backend.weight_bytes
        except (IncompatibleError, NotFoundError) as error:
            unavailable[dtype] = error.message
            continue
        passing = max(backend.buffer_bytes(tokens), backend.loading_bytes)
        quality = find_quality(copies, config, dtype)
        plan = DtypePlan(
            dtype=dtype,
            weight_bytes=weights,
            min_bytes=weights + passing + backend.kv_bytes(tokens),
            kl_divergence=None if quality is None else quality.kl,
        )
        found.append(plan)
    return DenseMemoryPlan(base=base, limit=limit, dtypes=tuple(found), unavailable=unavailable)


def plan_base(
    config: ModelConfig,
    dtype: Dtype,
    *,
    base: str,
    limit: int,
    start: WarmupPlan,
    lanes: NamedLanes,
    compact: int | None = None,
    copies: QuantisedCache | None = None,
    strategy: Strategy = "warm",
    curve: float = DEFAULT_CURVE,
) -> BaseMemoryPlan:
    """Plan a base in a memory; without lanes, one is as large as all slots.

    ``compact`` is the size of an expert in the copy of the base, see `find_compact_bytes`;
    ``copies`` are where what the base loses in a data type is kept.

    Raises:
        IncompatibleError: when it has no routed experts, or kernels do not support its sizes.
        UsageError: when there are too many lanes, or more pins than slots.
    """
    routed, scheme = config.experts, choose_scheme(config, dtype)
    if routed is None:
        raise IncompatibleError(
            f"{base} has no routed experts", hint="`expertctl base list` shows the bases"
        )
    backend, usage = PackedBackend.choose(config, LoadConfig(dtype)), start.usage
    block, texts = make_expert_shape(config, scheme).nbytes, backend.sequence_bytes()
    rest = backend.min_weight_bytes
    whole = fits_in_memory(backend.weight_bytes, limit, sequence_bytes=texts)
    if whole:
        rest = backend.weight_bytes - len(routed.layers) * routed.count * block
        compact = None  # no copy is read
    even, plan = _plan_slots(
        routed, start, block=block, other_bytes=rest, limit=limit, sequence_bytes=texts, whole=whole
    )
    each = compact or block
    counts = [{} if usage is None else usage.layer_counts(n) for n in routed.layers]
    ranked = [sorted(layer.values(), reverse=True) for layer in counts]
    by_slots = list(zip(ranked, plan.capacities, strict=True))
    beyond = [count for layer, slots in by_slots for count in layer[slots:]]
    quality = find_quality(copies, config, dtype)
    budgets = lanes or {"ram": sum(plan.capacities) * each}
    return BaseMemoryPlan(
        base=base,
        dtype=dtype,
        limit=limit,
        whole=whole,
        other_bytes=rest,
        expert_bytes=block,
        compact_bytes=compact,
        plan=plan,
        usage_source=None if usage is None else usage.source,
        sequence_bytes=texts,
        layers=tuple(_plan_layers(routed, even, plan, ranked)),
        requests_in_slots=sum(sum(layer[:slots]) for layer, slots in by_slots),
        requests_beyond_slots=tuple(sorted(beyond, reverse=True)),
        weightings=_plan_weightings(routed, usage, budgets, strategy, block=each, curve=curve),
        kl_divergence=None if quality is None else quality.kl,
        has_lanes=bool(lanes),
    )


def _plan_slots(
    routed: ExpertsConfig,
    start: WarmupPlan,
    *,
    block: int,
    other_bytes: int,
    limit: int,
    sequence_bytes: int,
    whole: bool,
) -> tuple[CachePlan, CachePlan]:
    """Return the even plan and that by usage; if all experts fit, none of them is pinned."""
    layers, experts = len(routed.layers), routed.count
    if whole:
        even = CachePlan(layers=layers, experts=experts, slots=experts)
        return even, even
    even = plan_cache(
        layers=layers,
        experts=experts,
        block_bytes=block,
        other_bytes=other_bytes,
        limit=limit,
        miss="exact",
        cap=1.0,
        sequence_bytes=sequence_bytes,
    )
    return even, start.adapt_cache_plan(even, routed.layers)


def _plan_layers(
    routed: ExpertsConfig, even: CachePlan, plan: CachePlan, ranked: Sequence[Sequence[int]]
) -> Iterator[LayerPlan]:
    each = zip(routed.layers, plan.capacities, plan.pinned_by_layer, ranked, strict=True)
    for number, slots, pinned, counts in each:
        yield LayerPlan(
            layer=number,
            even_slots=even.slots,
            slots=slots,
            pinned=len(pinned),
            requested_experts=len(counts),
            even_served_share=_ratio(sum(counts[: even.slots]), sum(counts)),
            served_share=_ratio(sum(counts[:slots]), sum(counts)),
        )


def _plan_weightings(
    routed: ExpertsConfig,
    usage: UsageProfile | None,
    lanes: NamedLanes,
    strategy: Strategy,
    *,
    block: int,
    curve: float,
) -> tuple[WeightedPlan, ...]:
    """Place experts by each rule; if the usage is unknown, all rules are the same."""
    sizes = {(layer, n): block for layer in routed.layers for n in range(routed.count)}
    budgets = list(lanes.values())
    if usage is None:
        placement = place_experts(
            append_unobserved([], sizes), sizes, budgets=budgets, strategy=strategy
        )
        return (_make_weighted_plan("flat", placement, lanes, sizes, None),)
    found = []
    for weighting in WEIGHTINGS:
        scored = score_experts(usage.layers, weighting=weighting, curve=curve)
        order = append_unobserved(list_observed(scored), sizes)
        placement = place_experts(order, sizes, budgets=budgets, strategy=strategy)
        found.append(
            _make_weighted_plan(
                weighting, placement, lanes, sizes, _find_served_share(placement, usage)
            )
        )
    return tuple(found)


def _find_served_share(placement: Placement, usage: UsageProfile) -> float | None:
    """Return the share of requests for experts in any lane."""
    lanes = [lane.experts for lane in placement.lanes]
    served = sum(usage.layer_counts(n).get(expert, 0) for lane in lanes for n, expert in lane)
    return _ratio(served, sum(sum(counts.values()) for counts in usage.counts.values()))


def _make_weighted_plan(
    weighting: Weighting,
    placement: Placement,
    lanes: NamedLanes,
    sizes: Sizes,
    served: float | None,
) -> WeightedPlan:
    planned = tuple(
        LanePlan(
            name=name,
            budget=lane.budget,
            used=lane.used,
            experts=len(lane.experts),
            dummy_bytes=lane.used - sum(sizes[place] for place in lane.experts),
        )
        for name, lane in zip(lanes, placement.lanes, strict=True)
    )
    return WeightedPlan(weighting=weighting, lanes=planned, served_share=served)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _layer_json(layer: LayerPlan) -> JsonObject:
    return {
        "layer": layer.layer,
        "slots_even": layer.even_slots,
        "slots": layer.slots,
        "pinned": layer.pinned,
        "asked": layer.requested_experts,
        "served_even": _round_share(layer.even_served_share),
        "served": _round_share(layer.served_share),
    }


def _weighted_json(each: WeightedPlan) -> JsonObject:
    return {
        "weighting": each.weighting,
        "served": _round_share(each.served_share),
        "lanes": [asdict(lane) for lane in each.lanes],
    }


def _round_share(share: float | None) -> float | None:
    return None if share is None else round(share, 6)
