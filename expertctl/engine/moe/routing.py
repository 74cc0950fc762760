"""Which experts a token asks for, and with which weights: the one place where that is decided.

The plain path and the cached path both begin with what `route` returns; nothing here knows which
experts are at hand. Of equal values the lower id goes first, so choices never depend on a device.

Which routed slots each lane computes, and in which order.

A routed slot is one of the experts of one token; its source is ``token * used + choice``. An expert
lies in a slot of one of up to three hot lanes, or its slots go to the cold lane. Every routed slot
is in exactly one lane, once; a slot that names no expert (-1) is in none.

A lane has room for all slots. An entry that it does not fill has the source behind the last one,
the token behind the last one and no weight; in a hot lane it names the dummy, an expert of zeros
behind the last slot, so that a product over the whole lane needs no condition.

How rows of routed experts become rows of tokens: the plain formulas.

Kernels do the same faster and are tested against these. Sums are in the type of the rows, and in
the stated order; so what depends on the order of a sum can be told from what does not.

How a batch of routed slots is worked on: pure decisions from its phase and its size.

What makes prompts fast is for prompts alone. Generating keeps token-major worklists, and neither
generating nor warming up ever bypasses the cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertctl.engine.moe.phase import Phase, is_cache_active, resolve_phase

Scoring = Literal["softmax", "sigmoid"]

SMALLEST_SUM = 2.0**-14
"""Weights are not divided by less; the smallest normal number of float16, 6.1035e-5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How the logits of one router become experts and weights."""

    used: int
    scoring: Scoring = "softmax"
    normalised: bool = False
    """Whether the weights of a token are divided by their sum."""
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class RouterOutput:
    """The experts of each token, first choice first."""

    selected: Tensor
    """int64 [tokens, used]."""
    weights: Tensor
    """float32 [tokens, used]."""


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> RouterOutput:
    """Choose the experts of tokens by their logits, [tokens, experts]; nothing is changed.

    A bias [experts] takes part in the choice and not in the weights. Without one the logits
    themselves are compared: both ways of scoring keep their order, and rounding adds no ties.
    """
    logits = logits.float()
    scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
    order = logits if bias is None else scores + bias.float()
    selected = order.sort(dim=-1, descending=True, stable=True).indices[:, : rule.used]
    weights = scores.gather(-1, selected)
    if rule.normalised:
        weights = weights / torch.clamp(weights.sum(-1, keepdim=True), min=SMALLEST_SUM)
    return RouterOutput(selected.contiguous(), weights * rule.scale)


Ids = NDArray[np.int64]
Weights = NDArray[np.float32]
Order = Literal["token_major", "expert_major", "token_aligned"]

MAX_LANES = 3
COLD = -1
"""The lane of an expert that is in no hot one; also the place of an entry without an expert."""


@dataclass(frozen=True, slots=True, eq=False)
class LaneMap:
    """Where the experts of one layer lie."""

    lanes: Ids
    """[experts]: the number of a hot lane, or -1."""
    slots: Ids
    """[experts]: the slot in that lane; of no meaning for cold experts."""
    sizes: tuple[int, ...]
    """Slots of each hot lane; that number is also the place of its dummy."""

    def check_integrity(self) -> None:
        """Assert that each expert has a slot that exists, and each slot at most one expert."""
        assert len(self.sizes) <= MAX_LANES
        assert ((self.lanes >= COLD) & (self.lanes < len(self.sizes))).all()
        for lane, size in enumerate(self.sizes):
            slots = self.slots[self.lanes == lane]
            assert ((slots >= 0) & (slots < size)).all()
            assert np.unique(slots).size == slots.size


def make_lane_map(slots: NDArray[np.integer], size: int) -> LaneMap:
    """Return the map of one hot lane from expert to slot; -1 and the dummy's are cold."""
    ids = slots.astype(np.int64)
    return LaneMap(np.where((ids >= 0) & (ids < size), 0, COLD), ids, (size,))


def make_multi_lane_map(lanes: NDArray[np.integer]) -> LaneMap:
    """Return the map of hot lanes whose slots are filled by ascending expert id."""
    numbers = lanes.astype(np.int64)
    slots = np.full(numbers.size, COLD)
    members = [np.flatnonzero(numbers == lane) for lane in range(int(numbers.max(initial=-1)) + 1)]
    for experts in members:
        slots[experts] = np.arange(experts.size)
    return LaneMap(numbers, slots, tuple(experts.size for experts in members))


