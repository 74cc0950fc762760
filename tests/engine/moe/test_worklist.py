"""Worklists against the published vectors, and that no routed slot is lost or taken twice."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe.routing import (
    COLD,
    ExpertWorklist,
    LaneMap,
    Order,
    RoutingRule,
    WorklistLane,
    build_worklist,
    make_lane_map,
    make_multi_lane_map,
    route,
)

VECTORS = json.loads(
    (Path(__file__).parents[2] / "vectors" / "moe_worklist.json").read_text(encoding="utf-8")
)
SPLIT, SEVERAL = VECTORS["worklist"], VECTORS["multi_lane"]
ORDERS: tuple[Order, ...] = ("token_major", "expert_major", "token_aligned")


def split(order: Order, *, dummy: bool = True) -> ExpertWorklist:
    """The worklist of the vectors."""
    return build_worklist(
        np.array(SPLIT["selected"]),
        np.array(SPLIT["weights"]),
        make_lane_map(np.array(SPLIT["hot_map"]), 2),
        order,
        dummy=dummy,
    )


def entries(lane: WorklistLane, place: str) -> list[dict[str, Any]]:
    """The routed slots of a lane as the vectors write them."""
    return [
        {
            place: int(lane.places[at]),
            "src": int(lane.sources[at]),
            "token": int(lane.tokens[at]),
            "weight": float(lane.weights[at]),
            "expert": int(lane.experts[at]),
        }
        for at in np.flatnonzero(lane.is_filled)
    ]


def assert_entries(
    found: list[dict[str, Any]], want: list[dict[str, Any]], tolerance: float
) -> None:
    """Compare what the vectors say of each entry."""
    assert len(found) == len(want)
    for got, wanted in zip(found, want, strict=True):
        assert {name: got[name] for name in wanted} == pytest.approx(wanted, abs=tolerance)


@pytest.mark.parametrize("order", ["token_major", "expert_major"])
def test_the_slots_of_the_vectors_are_in_their_lane_and_order(order: Order) -> None:
    worklist = split(order)
    assert_entries(entries(worklist.hot[0], "slot"), SPLIT[order]["hot"], 1e-7)
    assert_entries(entries(worklist.cold, "expert"), SPLIT[order]["cold"], 1e-7)
    assert (
        worklist.hot[0].is_filled.tolist()
        == worklist.cold.is_filled.tolist()
        == [True] * 3 + [False] * 3
    )
    assert (worklist.hot[0].count, worklist.cold.count) == tuple(SPLIT["counts"].values())


def test_token_aligned_slots_stay_where_their_source_is() -> None:
    worklist = split("token_aligned")
    (hot,), cold = worklist.hot, worklist.cold
    assert np.flatnonzero(hot.is_filled).tolist() == SPLIT["token_aligned_hot_positions"]
    assert np.flatnonzero(cold.is_filled).tolist() == SPLIT["token_aligned_cold_positions"]
    assert_entries(entries(hot, "slot"), SPLIT["token_major"]["hot"], 1e-7)
    assert_entries(entries(cold, "expert"), SPLIT["token_major"]["cold"], 1e-7)
    assert (hot.count, cold.count) == (3, 3)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dummy", [True, False])
def test_empty_entries_name_the_dummy_or_nobody(order: Order, dummy: bool) -> None:
    worklist = split(order, dummy=dummy)
    capacity = SPLIT["k"] * SPLIT["n_tokens"]
    for lane, place in ((worklist.hot[0], 2 if dummy else -1), (worklist.cold, -1)):
        empty = ~lane.is_filled
        assert empty.sum() == 3
        assert set(lane.places[empty].tolist()) == {place}
        assert set(lane.sources[empty].tolist()) == {capacity}
        assert set(lane.tokens[empty].tolist()) == {SPLIT["n_tokens"]}
        assert set(lane.experts[empty].tolist()) == {-1}
        assert not lane.weights[empty].any()


def test_several_lanes_share_the_slots_of_the_vectors() -> None:
    lanes = make_multi_lane_map(np.array(SEVERAL["lane_map"]))
    lanes.check_integrity()
    worklist = build_worklist(
        np.array(SEVERAL["selected"]), np.array(SEVERAL["weights"]), lanes, "token_major"
    )
    assert_entries(entries(worklist.hot[0], "slot"), SEVERAL["lane0"], 1e-7)
    assert_entries(entries(worklist.hot[1], "slot"), SEVERAL["lane1"], 1e-7)
    assert_entries(entries(worklist.cold, "expert"), SEVERAL["cold"], 1e-7)
    assert [lane.places[: lane.count].tolist() for lane in worklist] == [[0], [0, 1], [2]]
    assert [lane.places[-1] for lane in worklist] == [1, 2, -1]  # each lane has its own dummy


def lanes_of(case: dict[str, Any]) -> LaneMap:
    """The lane map of a case that begins with logits."""
    hot_map = case.get(
        "hot_map", {expert: at for at, expert in enumerate(case.get("hot_experts", []))}
    )
    slots = np.full(len(case["logits"][0]), -1)
    for expert, slot in hot_map.items():
        slots[int(expert)] = slot
    return make_lane_map(slots, len(hot_map))


@pytest.mark.parametrize("case", VECTORS["from_logits"], ids=lambda case: str(case["logits"]))
def test_what_was_routed_by_logits_is_split_like_the_vectors(case: dict[str, Any]) -> None:
    rule = RoutingRule(used=case["k"], normalised=True, scale=case["scale"])
    routed = route(torch.tensor(case["logits"], dtype=torch.float32), rule)
    worklist = build_worklist(
        routed.selected.numpy(),
        routed.weights.numpy(),
        lanes_of(case),
        case.get("order", "token_major"),
    )
    assert_entries(entries(worklist.hot[0], "slot"), case["hot"], case["tolerance"])
    assert_entries(entries(worklist.cold, "expert"), case["cold"], case["tolerance"])


def test_biased_sigmoid_puts_the_biased_expert_first_into_the_hot_lane() -> None:
    case = VECTORS["biased_sigmoid"]
    rule = RoutingRule(used=case["k"], scoring="sigmoid")
    logits = torch.tensor(case["logits"], dtype=torch.float32)
    routed = route(logits, rule, torch.tensor(case["bias"]))
    lanes = make_lane_map(np.array([-1, -1, 0, -1]), 1)
    worklist = build_worklist(routed.selected.numpy(), routed.weights.numpy(), lanes, "token_major")
    hot = [{"expert": 2, "src": 0, "weight": 0.5}]
    cold = [{"expert": 0, "src": 1, "weight": 0.8807971}]
    assert_entries(entries(worklist.hot[0], "slot"), hot, case["tolerance"])
    assert_entries(entries(worklist.cold, "expert"), cold, case["tolerance"])


@dataclass(frozen=True)
class WorkSplit:
    """Something to be split."""

    selected: np.ndarray
    weights: np.ndarray
    lanes: LaneMap


@st.composite
def splits(draw: st.DrawFn) -> WorkSplit:
    """Routed slots of experts that lie in up to three hot lanes with spare slots, or in none."""
    experts, tokens = draw(st.integers(1, 9)), draw(st.integers(0, 6))
    used = draw(st.integers(1, experts))
    rows = [
        [
            expert if draw(st.integers(0, 7)) else -1
            for expert in draw(st.permutations(range(experts)))
        ]
        for _ in range(tokens)
    ]
    count = draw(st.integers(0, 3))
    lanes = np.array([draw(st.integers(-1, count - 1)) for _ in range(experts)])
    slots, sizes = np.full(experts, -1), []
    for lane in range(count):
        members = np.flatnonzero(lanes == lane)
        sizes.append(len(members) + draw(st.integers(0, 2)))
        slots[members] = draw(st.permutations(range(sizes[-1])))[: len(members)]
    selected = np.array(rows, np.int64).reshape(tokens, experts)[:, :used]
    weights = np.arange(1, 1 + tokens * used, dtype=np.float32).reshape(tokens, used) / 64
    return WorkSplit(selected, weights, LaneMap(lanes, slots, tuple(sizes)))


@given(splits(), st.sampled_from(ORDERS), st.booleans())
def test_every_routed_slot_is_in_one_lane_once(case: WorkSplit, order: Order, dummy: bool) -> None:
    case.lanes.check_integrity()
    worklist = build_worklist(case.selected, case.weights, case.lanes, order, dummy=dummy)
    worklist.check_integrity()
    found = {}
    for number, lane in enumerate(worklist):
        of_lane = number if number < len(worklist.hot) else COLD
        for entry in entries(lane, "place"):
            expert = entry["expert"]
            assert entry["src"] not in found
            found[entry["src"]] = (expert, entry["weight"])
            assert case.lanes.lanes[expert] == of_lane
            assert entry["place"] == (expert if of_lane == COLD else case.lanes.slots[expert])
    flat, weights = case.selected.reshape(-1), case.weights.reshape(-1)
    want = {src: (int(flat[src]), float(weights[src])) for src in np.flatnonzero(flat >= 0)}
    assert found == want


@given(splits())
def test_orders_differ_in_nothing_but_order(case: WorkSplit) -> None:
    for lanes in zip(
        *(build_worklist(case.selected, case.weights, case.lanes, order) for order in ORDERS),
        strict=True,
    ):
        by_token, by_expert, aligned = (entries(lane, "place") for lane in lanes)
        assert by_token == sorted(by_token, key=lambda entry: entry["src"])
        assert by_expert == sorted(by_token, key=lambda entry: (entry["place"], entry["src"]))
        assert aligned == by_token
        assert np.flatnonzero(lanes[2].is_filled).tolist() == [entry["src"] for entry in aligned]
        assert all(
            not a or b for b, a in pairwise(lanes[1].is_filled)
        )  # what is filled comes first


def test_a_lookup_that_names_the_dummy_or_nobody_is_cold() -> None:
    lanes = make_lane_map(np.array([2, 0, -1, 1], np.int32), 2)
    assert lanes.lanes.tolist() == [-1, 0, -1, 0]
    lanes.check_integrity()


@pytest.mark.parametrize(
    "lanes",
    [
        LaneMap(np.array([0, 0]), np.array([1, 1]), (2,)),  # one slot of two experts
        LaneMap(np.array([0, 0]), np.array([0, 2]), (2,)),  # the slot of the dummy
        LaneMap(np.array([0, 1]), np.array([0, 0]), (2,)),  # a lane that does not exist
        LaneMap(np.array([0, 3]), np.array([0, 0]), (1, 1, 1, 1)),
    ],
)
def test_a_lane_map_that_cannot_be_is_found(lanes: LaneMap) -> None:
    with pytest.raises(AssertionError):
        lanes.check_integrity()
