"""The choice of experts is that of the plain path, and what is skipped keeps the routed mass."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.cpu.plain_routed_mlp import RoutingRule
from expertctl.engine.kernels.moe_layer import (
    MIN_WEIGHT_SUM,
    NO_EXPERT,
    Scoring,
    drop_experts_arguments,
    drop_experts_kernel,
    topk_routing_arguments,
    topk_routing_kernel,
)
from expertctl.engine.moe.routed_experts import redistribute_weights
from expertctl.engine.torch import routed_mlp as plain_path
from tests.engine.kernels.reference_gemm import make_random_numbers
from tests.engine.kernels.reference_moe import FOREIGN_VALUE, make_random_choices

Array = np.ndarray[Any, Any]
VECTORS = json.loads((Path(__file__).parents[2] / "vectors/moe_cache.json").read_text("utf-8"))
SCORINGS = pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])


def route(
    logits: Array, rule: RoutingRule, bias: Array | None = None, *, room: int = 3
) -> tuple[Array, Array]:
    """What the kernel chooses; rows lie in wider ones, between tokens that are not asked about."""
    tokens, experts = logits.shape
    wide = np.full((tokens + 2, experts + room), np.nan, np.float32)
    wide[1:-1, :experts] = logits
    selected = np.full((tokens + 2, rule.used), 99, np.int64)
    weights = np.full((tokens + 2, rule.used), FOREIGN_VALUE, np.float32)
    scale = np.array([rule.scale], np.float32)
    arguments = topk_routing_arguments(
        logits=wide,
        bias=bias,
        scale=scale,
        normalised=rule.normalised,
        experts=experts,
        selected=selected,
        weights=weights,
    )
    topk_routing_kernel(rule.scoring)(1, tokens + 1, arguments.ctypes.data)
    for untouched in (0, -1):
        assert (selected[untouched] == 99).all()
        assert (weights[untouched] == FOREIGN_VALUE).all()
    np.testing.assert_array_equal(wide[1:-1, :experts], logits)
    return selected[1:-1], weights[1:-1]


def check(logits: Array, rule: RoutingRule, bias: Array | None = None) -> None:
    """See that the kernel and the plain path agree."""
    selected, weights = route(logits, rule, bias)
    expected = plain_path.route(
        torch.from_numpy(logits), rule, None if bias is None else torch.from_numpy(bias)
    )
    np.testing.assert_array_equal(selected, expected.selected.numpy(), strict=True)
    np.testing.assert_allclose(weights, expected.weights.numpy(), rtol=3e-6, atol=1e-30)


def rules(scoring: Scoring, used: int) -> Iterator[RoutingRule]:
    for normalised, scale in ((False, 1.0), (True, 1.0), (True, 2.5)):
        yield RoutingRule(used=used, scoring=scoring, normalised=normalised, scale=scale)


@SCORINGS
@pytest.mark.parametrize(("experts", "used"), [(1, 1), (8, 1), (8, 2), (60, 4), (512, 10), (5, 5)])
def test_tokens_get_the_experts_and_weights_of_the_plain_path(
    scoring: Scoring, experts: int, used: int
) -> None:
    logits = make_random_numbers(1, 33, experts) * np.float32(3)
    for rule in rules(scoring, used):
        check(logits, rule)


@pytest.mark.parametrize("used", [1, 6])
def test_a_bias_takes_part_in_the_choice_and_not_in_the_weights(used: int) -> None:
    logits, bias = make_random_numbers(2, 40, 64), make_random_numbers(3, 64)
    assert (
        route(logits, RoutingRule(used=6))[0] != route(logits, RoutingRule(used=6), bias)[0]
    ).any()
    for scoring in ("softmax", "sigmoid"):
        for rule in rules(scoring, used):  # type: ignore[arg-type]  # both are scorings
            check(logits, rule, bias)


@settings(max_examples=150, deadline=None)
@given(
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    logits=st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    normalised=st.booleans(),
    data=st.data(),
)
def test_of_equal_logits_the_lower_id_goes_first(
    scoring: Scoring, logits: list[int], normalised: bool, data: st.DataObject
) -> None:
    used = data.draw(st.integers(1, len(logits)))
    selected, _ = route(
        np.array([logits], np.float32),
        RoutingRule(used=used, scoring=scoring, normalised=normalised),
    )
    best_first = sorted(range(len(logits)), key=lambda expert: (-logits[expert], expert))
    assert selected[0].tolist() == best_first[:used]


@SCORINGS
def test_logits_far_apart_keep_their_order(scoring: Scoring) -> None:
    logits = np.array([[100, -50, -20, 0, 1e30, -1e30]], np.float32)
    selected, weights = route(logits, RoutingRule(used=4, scoring=scoring))
    assert selected.tolist() == [[4, 0, 3, 2]]
    assert weights[0, 0] == pytest.approx(1)
    assert np.isfinite(weights).all()


@SCORINGS
@pytest.mark.parametrize("bias", [False, True])
@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(
        st.sampled_from([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, 0, -0.0, 1]),
        min_size=1,
        max_size=20,
    ),
    normalised=st.booleans(),
    data=st.data(),
)
def test_logits_that_are_no_numbers_get_experts_that_there_are(
    scoring: Scoring, bias: bool, logits: list[float], normalised: bool, data: st.DataObject
) -> None:
    used = data.draw(st.integers(1, len(logits)))
    selected, _ = route(
        np.array([logits], np.float32),
        RoutingRule(used=used, scoring=scoring, normalised=normalised),
        np.linspace(-1, 1, len(logits), dtype=np.float32) if bias else None,
    )
    assert len(set(selected[0].tolist())) == used
    assert (selected >= 0).all()
    assert (selected < len(logits)).all()


@SCORINGS
def test_what_is_not_a_number_goes_first_and_is_seen_in_the_weights(scoring: Scoring) -> None:
    logits = np.array([[3, 2, np.nan, 1]], np.float32)
    selected, weights = route(logits, RoutingRule(used=2, scoring=scoring, normalised=True))
    assert selected.tolist() == [[2, 0]]
    assert np.isnan(weights).all()


def test_weights_that_come_to_almost_nothing_are_not_blown_up() -> None:
    assert MIN_WEIGHT_SUM == plain_path.SMALLEST_SUM
    logits = np.full((1, 8), -40, np.float32)
    rule = RoutingRule(used=2, scoring="sigmoid", normalised=True)
    check(logits, rule)
    assert route(logits, rule)[1].sum() < 1e-12


def test_more_experts_than_there_are_cannot_be_asked_for() -> None:
    with pytest.raises(AssertionError, match="3 of 2 experts"):
        route(np.zeros((1, 2), np.float32), RoutingRule(used=3))


def skip(selected: Array, weights: Array, hits: Array) -> tuple[Array, Array, Array]:
    ids, shares = selected.copy(), weights.copy()
    skipped = np.full(len(ids), FOREIGN_VALUE, np.float32)
    arguments = drop_experts_arguments(hits=hits, selected=ids, weights=shares, dropped=skipped)
    drop_experts_kernel()(0, len(ids), arguments.ctypes.data)
    return ids, shares, skipped


@pytest.mark.parametrize("case", VECTORS["skip_fallback"])
def test_the_weights_of_those_who_stay_are_those_of_the_vectors(case: dict[str, Any]) -> None:
    weights, hits = (np.array(case[name], np.float32) for name in ("weights", "hits"))
    ids = np.arange(len(weights), dtype=np.int64)
    selected, effective, skipped = skip(ids[None], weights[None], hits)
    np.testing.assert_allclose(effective[0], case["effective"], rtol=1e-6)
    assert selected[0].tolist() == np.where(hits > 0, ids, NO_EXPERT).tolist()
    assert skipped[0] == pytest.approx(weights[hits == 0].sum())


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 9999), tokens=st.integers(1, 5), used=st.integers(1, 8))
def test_the_routed_mass_stays_unless_all_are_missed(seed: int, tokens: int, used: int) -> None:
    random = np.random.default_rng(seed)
    hits = (random.random(12) < 0.5).astype(np.float32)
    selected = make_random_choices(seed, tokens, used, 12)
    weights = random.random((tokens, used), dtype=np.float32)
    ids, effective, skipped = skip(selected, weights, hits)
    stays = hits[selected] > 0
    np.testing.assert_array_equal(ids, np.where(stays, selected, NO_EXPERT))
    assert not effective[~stays].any()
    expected = np.where(stays.any(-1), weights.sum(-1), 0)
    np.testing.assert_allclose(effective.sum(-1), expected, rtol=1e-5)
    np.testing.assert_allclose(skipped, np.where(stays, 0, weights).sum(-1), rtol=1e-5)
    rule = redistribute_weights(weights, hits[selected])
    np.testing.assert_allclose(effective, rule, rtol=1e-6, atol=1e-30)
    whole = stays.all(-1)
    np.testing.assert_array_equal(effective[whole], weights[whole], strict=True)


def test_weights_of_almost_nothing_and_of_nothing_are_shared_out_without_infinities() -> None:
    weights = np.array([[0.9, 1e-44], [0.9, 0.0]], np.float32)
    selected = np.array([[0, 1], [0, 1]], np.int64)
    ids, effective, skipped = skip(selected, weights, np.array([0, 1], np.float32))
    assert ids.tolist() == [[NO_EXPERT, 1], [NO_EXPERT, 1]]
    np.testing.assert_allclose(effective, [[0, 0.9], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(skipped, [0.9, 0.9], rtol=1e-6)


def test_what_asked_for_nobody_before_still_does() -> None:
    selected, weights = np.array([[NO_EXPERT, 0]], np.int64), np.array([[0.25, 0.5]], np.float32)
    ids, effective, _ = skip(selected, weights, np.ones(1, np.float32))
    assert ids.tolist() == [[NO_EXPERT, 0]]
    assert effective.tolist() == [[0, 0.75]]
