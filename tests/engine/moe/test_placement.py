"""Who is placed where: the cases of llama.cpp's planner, and what must hold for any sizes."""

import json
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe.placement import (
    LayerExpert,
    Placement,
    ScoredExpert,
    Strategy,
    append_unobserved,
    list_observed,
    place_experts,
    score_experts,
)
from expertctl.engine.moe.usage_profile import LayerUsage
from expertctl.errors import UsageError

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "moe_cache.json").read_text())[
    "planner"
]


def tens(*places: LayerExpert) -> dict[LayerExpert, int]:
    return dict.fromkeys(places, 10)


def checked(placement: Placement, sizes: dict[LayerExpert, int]) -> list[list[LayerExpert]]:
    placement.check_integrity(sizes)
    return [lane.experts for lane in placement.lanes]


def test_the_first_of_a_layer_also_pays_for_the_dummy_as_published() -> None:
    case = CASES[0]
    scored = [
        ScoredExpert(int(layer), expert, score)
        for layer, given_scores in case["layer_scores"].items()
        for expert, score in enumerate(given_scores)
    ]
    sizes = dict.fromkeys(list_observed(scored), case["expert_bytes"])
    found = place_experts(list_observed(scored), sizes, budgets=[case["budget"]])
    assert checked(found, sizes) == [[tuple(place) for place in case["chosen"]]]
    assert found.lanes[0].used == 30


def test_what_is_too_expensive_is_skipped_and_the_next_is_tried_as_published() -> None:
    case = CASES[1]
    order = [(expert["layer"], expert["id"]) for expert in case["experts"]]
    sizes = {(expert["layer"], expert["id"]): expert["bytes"] for expert in case["experts"]}
    found = place_experts(order, sizes, budgets=[case["budget"]])
    assert checked(found, sizes) == [[tuple(place) for place in case["chosen"]]]
    assert found.lanes[0].used == 20


def test_sizes_beyond_what_can_be_addressed_place_nobody() -> None:
    sizes = {(0, 0): 2**63}
    assert checked(place_experts([(0, 0)], sizes, budgets=[2**64 - 1]), sizes) == [[]]


def test_experts_that_the_base_does_not_have_are_left_out() -> None:
    found = place_experts([(0, 0), (0, 1), (0, 1)], tens((0, 1)), budgets=[20])
    assert checked(found, tens((0, 1))) == [[(0, 1)]]


def test_a_budget_for_one_expert_and_its_dummy_holds_no_second_layer() -> None:
    order: list[LayerExpert] = [(0, 0), (0, 1), (1, 0), (1, 1)]
    sizes = dict(zip(order, (40, 70, 20, 10), strict=True))
    found = place_experts(order, sizes, budgets=[80])
    assert checked(found, sizes) == [[(0, 0)]]
    assert found.lanes[0].used == 80


def test_the_flat_order_spreads_a_budget_over_layers() -> None:
    hits = ((100, 90, 80), (50, 40, 30), (20, 10, 5))
    scored = score_experts([LayerUsage(n, raw=dict(enumerate(row))) for n, row in enumerate(hits)])
    sizes = dict.fromkeys(list_observed(scored), 1)
    found = place_experts(list_observed(scored), sizes, budgets=[9])
    assert {layer: found.lanes[0].list_layer(layer) for layer in range(3)} == {
        0: [0, 1],
        1: [0, 1],
        2: [0, 1],
    }


def test_warm_fills_one_lane_and_then_the_next() -> None:
    order: list[LayerExpert] = [(0, expert) for expert in range(4)]
    found = place_experts(order, tens(*order), budgets=[30, 20])
    assert checked(found, tens(*order)) == [[(0, 0), (0, 1)], [(0, 2)]]
    assert [lane.used for lane in found.lanes] == [30, 20]


def test_hot_even_gives_each_expert_to_the_lane_with_the_fewest_of_its_layer() -> None:
    order: list[LayerExpert] = [(2, expert) for expert in range(4)]
    found = place_experts(order, tens(*order), budgets=[40, 40], strategy="hot-even")
    assert checked(found, tens(*order)) == [[(2, 0), (2, 2)], [(2, 1), (2, 3)]]


def test_hot_even_prefers_the_lane_with_fewer_bytes_and_takes_another_when_it_is_full() -> None:
    order: list[LayerExpert] = [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)]
    found = place_experts(order, tens(*order), budgets=[40, 60], strategy="hot-even")
    assert checked(found, tens(*order)) == [[(0, 0), (2, 0)], [(1, 0), (2, 1), (2, 2)]]


def test_even_split_gives_each_lane_layers_by_its_budget_and_takes_them_in_turn() -> None:
    order: list[LayerExpert] = [(layer, rank) for rank in range(2) for layer in range(4)]
    found = place_experts(order, tens(*order), budgets=[30, 60, 30], strategy="even-split")
    assert checked(found, tens(*order)) == [
        [(0, 0), (0, 1)],
        [(1, 0), (2, 0), (1, 1), (2, 1)],
        [(3, 0), (3, 1)],
    ]
    assert [lane.used for lane in found.lanes] == [30, 60, 30]


def test_memory_that_is_left_is_filled_with_experts_that_nobody_observed() -> None:
    sizes = tens(*[(0, expert) for expert in range(4)])
    assert len(place_experts([(0, 0)], sizes, budgets=[50]).lanes[0].experts) == 1
    full = place_experts(append_unobserved([(0, 0)], sizes), sizes, budgets=[50])
    assert set(full.lanes[0].experts) == set(sizes)
    assert full.lanes[0].used == 50


def test_who_nobody_observed_comes_in_an_order_that_never_changes() -> None:
    sizes = tens(*[(layer, expert) for layer in (3, 1) for expert in range(4)])
    order = append_unobserved([(1, 2), (9, 9)], sizes)
    assert order[:2] == [(1, 2), (9, 9)]
    assert order[2:] == [(1, 0), (3, 3), (3, 0), (3, 1), (1, 1), (1, 3), (3, 2)]


@pytest.mark.parametrize("budgets", [[], [1, 2, 3, 4]])
def test_there_are_one_to_three_lanes(budgets: list[int]) -> None:
    with pytest.raises(UsageError, match="one to 3 lanes"):
        place_experts([], {}, budgets=budgets)


@pytest.mark.parametrize("strategy", get_args(Strategy))
@given(
    sizes=st.dictionaries(
        st.tuples(st.integers(0, 4), st.integers(0, 6)), st.integers(0, 50), max_size=25
    ),
    budgets=st.lists(st.integers(0, 400), min_size=1, max_size=3),
    data=st.data(),
)
def test_any_placement_is_within_its_budgets_and_leaves_out_only_what_does_not_fit(
    strategy: Strategy, sizes: dict[LayerExpert, int], budgets: list[int], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(sorted(sizes)))
    found = place_experts(order, sizes, budgets=budgets, strategy=strategy)
    everywhere = {place for lane in checked(found, sizes) for place in lane}
    if strategy != "even-split":
        for place in set(sizes) - everywhere:
            for lane in found.lanes:
                before = order[: order.index(place)]
                is_first = not any(n == place[0] and (n, e) in before for n, e in lane.experts)
                dummy = sizes[place] if is_first else 0
                assert lane.used + sizes[place] + dummy > lane.budget
