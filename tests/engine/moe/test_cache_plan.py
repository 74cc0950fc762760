"""How many slots there are: within the budget, and more where they serve more."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe.cache_plan import (
    WORKING_SHARE,
    CachePlan,
    adapt_plan,
    compute_miss_shares,
    fits_in_memory,
    plan_cache,
)


def drawn(*skews: float, experts: int = 64, seed: int = 0) -> list[np.ndarray]:
    """Counts of experts by how unequal they are, each layer with favourites of its own."""
    random = np.random.default_rng(seed)
    found = []
    for skew in skews:
        likely = 1 / np.arange(1, experts + 1) ** skew
        found.append(random.multinomial(40_000, random.permutation(likely / likely.sum())))
    return found


SIZES = st.integers(1, 8), st.integers(1, 64), st.integers(1, 1 << 20), st.integers(0, 1 << 26)


@given(*SIZES, st.integers(1, 1 << 28), st.integers(0, 1 << 28), st.integers(0, 1 << 25))
def test_what_begins_in_a_memory_begins_in_a_larger_one(
    layers: int, experts: int, block: int, rest: int, limit: int, more: int, texts: int
) -> None:
    """Refused is what is too large for the least plan; else texts have their room beside it."""

    def taken(room: int) -> int:
        size = rest + layers * experts * block
        if fits_in_memory(size, room, sequence_bytes=texts):
            return size + texts
        plan = plan_cache(
            layers=layers,
            experts=experts,
            block_bytes=block,
            other_bytes=rest,
            limit=room,
            miss="exact",
            cap=1.0,
            sequence_bytes=texts,
        )
        return rest + plan.blocks * block + texts

    if taken(limit) <= limit:
        assert taken(limit + more) <= limit + more


@given(*SIZES, st.integers(1, 1 << 28))
def test_a_plan_is_within_its_share_of_the_budget(
    layers: int, experts: int, block: int, rest: int, limit: int
) -> None:
    plan = plan_cache(
        layers=layers,
        experts=experts,
        block_bytes=block,
        other_bytes=rest,
        limit=limit,
        miss="exact",
        cap=1.0,
    )
    assert plan.blocks == layers * plan.slots + experts - plan.slots
    if plan.slots:
        assert rest + plan.blocks * block <= WORKING_SHARE * limit


def test_slots_go_to_the_layers_that_ask_for_many_and_the_pool_stays_large_enough() -> None:
    plan = CachePlan(layers=12, experts=64, slots=24)
    counts = drawn(*np.linspace(0.2, 1.4, 12))
    best = adapt_plan(plan, counts)
    assert best.slots_by_layer == (53, 37, 30, 27, 24, 19, 18, 17, 14, 13, 12, 12)
    assert best.pool == 64 - min(best.slots_by_layer)
    assert best.blocks <= plan.blocks == 12 * 24 + 40
    before, after = (sum(compute_miss_shares(counts, p.capacities)) / 12 for p in (plan, best))
    assert (round(before, 3), round(after, 3)) == (0.300, 0.289)


def test_no_layer_gets_fewer_slots_than_are_pinned() -> None:
    plan = CachePlan(layers=12, experts=64, slots=24)
    counts = drawn(*np.linspace(0.2, 1.4, 12))
    best = adapt_plan(plan, counts, minimum=20)
    assert min(best.slots_by_layer) == 20 < max(best.slots_by_layer)
    assert best.blocks <= plan.blocks


@pytest.mark.parametrize("counts", [drawn(1.0, 1.0, 1.0), drawn(0.0, 0.0, 0.0)], ids=str)
def test_layers_that_are_alike_get_alike_slots(counts: list[np.ndarray]) -> None:
    plan = CachePlan(layers=3, experts=64, slots=24)
    assert adapt_plan(plan, counts) == plan


def test_a_plan_that_serves_everything_stays_even() -> None:
    plan = CachePlan(layers=2, experts=64, slots=32)
    counts = [np.repeat([n, 0], [asked, 64 - asked]) for n, asked in ((40, 20), (900, 30))]
    assert compute_miss_shares(counts, plan.capacities) == [0, 0]
    assert adapt_plan(plan, counts) == plan


def test_too_little_that_was_counted_changes_nothing() -> None:
    plan = CachePlan(layers=2, experts=64, slots=8)
    few = [np.full(64, 7), np.eye(64, dtype=int)[0] * 10_000]
    assert adapt_plan(plan, few) == plan
    assert adapt_plan(CachePlan(layers=2, experts=64, slots=0), drawn(0.5, 1.5)).capacities == (
        0,
        0,
    )


@given(st.lists(st.floats(0, 2), min_size=1, max_size=6), st.integers(1, 64), st.integers(0, 99))
def test_an_adapted_plan_takes_no_more_memory_and_misses_no_more(
    skews: list[float], slots: int, seed: int
) -> None:
    plan, counts = CachePlan(layers=len(skews), experts=64, slots=slots), drawn(*skews, seed=seed)
    best = adapt_plan(plan, counts)
    assert best.blocks <= plan.blocks
    assert all(0 < capacity <= 64 for capacity in best.capacities)
    assert best.pool + min(best.capacities) == 64
    assert (
        sum(compute_miss_shares(counts, best.capacities))
        <= sum(compute_miss_shares(counts, plan.capacities)) + 1e-9
    )
