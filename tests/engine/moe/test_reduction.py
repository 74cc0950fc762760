"""Rows of lanes, merged or reduced, against a dense computation in float64 and transformers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from expertctl.engine.moe.routing import (
    ExpertWorklist,
    LaneMap,
    Order,
    RoutingRule,
    build_worklist,
    make_lane_map,
    make_multi_lane_map,
    multiply_indirect,
    multiply_reduced,
    multiply_routed,
    reduce_rows,
    route,
)

ORDERS: tuple[Order, ...] = ("token_major", "expert_major", "token_aligned")
TOKENS, EXPERTS, USED, WIDTH, OUT = 7, 8, 3, 16, 5
LANE_MAPS = {
    "all cold": make_lane_map(np.full(EXPERTS, -1), 0),
    "all hot": make_lane_map(np.arange(EXPERTS)[::-1].copy(), EXPERTS),
    "some hot": make_lane_map(np.array([-1, 2, -1, 0, -1, -1, 4, 1]), 5),
    "three lanes": make_multi_lane_map(np.array([2, -1, 0, 1, -1, 0, 2, 0])),
}

FUSED_IDS = np.array([2, 0, -1, 3, 2, -1])
FUSED_TOKENS = np.array([1, 0, 0, 2, 1, 0])
FUSED_WEIGHTS = np.array([0.25, 0.5, 0.0, 1.25, 0.75, 0.0])
"""Of four matrices [3, 2], as the fused operations of llama.cpp's hot cache are tested."""


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def routed(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rule = RoutingRule(used=USED, normalised=True)
    found = route(torch.from_numpy(random(seed, TOKENS, EXPERTS)), rule)
    return found.selected.numpy(), found.weights.numpy()


def stacks(matrices: np.ndarray, lanes: LaneMap) -> list[np.ndarray]:
    """The matrices of each hot lane by slot, its dummy of zeros last; then all, for the cold."""
    found = []
    for lane, size in enumerate(lanes.sizes):
        stack = np.zeros((size + 1, *matrices.shape[1:]), matrices.dtype)
        members = np.flatnonzero(lanes.lanes == lane)
        stack[lanes.slots[members]] = matrices[members]
        found.append(stack)
    return [*found, matrices]


def lane_rows(
    worklist: ExpertWorklist, lanes: LaneMap, matrices: np.ndarray, x: np.ndarray
) -> list:
    """What each lane computes over its whole capacity, empty entries included."""
    padded = np.vstack((x, np.ones_like(x[:1])))  # an empty entry names the row behind the last
    return [
        multiply_routed(stack, padded[lane.tokens], lane.places)
        for stack, lane in zip(stacks(matrices, lanes), worklist, strict=True)
    ]


def dense(
    matrices: np.ndarray, x: np.ndarray, selected: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """All experts for all tokens in float64, weighted with zero where they were not chosen."""
    full = np.zeros((len(x), EXPERTS))
    np.put_along_axis(full, selected, weights.astype(np.float64), axis=1)
    products = np.einsum("eow,tw->teo", matrices.astype(np.float64), x.astype(np.float64))
    return np.einsum("te,teo->to", full, products)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", LANE_MAPS)
@pytest.mark.parametrize("dummy", [True, False])
def test_hot_and_cold_together_equal_the_dense_computation(
    name: str, order: Order, dummy: bool
) -> None:
    lanes, matrices, x = LANE_MAPS[name], random(1, EXPERTS, OUT, WIDTH), random(2, TOKENS, WIDTH)
    selected, weights = routed(3)
    worklist = build_worklist(selected, weights, lanes, order, dummy=dummy)
    merged = reduce_rows(worklist, lane_rows(worklist, lanes, matrices, x))
    assert merged.dtype == np.float32
    np.testing.assert_allclose(merged, dense(matrices, x, selected, weights), rtol=0, atol=1e-5)


def test_where_a_row_was_computed_leaves_no_trace_in_any_bit() -> None:
    matrices, x = random(1, EXPERTS, OUT, WIDTH), random(2, TOKENS, WIDTH)
    selected, weights = routed(3)
    found = []
    for lanes in LANE_MAPS.values():
        for order in ORDERS:
            worklist = build_worklist(selected, weights, lanes, order)
            found.append(reduce_rows(worklist, lane_rows(worklist, lanes, matrices, x)))
    assert all(found[0].tobytes() == other.tobytes() for other in found)


def test_the_sum_of_a_token_is_in_the_order_of_its_sources() -> None:
    """In float32 1e8 + 1 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1."""
    selected, weights = np.array([[2, 0, 1], [2, 1, 0]]), np.ones((2, 3))
    lanes = make_lane_map(np.array([-1, -1, -1]), 0)
    worklist = build_worklist(selected, weights, lanes, "expert_major")
    values = np.array([1.0, -1e8, 1e8], np.float32)
    empty = np.zeros((6, 1), np.float32)
    rows = values[worklist.cold.experts][:, None]
    assert reduce_rows(worklist, [empty, rows]).tolist() == [[0.0], [1.0]]


def test_slots_without_an_expert_add_nothing() -> None:
    selected = np.array([[1, -1], [-1, -1]])
    lanes = make_lane_map(np.array([-1, 0]), 1)
    worklist = build_worklist(selected, np.full((2, 2), 0.5), lanes, "token_major")
    worklist.check_integrity()
    rows = [np.full((4, 2), 6.0, np.float32), np.full((4, 2), np.nan, np.float32)]
    assert reduce_rows(worklist, rows).tolist() == [[3.0, 3.0], [0.0, 0.0]]


def test_an_indirect_product_equals_that_of_rows_laid_out_first() -> None:
    matrices, x = random(4, 4, 3, 2), random(5, 3, 2)
    laid_out = multiply_routed(matrices, x[FUSED_TOKENS], FUSED_IDS)
    indirect = multiply_indirect(matrices, x, FUSED_IDS, FUSED_TOKENS)
    exact = np.einsum(
        "pow,pw->po", matrices[FUSED_IDS].astype(float), x[FUSED_TOKENS].astype(float)
    )
    exact[FUSED_IDS < 0] = 0
    np.testing.assert_allclose(laid_out, exact, rtol=0, atol=1e-5)
    np.testing.assert_allclose(indirect, exact, rtol=0, atol=1e-5)


def test_a_fused_reduction_equals_the_weighted_sum_of_the_vectors() -> None:
    matrices, rows = random(6, 4, 3, 2), random(7, 6, 2)
    fused = multiply_reduced(
        matrices, rows, FUSED_IDS, tokens=FUSED_TOKENS, weights=FUSED_WEIGHTS, count=3
    )
    products = np.einsum("pow,pw->po", matrices[FUSED_IDS].astype(float), rows.astype(float))
    want = np.stack(
        [
            0.5 * products[1],  # of its other two slots none names an expert
            0.25 * products[0] + 0.75 * products[4],
            1.25 * products[3],
        ]
    )
    np.testing.assert_allclose(fused, want, rtol=0, atol=1e-5)


@given(st.integers(0, 2**32), st.sampled_from(sorted(LANE_MAPS)), st.sampled_from(ORDERS))
def test_the_fused_reduction_equals_the_materialised_one(
    seed: int, name: str, order: Order
) -> None:
    lanes, matrices = LANE_MAPS[name], random(seed, EXPERTS, OUT, WIDTH)
    x, (selected, weights) = random(seed + 1, TOKENS, WIDTH), routed(seed + 2)
    worklist = build_worklist(selected, weights, lanes, order, dummy=False)
    padded = np.vstack((x, x[:1]))
    fused = sum(
        multiply_reduced(
            stack,
            padded[lane.tokens],
            lane.places,
            tokens=lane.tokens,
            weights=lane.weights,
            count=TOKENS,
        )
        for stack, lane in zip(stacks(matrices, lanes), worklist, strict=True)
    )
    materialised = reduce_rows(worklist, lane_rows(worklist, lanes, matrices, x))
    exact = dense(matrices, x, selected, weights)
    np.testing.assert_allclose(fused, exact, rtol=0, atol=1e-5)
    np.testing.assert_allclose(materialised, exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_experts_split_into_lanes_equal_those_of_transformers(order: Order) -> None:
    torch.manual_seed(8)
    config = Qwen3MoeConfig(
        num_experts=EXPERTS, hidden_size=WIDTH, moe_intermediate_size=12, num_experts_per_tok=USED
    )
    theirs = Qwen3MoeExperts(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    gate_up, down = (p.detach().numpy() for p in (theirs.gate_up_proj, theirs.down_proj))
    x, (selected, weights) = random(9, TOKENS, WIDTH), routed(10)
    lanes = LANE_MAPS["three lanes"]
    worklist = build_worklist(selected, weights, lanes, order)
    rows = []
    for both, lane, last in zip(
        lane_rows(worklist, lanes, gate_up, x), worklist, stacks(down, lanes), strict=True
    ):
        gate, up = np.split(both, 2, axis=1)
        rows.append(multiply_routed(last, gate / (1 + np.exp(-gate)) * up, lane.places))
    with torch.inference_mode():
        want = theirs(*map(torch.from_numpy, (x, selected, weights))).numpy()
    np.testing.assert_allclose(reduce_rows(worklist, rows), want, rtol=0, atol=1e-5)
