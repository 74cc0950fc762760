"""Products with packed matrices are the plain formula, in bits that only row and token decide."""

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.errors import NumbaError

from expertctl.engine.arrays import aligned_zeros
from expertctl.engine.kernels.compiled.gemm import gemm_panel
from expertctl.engine.kernels.lora import gemm_arguments, gemm_items, gemm_kernel
from expertctl.engine.kernels.packed_format import GROUP_SIZE, LANES, PACKED_SCHEMES, Scheme
from expertctl.engine.kernels.packed_matrix import pack_matrix
from tests.engine.kernels.reference_gemm import (
    FLOATS,
    INTEGERS,
    make_random_numbers,
    multiply_exactly,
    quantise_rows,
    run_gemm,
)

EVERY = pytest.mark.parametrize("scheme", PACKED_SCHEMES, ids=lambda scheme: scheme.value)
SHAPES = ((1, 1), (16, 2), (17, 3), (64, 128), (80, 129), (150, 300), (65, 1024))


@EVERY
@pytest.mark.parametrize("plain", [False, True], ids=["this processor", "every processor"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_product_is_the_formula_in_float64(
    scheme: Scheme, plain: bool, rows: int, columns: int
) -> None:
    matrix = pack_matrix(make_random_numbers(1, rows, columns), scheme)
    tokens = make_random_numbers(2, 9, columns)
    expected, reach = multiply_exactly(matrix, tokens)
    assert (np.abs(run_gemm(matrix, tokens, plain=plain) - expected) <= reach).all()


@settings(max_examples=150, deadline=None)
@given(
    scheme=st.sampled_from(PACKED_SCHEMES),
    plain=st.booleans(),
    rows=st.integers(1, 150),
    columns=st.integers(1, 400),
    tokens=st.integers(0, 14),
    seed=st.integers(0, 99),
)
def test_a_product_of_any_shape_is_the_formula(
    scheme: Scheme, plain: bool, rows: int, columns: int, tokens: int, seed: int
) -> None:
    matrix = pack_matrix(make_random_numbers(seed, rows, columns), scheme)
    some = make_random_numbers(seed + 100, tokens, columns)
    expected, reach = multiply_exactly(matrix, some)
    assert (np.abs(run_gemm(matrix, some, plain=plain) - expected) <= reach).all()


@pytest.mark.parametrize("scheme", [*FLOATS, *INTEGERS], ids=lambda scheme: scheme.value)
@pytest.mark.parametrize("columns", [5, 128, 700])
def test_the_instruction_for_bytes_and_its_substitute_have_the_same_bits(
    scheme: Scheme, columns: int
) -> None:
    matrix = pack_matrix(make_random_numbers(3, 70, columns), scheme)
    tokens = make_random_numbers(4, 7, columns)
    np.testing.assert_array_equal(
        run_gemm(matrix, tokens), run_gemm(matrix, tokens, plain=True), strict=True
    )


@pytest.mark.parametrize("scheme", INTEGERS, ids=lambda scheme: scheme.value)
@pytest.mark.parametrize("plain", [False, True], ids=["this processor", "every processor"])
def test_sums_of_the_largest_integers_do_not_overflow(scheme: Scheme, plain: bool) -> None:
    signs = np.where(make_random_numbers(5, 32, 4 * GROUP_SIZE) < 0, np.float32(-1), np.float32(1))
    matrix = pack_matrix(signs, scheme)
    tokens = np.concatenate((signs[:3], np.ones_like(signs[:1])))
    expected, reach = multiply_exactly(matrix, tokens)
    together = run_gemm(matrix, tokens, plain=plain)
    assert (np.abs(together - expected) <= reach).all()
    alone = np.concatenate([run_gemm(matrix, each[None], plain=plain) for each in tokens])
    np.testing.assert_array_equal(alone, together, strict=True)


@EVERY
@pytest.mark.parametrize("plain", [False, True], ids=["this processor", "every processor"])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(scheme: Scheme, plain: bool) -> None:
    matrix = pack_matrix(make_random_numbers(6, 100, 333), scheme)
    tokens = make_random_numbers(7, 40, 333)
    alone = np.concatenate([run_gemm(matrix, each[None], plain=plain) for each in tokens])
    for count in range(1, len(tokens) + 1):
        batch = run_gemm(matrix, tokens[-count:], plain=plain)
        np.testing.assert_array_equal(batch, alone[-count:], strict=True)


@pytest.mark.parametrize("columns", [511, 512, 513, 546, 1100])
def test_a_token_has_the_same_bits_alone_however_many_columns_are_widened_at_once(
    columns: int,
) -> None:
    matrix = pack_matrix(make_random_numbers(23, 80, columns), Scheme.BFLOAT16)
    tokens, onto = make_random_numbers(24, 9, columns), make_random_numbers(25, 9, 80)
    alone = np.concatenate([run_gemm(matrix, each[None], plain=True) for each in tokens])
    np.testing.assert_array_equal(run_gemm(matrix, tokens, plain=True), alone, strict=True)
    added = run_gemm(matrix, tokens, plain=True, onto=onto)
    np.testing.assert_array_equal(added, onto + alone, strict=True)


@EVERY
def test_a_row_has_the_same_bits_in_four_blocks_and_in_one(scheme: Scheme) -> None:
    matrix = pack_matrix(make_random_numbers(8, 7 * LANES, 257), scheme)
    tokens = make_random_numbers(9, 5, 257)
    whole = run_gemm(matrix, tokens)
    for first in range(0, matrix.rows, LANES):
        part = run_gemm(matrix.row_slice(first, LANES), tokens)
        np.testing.assert_array_equal(part, whole[:, first : first + LANES], strict=True)


@EVERY
def test_items_may_be_done_in_any_order_and_portion(scheme: Scheme) -> None:
    matrix = pack_matrix(make_random_numbers(10, 300, 140), scheme)
    tokens = make_random_numbers(11, 3, 140)
    out = aligned_zeros((3, matrix.blocks * LANES), np.float32)
    ready, count = quantise_rows(tokens, scheme), np.array([3], np.int64)
    arguments = gemm_arguments(matrix=matrix, rows=ready, out=out, tokens=count)
    assert gemm_items(matrix) == 5
    for first, last in ((3, 5), (0, 1), (2, 3), (1, 2), (4, 4)):
        gemm_kernel(scheme)(first, last, arguments.ctypes.data)
    np.testing.assert_array_equal(out[:, :300], run_gemm(matrix, tokens), strict=True)


@EVERY
def test_a_product_is_added_to_what_is_there_when_asked(scheme: Scheme) -> None:
    matrix = pack_matrix(make_random_numbers(12, 90, 130), scheme)
    tokens, onto = make_random_numbers(13, 8, 130), make_random_numbers(14, 8, 90)
    np.testing.assert_array_equal(
        run_gemm(matrix, tokens, onto=onto), onto + run_gemm(matrix, tokens), strict=True
    )


@EVERY
def test_a_product_takes_only_as_many_tokens_as_there_are_at_that_run(scheme: Scheme) -> None:
    matrix = pack_matrix(make_random_numbers(15, 20, 40), scheme)
    tokens, count = make_random_numbers(16, 4, 40), np.array([2], np.int64)
    out = aligned_zeros((4, matrix.blocks * LANES), np.float32)
    ready = quantise_rows(tokens, scheme)
    arguments = gemm_arguments(matrix=matrix, rows=ready, out=out, tokens=count)
    gemm_kernel(scheme)(0, 1, arguments.ctypes.data)
    assert out[:2].any()
    assert not out[2:].any()
    count[0] = 4
    gemm_kernel(scheme)(0, 1, arguments.ctypes.data)
    assert out[2:].any()


@EVERY
def test_out_that_is_wider_than_the_matrix_keeps_what_lies_beside(scheme: Scheme) -> None:
    matrix = pack_matrix(make_random_numbers(17, 33, 50), scheme)
    tokens = make_random_numbers(18, 7, 50)
    out = aligned_zeros((7, 5 * LANES), np.float32)
    out[...] = 7
    ready, count = quantise_rows(tokens, scheme), np.array([7], np.int64)
    arguments = gemm_arguments(matrix=matrix, rows=ready, out=out, tokens=count)
    gemm_kernel(scheme)(0, gemm_items(matrix), arguments.ctypes.data)
    np.testing.assert_array_equal(out[:, :33], run_gemm(matrix, tokens), strict=True)
    assert (out[:, 3 * LANES :] == 7).all()


def test_the_shape_of_a_strip_is_known_when_it_is_compiled() -> None:
    @numba.njit
    def strip_of(code: int) -> None:
        gemm_panel(code, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)

    with pytest.raises(NumbaError, match="the shape of a panel"):
        strip_of(0)


@EVERY
@pytest.mark.parametrize("plain", [False, True], ids=["this processor", "every processor"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_no_number_stays_that_and_harms_no_other(
    scheme: Scheme, plain: bool, bad: float
) -> None:
    matrix = pack_matrix(make_random_numbers(19, 48, 200), scheme)
    tokens = make_random_numbers(20, 7, 200)
    good = run_gemm(matrix, tokens, plain=plain)
    tokens[3, 150] = bad
    got = run_gemm(matrix, tokens, plain=plain)
    assert not np.isfinite(got[3]).any()
    others = np.arange(7) != 3
    np.testing.assert_array_equal(got[others], good[others], strict=True)


@pytest.mark.parametrize(
    "scheme", [*FLOATS, Scheme.BFLOAT16, Scheme.INT8], ids=lambda one: one.value
)
@pytest.mark.parametrize("plain", [False, True], ids=["this processor", "every processor"])
def test_a_weight_that_is_no_number_spoils_its_row_and_no_other(
    scheme: Scheme, plain: bool
) -> None:
    weights, tokens = make_random_numbers(21, 48, 200), make_random_numbers(22, 3, 200)
    good = run_gemm(pack_matrix(weights, scheme), tokens, plain=plain)
    weights[20, 7] = np.nan
    got = run_gemm(pack_matrix(weights, scheme), tokens, plain=plain)
    assert np.isnan(got[:, 20]).all()
    others = np.arange(48) != 20
    np.testing.assert_array_equal(got[:, others], good[:, others], strict=True)
