"""What is left of weights when experts are skipped: numbers, and what always holds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe.counters import ExpertActivity
from expertctl.engine.moe.routed_experts import (
    compute_skipped_share,
    find_tokens_over_cap,
    redistribute_weights,
    sum_skips,
)

VECTORS = json.loads(
    (Path(__file__).parents[2] / "vectors" / "moe_cache.json").read_text(encoding="utf-8")
)["skip_fallback"]
positive = st.floats(2.0**-20, 1, width=32)


@st.composite
def tokens(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Weights of some tokens, and which of them are hit."""
    count, used = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    size = {"min_size": count * used, "max_size": count * used}
    weights = np.array(draw(st.lists(positive, **size)), np.float32)
    hits = np.array(draw(st.lists(st.booleans(), **size)))
    return weights.reshape(count, used), hits.reshape(count, used)


@pytest.mark.parametrize("case", VECTORS, ids=str)
def test_effective_weights_are_those_of_the_vectors(case: dict[str, Any]) -> None:
    weights = np.array([case["weights"]], np.float32)
    found = redistribute_weights(weights, np.array([case["hits"]], np.float32))
    assert found.dtype == np.float32
    assert found[0].tolist() == pytest.approx(case["effective"], abs=1e-6)


@given(tokens())
def test_the_mass_that_the_router_gave_is_kept_unless_all_is_missed(
    case: tuple[np.ndarray, np.ndarray],
) -> None:
    weights, hits = case
    found = redistribute_weights(weights, hits)
    mass = np.where(hits.any(-1), weights.sum(-1, dtype=np.float64), 0.0)
    np.testing.assert_allclose(found.sum(-1, dtype=np.float64), mass, rtol=1e-6)
    assert not found[~hits].any()


@given(tokens())
def test_what_is_left_keeps_its_order_and_proportions(case: tuple[np.ndarray, np.ndarray]) -> None:
    weights, hits = case
    for before, after, hit in zip(weights, redistribute_weights(weights, hits), hits, strict=True):
        kept = np.argsort(before[hit], kind="stable")
        assert (np.diff(after[hit][kept]) >= 0).all()
        assert (after[hit] >= before[hit] * (1 - 1e-6)).all()
        if hit.any():
            ratios = after[hit].astype(np.float64) / before[hit]
            np.testing.assert_allclose(ratios, ratios[0], rtol=1e-6)


@given(tokens())
def test_where_all_is_hit_the_weights_stay_to_the_bit(case: tuple[np.ndarray, np.ndarray]) -> None:
    weights, _ = case
    found = redistribute_weights(weights, np.ones_like(weights))
    assert found.tobytes() == weights.tobytes()


def test_a_hit_of_hardly_any_weight_takes_over_the_mass_of_the_rest() -> None:
    weights = np.array([[1.0, 1e-40]], np.float32)  # in float32 1 / 1e-40 is infinite
    assert redistribute_weights(weights, np.array([[0, 1]])).tolist() == [[0.0, 1.0]]


def test_a_hit_without_weight_takes_over_nothing() -> None:
    weights = np.array([[0.7, 0.0]], np.float32)
    assert redistribute_weights(weights, np.array([[0, 1]])).tolist() == [[0.0, 0.0]]
    assert compute_skipped_share(weights, np.array([[0, 1]])).tolist() == [1.0]
    assert compute_skipped_share(np.zeros_like(weights), np.array([[0, 1]])).tolist() == [0.0]


def test_the_share_that_is_missed_is_of_the_mass_of_its_token() -> None:
    weights = np.array([[0.6, 0.4], [0.3, 0.1], [0.5, 0.25], [0.2, 0.2]], np.float32)
    hits = np.array([[1, 0], [1, 0], [1, 1], [0, 0]])
    assert compute_skipped_share(weights, hits).tolist() == pytest.approx(
        [0.4, 0.25, 0.0, 1.0], abs=1e-7
    )


@pytest.mark.parametrize(
    ("cap", "full"),
    [
        (0.0, [True, True, False, True]),
        (0.25, [True, False, False, True]),
        (0.375, [True, False, False, True]),
        (0.5, [False, False, False, True]),
        (0.99, [False, False, False, True]),
        (1.0, [False, False, False, False]),
    ],
)
def test_tokens_above_the_cap_keep_all_their_weights(cap: float, full: list[bool]) -> None:
    weights = np.array([[0.5, 0.5], [0.75, 0.25], [0.5, 0.25], [0.25, 0.25]], np.float32)
    hits = np.array([[1, 0], [1, 0], [1, 1], [0, 0]])
    assert find_tokens_over_cap(weights, hits, cap).tolist() == full


@given(tokens(), st.floats(0, 1))
def test_no_token_that_is_skipped_loses_more_than_the_cap(
    case: tuple[np.ndarray, np.ndarray], cap: float
) -> None:
    weights, hits = case
    full = find_tokens_over_cap(weights, hits, cap)
    exact = weights.astype(np.float64)
    lost = np.where(hits, 0, exact).sum(-1) / exact.sum(-1)
    assert (lost[~full] <= cap + 1e-12).all()
    assert (lost[full] > cap - 1e-12).all()


def test_a_token_whose_weights_are_no_numbers_is_never_skipped() -> None:
    weights = np.array([[np.nan, np.nan]], np.float32)
    assert find_tokens_over_cap(weights, np.array([[1, 0]]), 1.0).tolist() == [True]


def test_totals_count_each_expert_of_a_layer_once_for_a_window() -> None:
    requests = np.array([[0, 2, 1, 2], [5, 0, 0, 1]])
    hits = np.array([[1, 0, 1, 1], [0, 0, 1, 1]], np.float32)
    mass = np.array([[1.0, 0.8], [0.2, 1.0]], np.float32)
    skipped = np.array([[0.25, 0.4], [0.0, 0.0]], np.float32)
    totals = sum_skips(requests, hits, router_weight=mass, skipped_weight=skipped)
    assert (totals.requests, totals.misses) == (5, 2)
    assert totals.router_weight == pytest.approx(3.0)
    assert totals.skipped_weight == pytest.approx(0.65)


def test_nothing_asked_for_is_nothing_missed() -> None:
    empty, nobody = np.zeros((2, 0)), np.zeros((2, 4), np.int64)
    assert sum_skips(nobody, nobody, router_weight=empty, skipped_weight=empty) == ExpertActivity()
