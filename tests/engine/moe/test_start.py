"""How a base begins: who is known comes first, in time or in full, and is exchanged for later."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from expertctl.engine.moe.cache_plan import CachePlan
from expertctl.engine.moe.counters import Phase
from expertctl.engine.moe.expert_cache import EXACT_POLICY, ExpertCache
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.routed_experts import RoutingChoices
from expertctl.engine.moe.usage_profile import LayerUsage, UsageProfile, build_prompt_profile
from expertctl.engine.moe.warmup import LayerState, SavedCacheState, WarmupPlan, warm_up_cache
from expertctl.engine_config import SharePins, TopPins, Warmup, WarmupConfig, check_exchange_rate
from expertctl.errors import UsageError
from expertctl.package.model_config import ModelConfig
from tests.engine.moe.test_expert_cache import (
    EXPERTS,
    LAYERS,
    NUMBERS,
    Marked,
    Slow,
    config,
    new_cache,
)

__all__ = ["config"]

USAGE = build_prompt_profile(
    experts=EXPERTS, prompts=10, layers={n: {7: 10, 6: 8, 5: 2} for n in NUMBERS}
)
GUIDE = replace(USAGE, source="a file")


def use(cache: ExpertCache, config: ModelConfig, chosen: Sequence[int], *, passes: int = 1) -> None:
    """Let a token ask for the same experts of each layer in so many passes."""
    room = RoutingChoices(config.experts, tokens=1)
    room.selected[:], room.likely[:] = chosen, chosen
    for _ in range(passes):
        for layer in range(LAYERS):
            cache.load(layer, room, 1)
        cache.end_pass(room, 1, phase=Phase.DECODE)
    cache.check_integrity()


def list_cached_experts(cache: ExpertCache) -> list[set[int]]:
    return [set(slots.resident_ids) for slots in cache.slots]


def test_all_who_are_known_have_slots_before_the_first_pass(config: ModelConfig) -> None:
    with closing(new_cache(Marked(), slots=3, policy=EXACT_POLICY)) as cache:
        warm_up_cache(cache, WarmupPlan(WarmupConfig(warmup="full"), GUIDE))
        assert list_cached_experts(cache) == [{7, 6, 5}] * LAYERS
        cache.check_integrity()


def test_slots_of_which_nothing_is_known_are_filled_in_full_alone(config: ModelConfig) -> None:
    with closing(new_cache(Marked(), slots=5, policy=EXACT_POLICY)) as cache:
        warm_up_cache(cache, WarmupPlan(WarmupConfig(warmup="full"), GUIDE))
        assert list_cached_experts(cache) == [{7, 6, 5, 0, 1}] * LAYERS


def test_who_is_known_comes_beside_the_work_as_long_as_slots_are_empty(
    config: ModelConfig,
) -> None:
    with closing(new_cache(Marked(), slots=4, policy=EXACT_POLICY)) as cache:
        warm_up_cache(cache, WarmupPlan(WarmupConfig(warmup="hybrid"), GUIDE))
        use(cache, config, (0, 7), passes=200)
        assert list_cached_experts(cache) == [{0, 7, 6, 5}] * LAYERS


def test_who_is_pinned_comes_beside_the_work_though_others_took_all_slots(
    config: ModelConfig,
) -> None:
    reader = Slow((NUMBERS[0], 7))  # all others wait behind
    with closing(new_cache(reader, slots=2, policy=EXACT_POLICY)) as cache:
        for slots in cache.slots:
            slots.pin([7])
        warm_up_cache(cache, WarmupPlan(WarmupConfig(warmup="hybrid"), GUIDE))
        assert reader.has_begun.wait(120)
        use(cache, config, (0, 1))
        assert list_cached_experts(cache) == [{0, 1}] * LAYERS
        reader.goes_on.set()
        use(cache, config, (0, 1), passes=200)
        assert all(7 in there for there in list_cached_experts(cache))


def test_nobody_comes_who_is_not_asked_for_where_that_is_wished(config: ModelConfig) -> None:
    reader = Marked()
    with closing(new_cache(reader, slots=4, policy=EXACT_POLICY)) as cache:
        warm_up_cache(cache, WarmupPlan(WarmupConfig(warmup="none"), GUIDE))
        use(cache, config, (0, 1), passes=20)
        assert {expert for _, expert in reader.read_names} == {0, 1}


@pytest.mark.parametrize("warmup", ["none", "hybrid", "full"])
def test_a_restored_state_keeps_its_counts_and_its_residents_come_first(warmup: Warmup) -> None:
    state = SavedCacheState(
        0.0, "", {n: LayerState((4, -1), {4: 9.0, 3: 1.0}, {4: 6}, 7) for n in NUMBERS}
    )
    slots = {n: LayerSlots(experts=EXPERTS, capacity=3) for n in NUMBERS}
    ranked = WarmupPlan(WarmupConfig(warmup=warmup), GUIDE, state).rank_experts(slots)
    assert ranked == [[4, 7, 6, 5]] * LAYERS
    assert [(layer.step, layer.counts[4]) for layer in slots.values()] == [(7, 9.0)] * LAYERS


def test_pins_come_before_all_others() -> None:
    state = SavedCacheState(0.0, "", {1: LayerState((4,), {}, {}, 0)})
    slots = {1: LayerSlots(experts=EXPERTS, capacity=3, pinned=(6,))}
    assert WarmupPlan(WarmupConfig(), GUIDE, state).rank_experts(slots) == [[6, 4, 7, 5]]


def test_a_plan_has_the_pins_that_are_wished_and_slots_as_is_known() -> None:
    plan = CachePlan(layers=LAYERS, experts=EXPERTS, slots=2)
    assert WarmupPlan(WarmupConfig(), GUIDE).adapt_cache_plan(plan, NUMBERS) == plan
    assert WarmupPlan(WarmupConfig(pins=TopPins(1))).adapt_cache_plan(plan, NUMBERS) == plan
    named = WarmupPlan(WarmupConfig(pins=TopPins(1)), GUIDE).adapt_cache_plan(plan, NUMBERS)
    assert named.pinned_by_layer == (frozenset({7}),) * LAYERS
    shared = WarmupPlan(WarmupConfig(pins=SharePins(0.5)), GUIDE).adapt_cache_plan(plan, NUMBERS)
    assert shared.pinned_by_layer == (frozenset({7, 6}),) * LAYERS
    with pytest.raises(UsageError, match="layer 1 has 2 slots"):
        WarmupPlan(WarmupConfig(pins=TopPins(3)), GUIDE).adapt_cache_plan(plan, NUMBERS)


def test_layers_that_ask_for_more_get_more_slots() -> None:
    even, few = np.full(64, 900), np.r_[[20_000] * 4, [10] * 60]  # many, and four of all
    layers = tuple(
        LayerUsage(n, hot={e: int(c) for e, c in enumerate(even if n < 6 else few)})
        for n in range(12)
    )
    activity = UsageProfile("update", layers, experts=64, used=8)
    plan = CachePlan(layers=12, experts=64, slots=16)
    found = WarmupPlan(WarmupConfig(), activity).adapt_cache_plan(plan, range(12))
    assert min(found.slots_by_layer[:6]) > max(found.slots_by_layer[6:]) >= 8
    assert found.blocks <= plan.blocks


def test_a_layer_that_fewer_tokens_asked_gets_no_fewer_slots() -> None:
    """Which is the last: of a prompt it is asked for one token."""
    counts = np.r_[[20_000] * 20, [10] * 44]
    layers = tuple(
        LayerUsage(n, hot={e: int(c) // (10 if n == 11 else 1) for e, c in enumerate(counts)})
        for n in range(12)
    )
    activity = UsageProfile("update", layers, experts=64, used=8)
    plan = CachePlan(layers=12, experts=64, slots=16)
    found = WarmupPlan(WarmupConfig(), activity).adapt_cache_plan(plan, range(12))
    assert len(set(found.capacities)) <= 2
    assert max(found.capacities) - min(found.capacities) <= 1


def test_an_exchange_that_is_wished_waits_for_what_is_learnt(config: ModelConfig) -> None:
    with closing(new_cache(Marked(), slots=2, policy=EXACT_POLICY)) as cache:
        warm_up_cache(cache, WarmupPlan(WarmupConfig(exchange=0.5)))
        assert (list(cache.scores), cache.exchange_rate) == ([{}] * LAYERS, 0.5)


def test_a_profile_exchanges_residents_for_those_who_are_asked_for_more(
    config: ModelConfig,
) -> None:
    """Nobody asks for 6 and 7 here, and 0 and 1 have all slots; at no rate they stay."""
    for rate, there in ((0.0, {0, 1}), (1.0, {6, 7})):
        with closing(new_cache(Marked(), slots=2, policy=EXACT_POLICY)) as cache:
            use(cache, config, (0, 1), passes=3)
            wishes = WarmupConfig(warmup="none", exchange=rate)
            warm_up_cache(cache, WarmupPlan(wishes, GUIDE))
            use(cache, config, (2, 3), passes=100)
            use(cache, config, (4, 3), passes=100)
            found = set.union(*list_cached_experts(cache))
            assert (there <= found) == (rate == 1.0), found


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_what_is_no_share_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="not a share"):
        check_exchange_rate(rate)


def test_warmup_configs_are_values() -> None:
    assert WarmupConfig(profile=Path("x")) == WarmupConfig(profile=Path("x"))
