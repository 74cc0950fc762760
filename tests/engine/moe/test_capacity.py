"""How many slots layers get: published cases, what must hold, and the best of all ways."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe.cache_plan import (
    compute_capacity,
    compute_miss_shares,
    distribute_by_gain,
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
