"""How many slots layers get: published cases, what must hold, and the best of all ways."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe.cache_plan import (
    KVRowSize,
    compute_budget_mib,
    compute_capacity,
    compute_miss_shares,
    distribute_by_gain,
    distribute_by_unique_experts,
    estimate_kv_reserve,
)

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "moe_cache.json").read_text())
CAPACITY = VECTORS["capacity"]


def capacity(recommended_gb: float, *, slot_mb: float = 1.77, layers: int = 48) -> int:
    return compute_capacity(
        recommended_gb=recommended_gb,
        base_gb=CAPACITY["base_gb"],
        layers=layers,
        slot_mb=slot_mb,
        experts=CAPACITY["n_experts"],
    )


@pytest.mark.parametrize("case", CAPACITY["cases"])
def test_a_capacity_is_the_published_one(case: dict[str, int]) -> None:
    assert (CAPACITY["layers"], CAPACITY["slot_mb"]) == (48, 1.77)
    assert capacity(case["recommended_gb"]) == case["capacity"]


@pytest.mark.parametrize("recommended_gb", [0, 1, 2, 3, 4, 24, 64, 128, 1e6])
def test_a_capacity_is_within_the_experts_and_from_16_up_a_multiple_of_8(
    recommended_gb: float,
) -> None:
    found = capacity(recommended_gb)
    assert 0 <= found <= 512
    assert found < 16 or found % 8 == 0


def test_a_capacity_below_16_is_not_rounded() -> None:
    assert capacity(3.4) == 12
    assert capacity(3.6) == 13


@pytest.mark.parametrize("nothing", [{"slot_mb": 0}, {"layers": 0}, {"slot_mb": -1}])
def test_slots_without_a_size_give_no_capacity(nothing: dict[str, int]) -> None:
    assert capacity(24, **nothing) == 0
    assert capacity(float("inf")) == 0


@given(st.lists(st.integers(0, 64), max_size=12), st.integers(0, 900), st.integers(0, 40))
def test_shares_by_popularity_use_the_total_and_nobody_gets_less_than_the_least(
    unique: list[int], total: int, least: int
) -> None:
    shares = distribute_by_unique_experts(unique, total=total, experts=64, minimum=least)
    layers = len(unique)
    assert sum(shares) == min(total, 64 * layers)
    assert all(min(least, total // layers) <= share <= 64 for share in shares)
    for (asked, share), (other, less) in product(zip(unique, shares, strict=True), repeat=2):
        assert asked < other or share >= less - 1, "who asks for more gets no less"


def test_shares_by_popularity_are_1_3_slots_for_each_expert_where_the_total_is_that() -> None:
    assert distribute_by_unique_experts([40, 100, 200], total=442, experts=512) == [52, 130, 260]
    assert distribute_by_unique_experts([40, 100, 200], total=221, experts=512) == [32, 63, 126]
    assert distribute_by_unique_experts([10, 200], total=292, experts=512) == [32, 260], (
        "at least 32"
    )


counts = st.lists(
    st.lists(st.integers(0, 20), min_size=4, max_size=4), min_size=1, max_size=3
)  # fmt: skip


@given(counts, st.integers(0, 14), st.integers(0, 2))
def test_no_other_shares_serve_more_than_those_by_gain(
    activations: list[list[int]], total: int, least: int
) -> None:
    shares = distribute_by_gain(activations, total=total, minimum=least)
    layers = len(activations)
    total, lowest = min(total, 4 * layers), min(least, total // layers)
    assert sum(shares) == total
    assert min(shares) >= lowest
    ranked = [sorted(layer, reverse=True) for layer in activations]

    def served(ways: tuple[int, ...]) -> int:
        return sum(sum(layer[:slots]) for layer, slots in zip(ranked, ways, strict=True))

    able = [w for w in product(range(lowest, 5), repeat=layers) if sum(w) == total]
    assert served(tuple(shares)) == max(map(served, able))


def test_slots_move_to_where_they_serve_most_and_stay_where_nothing_is_gained() -> None:
    flat, steep = [5.0] * 8, [100.0] + [0.0] * 7
    assert distribute_by_gain([flat, steep], total=8, minimum=1) == [7, 1]
    assert distribute_by_gain([flat, flat], total=8, minimum=1) == [4, 4]
    assert distribute_by_gain([], total=8) == []


def test_a_layer_whose_experts_are_all_resident_misses_nothing_and_another_does() -> None:
    activations = [np.array([9, 1, 0, 0]), np.array([4, 4, 1, 1])]
    assert compute_miss_shares(activations, [2, 2]) == [0, 0.2]
    assert compute_miss_shares([np.zeros(4)], [0]) == [0]


@pytest.mark.parametrize("case", VECTORS["auto_budget_mib"])
def test_a_budget_is_what_keys_values_and_a_reserve_leave(case: dict[str, float]) -> None:
    found = compute_budget_mib(free=case["free"], kv=case["kv"], reserve=case["reserve"])
    assert found == case["value"]


@pytest.mark.parametrize("free", [0, -5, 100, float("nan"), float("inf")])
def test_a_budget_that_is_exhausted_or_no_number_is_0(free: float) -> None:
    assert compute_budget_mib(free=free, kv=60, reserve=41) == 0


def test_keys_and_values_take_their_rows_for_a_context_in_whole_cells() -> None:
    layer = KVRowSize(key_bytes=100, value_bytes=60)
    assert estimate_kv_reserve([layer, layer], context=512, streams=1, batch=512) == 2 * 512 * 160
    assert estimate_kv_reserve([layer], context=513, streams=3, batch=512) == 768 * 3 * 160


def test_a_layer_that_looks_back_a_window_keeps_it_and_a_batch_and_no_values_take_nothing() -> None:
    window, latent = KVRowSize(100, 60, window=128), KVRowSize(100, 0)
    assert estimate_kv_reserve([window], context=4096, streams=2, batch=64) == (128 * 2 + 64) * 160
    assert estimate_kv_reserve([window], context=256, streams=1, batch=512) == 256 * 160
    assert estimate_kv_reserve([latent], context=256, streams=1, batch=512) == 256 * 100