@dataclass(frozen=True, slots=True, eq=False)
class WorklistLane:
    """The routed slots of one lane, and its empty entries; all arrays have an element for each."""

    places: Ids
    """Slots of a hot lane, experts in the cold one."""
    sources: Ids
    tokens: Ids
    weights: Weights
    experts: Ids
    """Experts as the model numbers them; -1 where empty."""
    count: int

    @property
    def is_filled(self) -> NDArray[np.bool_]:
        """Which entries are routed slots."""
        return self.sources < self.sources.size


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWorklist:
    """The routed slots of some tokens in one layer, split into lanes."""

    tokens: int
    used: int
    hot: tuple[WorklistLane, ...]
    cold: WorklistLane

    def __iter__(self) -> Iterator[WorklistLane]:
        """Go over the lanes, the cold one last."""
        yield from self.hot
        yield self.cold

    @property
    def capacity(self) -> int:
        """Routed slots, with those that name no expert."""
        return self.tokens * self.used

    def check_integrity(self) -> None:
        """Assert that no routed slot is there twice, and that empty entries are empty."""
        sources = np.concatenate([lane.sources[lane.is_filled] for lane in self])
        assert np.unique(sources).size == sources.size
        for lane in self:
            assert lane.count == lane.is_filled.sum()
            assert (lane.tokens == lane.sources // max(self.used, 1)).all()
            assert not lane.weights[~lane.is_filled].any()


def build_worklist(
    selected: NDArray[np.integer],
    weights: NDArray[np.floating],
    lane_map: LaneMap,
    order: Order,
    *,
    dummy: bool = True,
) -> ExpertWorklist:
    """Split what was routed, both [tokens, used], into lanes.

    Entries are in the order of their sources (token-major), by place and then by source
    (expert-major), or stay where their source is (token-aligned). Without a ``dummy`` the empty
    entries of hot lanes name -1, as those of the cold lane always do.
    """
    tokens, used = selected.shape
    experts = selected.reshape(-1).astype(np.int64)
    flat = weights.reshape(-1).astype(np.float32)
    lanes = np.where(experts < 0, MAX_LANES, lane_map.lanes[experts])

    def fill(lane: int, places: Ids, empty: int) -> WorklistLane:
        sources = np.flatnonzero(lanes == lane)
        if order == "expert_major":
            sources = sources[np.argsort(places[sources], kind="stable")]
        at = sources if order == "token_aligned" else np.arange(sources.size)
        return _build_lane(sources, at, places, empty, experts, flat, used)

    slots = lane_map.slots[experts]
    hot = (fill(lane, slots, size if dummy else COLD) for lane, size in enumerate(lane_map.sizes))
    return ExpertWorklist(tokens, used, tuple(hot), fill(COLD, experts, COLD))


def _build_lane(
    sources: Ids, at: Ids, places: Ids, empty: int, experts: Ids, weights: Weights, used: int
) -> WorklistLane:
    """Return a lane with these sources at these entries; the rest is looked up by source."""
    capacity = experts.size
    filled = np.full(capacity, capacity)
    filled[at] = sources

    def by_source(values: Ids, otherwise: int) -> Ids:
        result = np.full(capacity, otherwise)
        result[at] = values[sources]
        return result

    kept = np.zeros(capacity, np.float32)
    kept[at] = weights[sources]
    return WorklistLane(
        places=by_source(places, empty),
        sources=filled,
        tokens=filled // max(used, 1),
        weights=kept,
        experts=by_source(experts, COLD),
        count=sources.size,
    )


Rows = NDArray[np.floating]


def reduce_rows(worklist: ExpertWorklist, rows: Sequence[Rows]) -> Rows:
    """Merge the rows of all lanes, [entries, width] each, into [tokens, width].

    Each token adds its weighted rows in the order of their sources, whatever lane and entry they
    came from: where a row was computed leaves no trace, not even in the last bit.
    """
    width = rows[-1].shape[1]
    grid = np.zeros((worklist.capacity, width), rows[-1].dtype)
    for lane, of_lane in zip(worklist, rows, strict=True):
        weighted = of_lane * lane.weights[:, None].astype(grid.dtype)
        grid[lane.sources[lane.is_filled]] = weighted[lane.is_filled]
    merged = np.zeros((worklist.tokens, width), grid.dtype)
    for choice in range(worklist.used):
        merged += grid[choice :: worklist.used]
    return merged


def multiply_routed(matrices: Rows, rows: Rows, experts: Ids) -> Rows:
    """Multiply each row [width] by the matrix [out, width] of its expert; -1 gives zeros."""
    products = np.zeros((experts.size, matrices.shape[1]), rows.dtype)
    for position in np.flatnonzero(experts >= 0):
        products[position] = matrices[experts[position]] @ rows[position]
    return products


def multiply_indirect(matrices: Rows, rows: Rows, experts: Ids, sources: Ids) -> Rows:
    """Multiply rows that are looked up by number, without making a copy of them first."""
    products = np.zeros((experts.size, matrices.shape[1]), rows.dtype)
    for position in np.flatnonzero(experts >= 0):
        products[position] = matrices[experts[position]] @ rows[sources[position]]
    return products


def multiply_reduced(
    matrices: Rows, rows: Rows, experts: Ids, *, tokens: Ids, weights: Rows, count: int
) -> Rows:
    """Add the weighted products straight into the rows of ``count`` tokens, in their order."""
    merged = np.zeros((count, matrices.shape[1]), rows.dtype)
    for position in np.flatnonzero(experts >= 0):
        product = matrices[experts[position]] @ rows[position]
        merged[tokens[position]] += weights[position] * product
    return merged


Switch = Literal["off", "on", "auto"]

MERGE_TOKENS = 32
MERGE_CAPACITY = 64
"""From so many tokens and routed slots on, ``auto`` reduces lanes before it merges them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPolicy:
    """What is wanted of prompts; the defaults are for a base that was not measured."""

    reduce_merge: Switch = "off"
    """Whether each lane is reduced to rows of tokens before the lanes are added."""
    compact_cold: bool = True
    """Whether a cold lane that is reduced adds its slots straight into those rows."""
    dense: bool = True
    """Whether the grid of all routed slots is kept for merging."""
    dense_min_tokens: int = 256
    """From so many tokens on; 0: no minimum."""
    bypass: Switch = "auto"
    """Whether prompts bypass the cache: ``auto`` where too few experts are hot."""
    bypass_min_tokens: int = 0
    min_hot_ratio: float = 0.0
    """The share of hot experts below which ``auto`` bypasses."""
    order: Order | Literal["auto"] = "auto"
    decode_reduce: bool = False
    """Whether a single token that is generated reduces its lanes too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """A batch at one routed layer, and what of that layer is hot."""

    phase: Phase | None
    """The phase of its call; None: unknown."""
    tokens: int
    used: int
    experts: int
    hot: int
    """Experts in hot lanes."""
    lanes: int = 1
    cold: bool = True
    """Whether there is a cold lane."""

    @property
    def effective_phase(self) -> Phase:
        """The phase by which the cache works on it."""
        return resolve_phase(self.phase, self.tokens)

    @property
    def capacity(self) -> int:
        """Its routed slots."""
        return self.tokens * self.used


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How one batch is worked on at one layer."""

    cached: bool
    """Whether hot lanes take part."""
    bypassed: bool
    order: Order
    dense: bool
    reduce_merge: bool
    compact_cold: bool


def plan_batch(policy: PromptPolicy, batch: BatchShape) -> BatchPlan:
    """Decide everything about a batch."""
    bypassed = is_bypassed(policy, batch)
    cached = not bypassed and is_cache_active(batch.phase, tokens=batch.tokens, lanes=batch.lanes)
    reduces = cached and reduces_before_merging(policy, batch)
    return BatchPlan(
        cached=cached,
        bypassed=bypassed,
        order=choose_worklist_order(policy, batch.effective_phase),
        dense=cached and is_dense(policy, batch),
        reduce_merge=reduces,
        compact_cold=reduces and policy.compact_cold,
    )


def choose_worklist_order(policy: PromptPolicy, effective_phase: Phase) -> Order:
    """Return the order of worklists: by expert for prompts, unless another is wanted."""
    if effective_phase is not Phase.PROMPT:
        return "token_major"
    return "expert_major" if policy.order == "auto" else policy.order


def is_dense(policy: PromptPolicy, batch: BatchShape) -> bool:
    """Tell whether the grid of routed slots is kept: for prompts of some length."""
    return (
        policy.dense
        and batch.effective_phase is Phase.PROMPT
        and batch.tokens > 1
        and batch.tokens >= policy.dense_min_tokens
    )


def reduces_before_merging(policy: PromptPolicy, batch: BatchShape) -> bool:
    """Tell whether lanes are reduced to rows of tokens first; needs a cold lane and two slots."""
    if not batch.cold or batch.capacity <= 1:
        return False
    match batch.effective_phase:
        case Phase.WARMUP:
            return False
        case Phase.DECODE:
            return policy.decode_reduce and batch.tokens == 1
        case Phase.PROMPT:
            large = batch.tokens >= MERGE_TOKENS and batch.capacity >= MERGE_CAPACITY
            return policy.reduce_merge == "on" or (policy.reduce_merge == "auto" and large)


def is_bypassed(policy: PromptPolicy, batch: BatchShape) -> bool:
    """Tell whether a prompt bypasses the cache, because too little of it would be used."""
    if batch.effective_phase is not Phase.PROMPT or batch.tokens < policy.bypass_min_tokens:
        return False
    if policy.bypass == "auto":
        return batch.hot / batch.experts < policy.min_hot_ratio
    return policy.bypass == "on"
