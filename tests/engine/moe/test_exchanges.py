"""Which residents a profile replaces: the cases of llama.cpp's updater, and what must hold."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.placement import score_experts
from expertctl.engine.moe.profile_codecs import read_activity
from expertctl.engine.moe.swap_policy import (
    Swap,
    compute_max_swaps,
    limit_swaps,
    plan_profile_swaps,
)

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "moe_cache.json").read_text())[
    "updater"
]
SHARES = CASES[1]["max_exchange"]


def layer(*cached: int, experts: int = 8, pinned: tuple[int, ...] = ()) -> LayerSlots:
    slots = LayerSlots(experts=experts, capacity=len(cached), pinned=pinned)
    for slot, expert in enumerate(cached):
        slots.assign(slot=slot, expert=expert)
    return slots


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=["rate 1", "rate 0.25"])
def test_a_profile_exchanges_as_published(case: dict[str, Any]) -> None:
    hits = {int(expert): count for expert, count in case["hits"].items()}
    found = plan_profile_swaps({0: layer(*case["resident"])}, {0: hits}, rate=case["rate"])
    assert [{"evict": swap.evict, "add": swap.add, "slot": swap.slot} for swap in found] == case[
        "exchanges"
    ]


@pytest.mark.parametrize("case", SHARES, ids=json.dumps)
def test_so_many_may_be_exchanged_as_published(case: dict[str, float]) -> None:
    found = compute_max_swaps(
        rate=case["rate"], resident_count=int(case["hot"]), candidates=int(case["candidates"])
    )
    assert found == case["value"]


def test_a_share_that_is_whole_is_not_rounded_up_and_no_number_is_nothing() -> None:
    assert compute_max_swaps(rate=0.07, resident_count=100, candidates=50) == 7
    assert compute_max_swaps(rate=float("nan"), resident_count=100, candidates=50) == 0


@pytest.mark.parametrize(
    ("record", "swap"),
    [
        (
            {"hot_experts": [[1, 100], [2, 90]], "cold_experts": [[0, 5], [3, 10]]},
            Swap(0, slot=0, evict=0, add=2),
        ),
        ({"experts": [[0, 1], [1, 20], [2, 5], [3, 40]]}, Swap(0, slot=0, evict=0, add=3)),
    ],
    ids=["counts of both branches", "raw counts"],
)
def test_a_document_exchanges_only_what_differs(record: dict[str, object], swap: Swap) -> None:
    document = {
        "schema": "llama.cpp.moe_layer_perf.v1",
        "n_expert": 4,
        "layers": [{"layer": 0, **record}],
    }
    profile = read_activity(json.dumps(document).encode(), what="profile")
    scored = {one.expert: one.score for one in score_experts(profile.layers)}
    assert plan_profile_swaps({0: layer(0, 1, experts=4)}, {0: scored}, rate=1) == (swap,)


def test_exchanges_go_by_gain_then_by_layer_then_by_expert() -> None:
    slots = {2: layer(0, 1), 0: layer(0), 1: layer(0)}
    worth = {0: {0: 1, 5: 11}, 1: {0: 1, 4: 31}, 2: {0: 1, 1: 1, 6: 11, 7: 11}}
    found = plan_profile_swaps(slots, worth, rate=1)
    assert [(swap.layer, swap.add) for swap in found] == [(1, 4), (0, 5), (2, 6), (2, 7)]


def test_pinned_experts_stay_and_what_gains_nothing_is_left() -> None:
    slots = {0: layer(0, 1, pinned=(0,)), 1: layer(5)}
    found = plan_profile_swaps(slots, {0: {2: 9, 3: 8, 1: 1}, 1: {2: 4, 5: 4}}, rate=1)
    assert found == (Swap(0, slot=1, evict=1, add=2),)


def test_experts_and_layers_that_are_not_there_are_ignored() -> None:
    found = plan_profile_swaps({0: layer(0, 1)}, {0: {8: 99, -1: 99, 2: 0}, 7: {1: 5}}, rate=1)
    assert found == ()


worths = st.dictionaries(st.integers(0, 7), st.integers(0, 50), max_size=8)


@given(st.lists(worths, min_size=1, max_size=4), st.sets(st.integers(0, 7), max_size=6))
def test_at_full_rate_a_layer_ends_with_its_best_experts(
    layers: list[dict[int, int]], resident: set[int]
) -> None:
    slots = {number: layer(*sorted(resident)) for number in range(len(layers))}
    found = plan_profile_swaps(slots, dict(enumerate(layers)), rate=1)
    for swap in found:
        assert slots[swap.layer].assign(slot=swap.slot, expert=swap.add) == swap.evict
    for number, one in slots.items():
        one.check_integrity()
        worth = sorted((layers[number].get(expert, 0) for expert in range(8)), reverse=True)
        held = sorted((layers[number].get(expert, 0) for expert in one.resident_ids), reverse=True)
        assert held == worth[: len(resident)]


def test_what_an_update_did_and_what_a_profile_exchanges_have_one_budget() -> None:
    done = [Swap(0, 0, 1, 2), Swap(2, 0, 1, 2)]
    wanted = [Swap(1, slot, slot, 20 + slot) for slot in range(3)]
    wanted += [Swap(0, slot, slot, 20 + slot) for slot in range(1, 4)]
    wanted += [Swap(3, 0, 1, 2)]
    assert limit_swaps(wanted, done, layer_budget=9, swaps_per_layer=2) == [
        *wanted[:2],
        wanted[3],
        wanted[6],
    ]
    assert limit_swaps(wanted, done, layer_budget=2) == wanted[3:6], "in the same two layers"
    assert limit_swaps(wanted, done, layer_budget=3) == wanted[:6]
    assert limit_swaps(wanted, [], layer_budget=0) == []
