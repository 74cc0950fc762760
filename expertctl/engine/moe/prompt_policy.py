"""How a batch of routed slots is worked on: pure decisions from its phase and its size.

What makes prompts fast is for prompts alone. Generating keeps token-major worklists, and neither
generating nor warming up ever bypasses the cache.
"""

from dataclasses import dataclass
from typing import Literal

from expertctl.engine.moe.phase import Phase, cache_is_active, cache_phase
from expertctl.engine.moe.worklist import Order

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
    def works_as(self) -> Phase:
        """The phase by which the cache works on it."""
        return cache_phase(self.phase, self.tokens)

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
    cached = not bypassed and cache_is_active(batch.phase, tokens=batch.tokens, lanes=batch.lanes)
    reduces = cached and reduces_before_merging(policy, batch)
    return BatchPlan(
        cached=cached,
        bypassed=bypassed,
        order=worklist_order(policy, batch.works_as),
        dense=cached and is_dense(policy, batch),
        reduce_merge=reduces,
        compact_cold=reduces and policy.compact_cold,
    )


def worklist_order(policy: PromptPolicy, works_as: Phase) -> Order:
    """Return the order of worklists: by expert for prompts, unless another is wanted."""
    if works_as is not Phase.PROMPT:
        return "token_major"
    return "expert_major" if policy.order == "auto" else policy.order


def is_dense(policy: PromptPolicy, batch: BatchShape) -> bool:
    """Tell whether the grid of routed slots is kept: for prompts of some length."""
    return (
        policy.dense
        and batch.works_as is Phase.PROMPT
        and batch.tokens > 1
        and batch.tokens >= policy.dense_min_tokens
    )


def reduces_before_merging(policy: PromptPolicy, batch: BatchShape) -> bool:
    """Tell whether lanes are reduced to rows of tokens first; needs a cold lane and two slots."""
    if not batch.cold or batch.capacity <= 1:
        return False
    match batch.works_as:
        case Phase.WARMUP:
            return False
        case Phase.DECODE:
            return policy.decode_reduce and batch.tokens == 1
        case Phase.PROMPT:
            large = batch.tokens >= MERGE_TOKENS and batch.capacity >= MERGE_CAPACITY
            return policy.reduce_merge == "on" or (policy.reduce_merge == "auto" and large)


def is_bypassed(policy: PromptPolicy, batch: BatchShape) -> bool:
    """Tell whether a prompt bypasses the cache, because too little of it would be used."""
    if batch.works_as is not Phase.PROMPT or batch.tokens < policy.bypass_min_tokens:
        return False
    if policy.bypass == "auto":
        return batch.hot / batch.experts < policy.min_hot_ratio
    return policy.bypass == "on"
