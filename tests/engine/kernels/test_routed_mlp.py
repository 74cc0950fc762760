"""A program of routing, sorting and routed products, run by a crew, is a routed MLP."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from expertctl.engine.kernels.packed_format import PACKED_SCHEMES, Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from tests.engine.kernels.reference_gemm import make_random_numbers
from tests.engine.kernels.reference_moe import (
    ExpertBlocks,
    RoutedMlpProgram,
    RouterRule,
    compute_routed_mlp,
    make_random_experts,
)

Array = np.ndarray[Any, Any]
EXPERTS, HIDDEN, WIDE = 11, 150, 72
EVERY = pytest.mark.parametrize("scheme", PACKED_SCHEMES, ids=lambda scheme: scheme.value)
ROUNDING = {
    Scheme.FLOAT32: 1e-6,
    Scheme.FLOAT16: 1e-6,
    Scheme.BFLOAT16: 2.0**-7,
    Scheme.INT8: 2e-2,
    Scheme.INT5: 2e-2,
    Scheme.INT4: 2e-2,
}
"""How far rows may be from the formula with the same weights, as a share of their length."""
RULES = (
    RouterRule(3),
    RouterRule(3, normalised=True),
    RouterRule(1),
    RouterRule(4, scoring="sigmoid", normalised=True, scale=2.5),
    RouterRule(EXPERTS),
)


@pytest.fixture
def crew() -> Iterator[ThreadPool]:
    made = ThreadPool(4)
    yield made
    made.check_integrity()
    made.close()


def experts_of(scheme: Scheme) -> ExpertBlocks:
    return make_random_experts(scheme, EXPERTS, hidden=HIDDEN, intermediate=WIDE)


def router_of(experts: int = EXPERTS) -> Array:
    return make_random_numbers(90, experts, HIDDEN) / np.float32(4)


@EVERY
@pytest.mark.parametrize("tokens", [1, 23])
def test_the_program_is_the_formula_within_the_rounding_of_rows(
    crew: ThreadPool, scheme: Scheme, tokens: int
) -> None:
    experts, router, rows = experts_of(scheme), router_of(), make_random_numbers(91, tokens, HIDDEN)
    rule = RouterRule(3, normalised=True)
    mlp = RoutedMlpProgram(experts, router, rule, tokens=tokens)
    got, expected = mlp.run(crew, rows), compute_routed_mlp(experts, router, rule, rows)
    away = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert (away < ROUNDING[scheme]).all()
    assert mlp.absent[0] == 0


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_in_float32_it_is_the_formula_in_float64(crew: ThreadPool, rule: RouterRule) -> None:
    experts, router = experts_of(Scheme.FLOAT32), router_of()
    rows = make_random_numbers(92, 23, HIDDEN)
    got = RoutedMlpProgram(experts, router, rule, tokens=23).run(crew, rows)
    expected = compute_routed_mlp(experts, router, rule, rows)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_experts_that_are_not_at_hand_are_left_out(crew: ThreadPool) -> None:
    experts, router = experts_of(Scheme.FLOAT32), router_of()
    hits = np.array([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], np.float32)
    experts.places[hits == 0] = 0
    rule, rows = RouterRule(3, hits=hits), make_random_numbers(93, 40, HIDDEN)
    mlp = RoutedMlpProgram(experts, router, rule, tokens=40)
    got, expected = mlp.run(crew, rows), compute_routed_mlp(experts, router, rule, rows)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert mlp.absent[0] == 0
    assert (mlp.selected < 0).any()
    assert mlp.order.offsets[-1] < 40 * 3


def test_one_expert_that_all_use_is_a_dense_mlp(crew: ThreadPool) -> None:
    experts = make_random_experts(Scheme.FLOAT32, 1, hidden=HIDDEN, intermediate=WIDE)
    rule, rows = RouterRule(1), make_random_numbers(94, 5, HIDDEN)
    mlp = RoutedMlpProgram(experts, router_of(1), rule, tokens=5)
    expected = compute_routed_mlp(experts, router_of(1), rule, rows)
    np.testing.assert_allclose(mlp.run(crew, rows), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(mlp.weights, np.ones((5, 1), np.float32))


@EVERY
def test_bits_do_not_depend_on_workers_or_on_runs(crew: ThreadPool, scheme: Scheme) -> None:
    rows = make_random_numbers(95, 23, HIDDEN)
    mlp = RoutedMlpProgram(experts_of(scheme), router_of(), RouterRule(3), tokens=23)
    alone = mlp.run(crew, rows, workers=1)
    for run in range(15):
        together = mlp.run(crew, rows, workers=2 + run % 3)
        np.testing.assert_array_equal(together, alone, strict=True)


@EVERY
def test_bits_of_a_token_do_not_depend_on_the_others(crew: ThreadPool, scheme: Scheme) -> None:
    rows = make_random_numbers(96, 23, HIDDEN)
    mlp = RoutedMlpProgram(experts_of(scheme), router_of(), RouterRule(3), tokens=23)
    together = mlp.run(crew, rows)
    for first, last in ((0, 1), (5, 12), (22, 23), (0, 23)):
        np.testing.assert_array_equal(
            mlp.run(crew, rows[first:last]), together[first:last], strict=True
        )
    assert mlp.run(crew, rows[:0]).shape == (0, HIDDEN)


@EVERY
def test_where_experts_lie_changes_no_bit(crew: ThreadPool, scheme: Scheme) -> None:
    experts, rows = experts_of(scheme), make_random_numbers(97, 9, HIDDEN)
    mlp = RoutedMlpProgram(experts, router_of(), RouterRule(3), tokens=9)
    before = mlp.run(crew, rows)
    moved = [block.copy() for block in experts.blocks]
    experts.places[...] = [block.ctypes.data for block in moved]
    for block in experts.blocks:
        block[...] = 0xFF
    np.testing.assert_array_equal(mlp.run(crew, rows), before, strict=True)


def test_an_expert_that_is_asked_for_and_not_there_is_named(crew: ThreadPool) -> None:
    experts, rows = experts_of(Scheme.INT8), make_random_numbers(98, 23, HIDDEN)
    experts.places[4] = 0
    mlp = RoutedMlpProgram(experts, router_of(), RouterRule(3), tokens=23)
    assert np.isfinite(mlp.run(crew, rows)).all()
    assert mlp.absent[0] == 1 + 4


def test_a_token_that_is_no_number_harms_no_other(crew: ThreadPool) -> None:
    rows = make_random_numbers(99, 12, HIDDEN)
    mlp = RoutedMlpProgram(experts_of(Scheme.FLOAT32), router_of(), RouterRule(3), tokens=12)
    good = mlp.run(crew, rows)
    rows[7, 3] = np.nan
    got, others = mlp.run(crew, rows), np.arange(12) != 7
    assert np.isnan(got[7]).all()
    np.testing.assert_allclose(got[others], good[others], rtol=1e-5, atol=1e-6)
