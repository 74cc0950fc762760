"""Routed products have the bits of plain ones, wherever experts lie and whoever else is there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.arrays import aligned_zeros
from expertctl.engine.kernels.moe_layer import (
    NO_POSITION,
    MoePermutation,
    moe_gemm_arguments,
    moe_gemm_items,
    moe_gemm_kernel,
)
from expertctl.engine.kernels.packed_format import LANES, PACKED_SCHEMES, Scheme
from expertctl.engine.kernels.packed_matrix import ExpertMatrix, PackedMatrix
from expertctl.engine.kernels.program import ProgramBuilder
from expertctl.engine.kernels.thread_pool import ThreadPool
from tests.engine.kernels.reference_gemm import (
    make_random_numbers,
    multiply_exactly,
    quantise_rows,
    run_gemm,
)
from tests.engine.kernels.reference_moe import (
    FOREIGN_VALUE,
    ExpertBlocks,
    gather_rows,
    make_random_choices,
    make_random_experts,
    run_routed_gemm,
    sort_choices,
)

Array = np.ndarray[Any, Any]
DOTS = (Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4)
"""Schemes whose instruction not every processor has."""
EVERY = pytest.mark.parametrize(
    ("scheme", "plain"),
    [*((scheme, False) for scheme in PACKED_SCHEMES), *((scheme, True) for scheme in DOTS)],
    ids=lambda value: value.value if isinstance(value, Scheme) else "plainly" * value,
)
FITTED = (Scheme.INT5, Scheme.INT4)
"""Schemes that cannot store what is no number."""
SCHEMES = pytest.mark.parametrize("scheme", PACKED_SCHEMES, ids=lambda scheme: scheme.value)


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens and the experts that they ask for."""

    experts: ExpertBlocks
    tokens: Array
    selected: Array

    @property
    def part(self) -> ExpertMatrix:
        return self.experts.shape.gate_up_matrix

    @property
    def used(self) -> int:
        return self.selected.shape[1]

    @property
    def order(self) -> MoePermutation:
        return sort_choices(self.selected, len(self.experts.blocks))

    def matrix(self, expert: int) -> PackedMatrix:
        return self.experts.gate_up(expert)

    def multiply(
        self, *, plain: bool = False, active: int | None = None, cuts: Sequence[int] = ()
    ) -> Array:
        """The product of each choice, [tokens * used, rows of the part]; none: no number."""
        order = self.order
        rows = gather_rows(
            order,
            quantise_rows(self.tokens, self.part.scheme),
            scheme=self.part.scheme,
            used=self.used,
        )
        product = run_routed_gemm(
            self.part, self.experts.places, order, rows, plain=plain, active=active, cuts=cuts
        )
        assert product.absent == 0
        assert (product.rows[int(order.offsets[-1]) :] == FOREIGN_VALUE).all()
        found = product.rows[order.inverse, : self.part.rows]
        found[order.inverse == NO_POSITION] = np.nan
        return found

    def one_by_one(self, *, plain: bool = False) -> Array:
        """The same by the product of each token alone with each matrix."""
        found = np.full((self.selected.size, self.part.rows), np.nan, np.float32)
        for src, expert in enumerate(self.selected.reshape(-1)):
            if expert != NO_POSITION:
                token = self.tokens[src // self.used][None]
                found[src] = run_gemm(self.matrix(expert), token, plain=plain)
        return found


def routing(
    scheme: Scheme,
    *,
    experts: int = 6,
    used: int = 2,
    tokens: int = 11,
    hidden: int = 140,
    intermediate: int = 41,
    seed: int = 0,
) -> RoutedTokens:
    made = make_random_experts(scheme, experts, hidden=hidden, intermediate=intermediate, seed=seed)
    rows = make_random_numbers(seed + 50, tokens, hidden)
    return RoutedTokens(made, rows, make_random_choices(seed, tokens, used, experts))


@EVERY
def test_a_routed_row_has_the_bits_of_a_product_with_its_expert(
    scheme: Scheme, plain: bool
) -> None:
    some = routing(scheme)
    some.selected[3, 1] = some.selected[7, :] = NO_POSITION
    expected = some.one_by_one(plain=plain)
    np.testing.assert_array_equal(some.multiply(plain=plain), expected, strict=True)


@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from(PACKED_SCHEMES),
    experts=st.integers(1, 9),
    tokens=st.integers(0, 20),
    hidden=st.integers(1, 300),
    intermediate=st.integers(1, 90),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_routed_rows_of_any_shape_have_the_bits_of_products(
    scheme: Scheme,
    experts: int,
    tokens: int,
    hidden: int,
    intermediate: int,
    seed: int,
    data: st.DataObject,
) -> None:
    some = routing(
        scheme,
        experts=experts,
        used=data.draw(st.integers(1, experts)),
        tokens=tokens,
        hidden=hidden,
        intermediate=intermediate,
        seed=seed,
    )
    np.testing.assert_array_equal(some.multiply(), some.one_by_one(), strict=True)


@SCHEMES
def test_a_routed_row_is_the_formula_in_float64(scheme: Scheme) -> None:
    some = routing(scheme, tokens=9)
    got = some.multiply()
    for src, expert in enumerate(some.selected.reshape(-1)):
        expected, reach = multiply_exactly(some.matrix(expert), some.tokens[src // 2][None])
        assert (np.abs(got[src] - expected) <= reach).all()


@SCHEMES
def test_a_row_has_the_same_bits_whoever_else_is_there(scheme: Scheme) -> None:
    some = routing(scheme, tokens=17, experts=4)
    together = some.multiply()
    for count in range(1, len(some.tokens)):
        few = RoutedTokens(some.experts, some.tokens[:count], some.selected[:count].copy())
        np.testing.assert_array_equal(few.multiply(), together[: count * 2], strict=True)


@SCHEMES
@pytest.mark.parametrize("active", [1, 2, 5, 40])
def test_items_are_shares_of_what_there_is_however_many_and_in_any_order(
    scheme: Scheme, active: int
) -> None:
    some = routing(scheme, intermediate=150)
    items = moe_gemm_items(some.part, active=active)
    cuts = sorted({0, 1, items // 3, items - 1})
    np.testing.assert_array_equal(
        some.multiply(active=active, cuts=cuts), some.multiply(), strict=True
    )


@pytest.mark.parametrize("experts", [1, 3])
def test_one_expert_of_all_and_all_of_them_may_be_used(experts: int) -> None:
    for used in {1, experts}:
        some = routing(Scheme.FLOAT32, experts=experts, used=used, tokens=5)
        np.testing.assert_array_equal(some.multiply(), some.one_by_one(), strict=True)


def test_where_nobody_asks_for_anybody_nothing_is_written() -> None:
    some = routing(Scheme.INT8)
    some.selected[...] = NO_POSITION
    assert np.isnan(some.multiply()).all()


@SCHEMES
def test_an_expert_that_nobody_asks_for_is_not_read_wherever_its_place_is(scheme: Scheme) -> None:
    some = routing(scheme, experts=5)
    some.selected[some.selected == 3] = NO_POSITION
    expected = some.one_by_one()
    some.experts.places[3] = 8  # reading there would end the process
    np.testing.assert_array_equal(some.multiply(), expected, strict=True)


@SCHEMES
def test_an_expert_without_a_place_makes_zeros_and_is_named(scheme: Scheme) -> None:
    some = routing(scheme, experts=5)
    expected = some.one_by_one()
    order, ready = some.order, quantise_rows(some.tokens, scheme)
    some.experts.places[3] = 0
    rows = gather_rows(order, ready, scheme=scheme, used=2)
    product = run_routed_gemm(some.part, some.experts.places, order, rows)
    assert product.absent == 1 + 3
    missed = some.selected.reshape(-1) == 3
    assert missed.any()
    expected[missed] = 0
    got = product.rows[order.inverse, : some.part.rows]
    np.testing.assert_array_equal(got, expected, strict=True)


@pytest.mark.parametrize(
    "scheme", [each for each in PACKED_SCHEMES if each not in FITTED], ids=lambda one: one.value
)
def test_an_expert_whose_weights_are_no_numbers_spoils_its_own_rows(scheme: Scheme) -> None:
    some = routing(scheme, experts=4)
    expected, spoilt = some.multiply(), some.selected.reshape(-1) == 2
    some.experts.gate_up(2).data[...] = 0xFF
    some.experts.gate_up(2).scales[...] = 0x7FC0  # NaN in bfloat16
    got = some.multiply()
    assert np.isnan(got[spoilt]).all()
    np.testing.assert_array_equal(got[~spoilt], expected[~spoilt], strict=True)


@SCHEMES
def test_a_thread_pool_makes_the_same_bits_as_one_worker_every_time(scheme: Scheme) -> None:
    some = routing(scheme, experts=12, used=4, tokens=40, intermediate=200)
    order = some.order
    rows = gather_rows(order, quantise_rows(some.tokens, scheme), scheme=scheme, used=4)
    out = aligned_zeros((160, some.part.blocks * LANES), np.float32)
    absent = np.zeros(1, np.int64)
    items = np.array([moe_gemm_items(some.part, active=12)], np.int64)
    places, builder = some.experts.places, ProgramBuilder()
    product = moe_gemm_arguments(
        part=some.part,
        block_addresses=places,
        order=order,
        rows=rows,
        out=out,
        items=items,
        absent=absent,
    )
    builder.add(moe_gemm_kernel(scheme), product, items)
    program = builder.build()
    expected = some.multiply()
    crew = ThreadPool(4)
    try:
        for _ in range(20):
            out[...] = np.nan
            crew.run(program)
            got = out[order.inverse, : some.part.rows]
            np.testing.assert_array_equal(got, expected, strict=True)
    finally:
        crew.close()
