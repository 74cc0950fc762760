"""What is packed comes back: every float, and integers within half a step."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.arrays import widen
from expertctl.engine.kernels.packed_format import GROUP_SIZE, LANES, Scheme
from expertctl.engine.kernels.packed_matrix import (
    PackedMatrix,
    float32_to_bfloat16,
    pack_matrix,
    unpack_matrix,
)
from expertctl.engine.kernels.quantisation import INT4_SCALE_CANDIDATES
from tests.engine.kernels.reference_gemm import INTEGERS, Array, make_random_numbers

TORCH = {
    Scheme.FLOAT32: torch.float32,
    Scheme.FLOAT16: torch.float16,
    Scheme.BFLOAT16: torch.bfloat16,
}
STEPS = {Scheme.INT8: 127, Scheme.INT4: 7}
"""Integers that either scheme holds."""
EVERY = pytest.mark.parametrize("scheme", Scheme, ids=lambda scheme: scheme.value)
FLOATING = pytest.mark.parametrize("scheme", TORCH, ids=lambda scheme: scheme.value)
shapes = st.tuples(st.integers(1, 100), st.integers(1, 300))


def as_torch_keeps(numbers: Array, scheme: Scheme) -> Array:
    return torch.from_numpy(numbers).to(TORCH[scheme]).float().numpy()


def steps(matrix: PackedMatrix) -> Array:
    """What a step of each row and group is worth, [rows, groups]."""
    return matrix.scales.transpose(0, 2, 1).reshape(matrix.blocks * LANES, -1)[: matrix.rows]


@settings(max_examples=60, deadline=None)
@given(shape=shapes, scheme=st.sampled_from(tuple(TORCH)), seed=st.integers(0, 99))
def test_floats_come_back_as_torch_rounds_them(
    shape: tuple[int, int], scheme: Scheme, seed: int
) -> None:
    numbers = make_random_numbers(seed, *shape)
    np.testing.assert_array_equal(
        unpack_matrix(pack_matrix(numbers, scheme)), as_torch_keeps(numbers, scheme), strict=True
    )


@settings(max_examples=60, deadline=None)
@given(shape=shapes, seed=st.integers(0, 99))
def test_int8_comes_back_within_half_a_step_of_its_group(shape: tuple[int, int], seed: int) -> None:
    numbers = make_random_numbers(seed, *shape)
    matrix = pack_matrix(numbers, Scheme.INT8)
    error = np.abs(unpack_matrix(matrix) - numbers)
    for group in range(Scheme.INT8.layout.count_groups(shape[1])):
        part = slice(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
        step = steps(matrix)[:, group]
        np.testing.assert_allclose(step, np.abs(numbers[:, part]).max(axis=1) / 127, rtol=1e-6)
        assert (error[:, part] <= 0.50001 * step[:, None]).all()


def int4_by_the_formula(numbers: Array) -> Array:
    """The least sum of squared errors of each row of one group, over all stretches."""
    wide = numbers.astype(np.float64)
    place = np.abs(wide).argmax(axis=1)[:, None]
    largest = np.take_along_axis(wide, place, axis=1)
    errors = []
    for stretch in INT4_SCALE_CANDIDATES:
        found = np.clip(np.rint(wide / largest * -stretch), -8, 7)
        scale = (wide * found).sum(axis=1) / (found * found).sum(axis=1)
        errors.append(((wide - found * scale[:, None]) ** 2).sum(axis=1))
    return np.min(errors, axis=0)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, seed=st.integers(0, 99), tails=st.booleans())
def test_int4_has_the_least_error_that_any_stretch_gives(
    shape: tuple[int, int], seed: int, tails: bool
) -> None:
    numbers = make_random_numbers(seed, *shape)
    numbers = numbers**3 if tails else numbers
    error = (unpack_matrix(pack_matrix(numbers, Scheme.INT4)).astype(np.float64) - numbers) ** 2
    for begin in range(0, shape[1], GROUP_SIZE):
        part = slice(begin, begin + GROUP_SIZE)
        least = int4_by_the_formula(numbers[:, part])
        slack = 1e-9 * (numbers[:, part].astype(np.float64) ** 2).sum(axis=1)
        np.testing.assert_array_less(error[:, part].sum(axis=1), 1.001 * least + slack)


def test_int4_is_a_sixth_nearer_than_with_the_largest_at_seven() -> None:
    numbers = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
    groups = numbers.reshape(512, -1, GROUP_SIZE)
    step = np.abs(groups).max(axis=2, keepdims=True) / 7
    plain = np.sqrt(np.mean((np.rint(groups / step) * step - groups) ** 2))
    ours = np.sqrt(np.mean((unpack_matrix(pack_matrix(numbers, Scheme.INT4)) - numbers) ** 2))
    assert ours < plain * 5 / 6


@pytest.mark.parametrize("power", [-90, -40, 40, 120])
def test_int4_knows_small_and_large_numbers(power: int) -> None:
    numbers, size = make_random_numbers(12, 20, 300), np.float32(2.0**power)
    expected = unpack_matrix(pack_matrix(numbers, Scheme.INT4)) * size
    np.testing.assert_array_equal(unpack_matrix(pack_matrix(numbers * size, Scheme.INT4)), expected)


def test_every_step_of_int4_is_used() -> None:
    numbers = np.resize(np.arange(-8, 8), (3, 2 * GROUP_SIZE)).astype(np.float32)
    for sign in (1, -1):
        np.testing.assert_allclose(
            unpack_matrix(pack_matrix(sign * numbers, Scheme.INT4)), sign * numbers
        )


@EVERY
def test_what_a_scheme_can_hold_comes_back_exactly(scheme: Scheme) -> None:
    numbers = np.random.default_rng(0).integers(-7, 8, (40, 2 * GROUP_SIZE + 5)).astype(np.float32)
    numbers[:, ::GROUP_SIZE] = STEPS.get(scheme, 7)
    np.testing.assert_allclose(unpack_matrix(pack_matrix(numbers, scheme)), numbers, rtol=2e-7)


@EVERY
def test_a_packed_matrix_is_packed_to_itself(scheme: Scheme) -> None:
    once = pack_matrix(make_random_numbers(1, 50, 200), scheme)
    twice = pack_matrix(unpack_matrix(once), scheme)
    if scheme is not Scheme.INT4:  # where the largest is there with either sign, all signs may turn
        np.testing.assert_array_equal(once.data, twice.data)
    np.testing.assert_allclose(np.abs(once.scales), np.abs(twice.scales), rtol=3e-7)
    np.testing.assert_allclose(unpack_matrix(once), unpack_matrix(twice), rtol=3e-7)


@EVERY
def test_every_width_of_float_is_taken(scheme: Scheme) -> None:
    halves = make_random_numbers(2, 45, 131).astype(np.float16)
    brains = float32_to_bfloat16(make_random_numbers(3, 45, 131))
    for given_, wide in (
        (halves, halves.astype(np.float32)),
        (brains, widen(brains)),
    ):
        got, expected = pack_matrix(given_, scheme), pack_matrix(wide, scheme)
        np.testing.assert_array_equal(got.data, expected.data)
        np.testing.assert_array_equal(got.scales, expected.scales)


@EVERY
def test_rows_need_not_lie_together(scheme: Scheme) -> None:
    numbers = make_random_numbers(4, 66, 260)
    got, expected = (
        pack_matrix(numbers[::2, ::2], scheme),
        pack_matrix(numbers[::2, ::2].copy(), scheme),
    )
    np.testing.assert_array_equal(got.data, expected.data)
    np.testing.assert_array_equal(
        pack_matrix(numbers.T, scheme).data, pack_matrix(numbers.T.copy(), scheme).data
    )


@EVERY
def test_a_matrix_of_many_portions_is_packed_like_its_parts(scheme: Scheme) -> None:
    numbers = make_random_numbers(5, 1000, 520)
    whole = pack_matrix(numbers, scheme)
    for first, rows in ((0, 16), (240, 32), (496, 400), (992, 8)):
        part, alone = (
            whole.row_slice(first, rows),
            pack_matrix(numbers[first : first + rows], scheme),
        )
        np.testing.assert_array_equal(part.data, alone.data)
        np.testing.assert_array_equal(part.scales, alone.scales)
        np.testing.assert_array_equal(unpack_matrix(part), unpack_matrix(alone), strict=True)


@EVERY
def test_a_part_is_in_the_memory_of_the_whole(scheme: Scheme) -> None:
    whole = pack_matrix(make_random_numbers(6, 64, 140), scheme)
    part = whole.row_slice(16, 20)
    assert np.shares_memory(part.data, whole.data)
    assert (part.rows, part.blocks, part.columns) == (20, 2, 140)
    with pytest.raises(AssertionError, match="row 8 does not begin a block"):
        whole.row_slice(8, 16)


def test_bytes_of_a_packed_matrix_are_those_of_its_numbers_and_scales() -> None:
    numbers = make_random_numbers(7, 1024, 1024)
    sizes = {scheme: pack_matrix(numbers, scheme).nbytes for scheme in Scheme}
    weights, scales = 1 << 20, 1024 * 8 * 4
    assert sizes == {
        Scheme.FLOAT32: 4 * weights,
        Scheme.FLOAT16: 2 * weights,
        Scheme.BFLOAT16: 2 * weights,
        Scheme.INT8: weights + scales,
        Scheme.INT4: weights // 2 + scales,
    }


@EVERY
def test_vectors_begin_where_a_processor_reads_them_best(scheme: Scheme) -> None:
    matrix = pack_matrix(make_random_numbers(8, 5, 5), scheme)
    assert matrix.data.ctypes.data % 64 == 0
    assert matrix.scales.ctypes.data % 64 == 0 or matrix.scales.size == 0


@EVERY
def test_packing_takes_a_few_megabytes_beside_the_result(scheme: Scheme) -> None:
    numbers = make_random_numbers(9, 4096, 1024)
    pack_matrix(numbers[:16], scheme)
    tracemalloc.start()
    matrix = pack_matrix(numbers, scheme)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < matrix.nbytes + (6 << 20)


@FLOATING
def test_infinities_and_what_is_no_number_stay_in_floats(scheme: Scheme) -> None:
    numbers = np.array([[np.inf, -np.inf, np.nan, 0.0, -0.0]], np.float32)
    got = unpack_matrix(pack_matrix(numbers, scheme))
    np.testing.assert_array_equal(got, numbers)
    np.testing.assert_array_equal(np.signbit(got[0, 3:]), [False, True])


def test_float16_ends_in_infinity() -> None:
    got = unpack_matrix(pack_matrix(np.array([[65504.0, 1e6, -1e6]], np.float32), Scheme.FLOAT16))
    np.testing.assert_array_equal(got, np.array([[65504.0, np.inf, -np.inf]], np.float32))


@pytest.mark.parametrize("scheme", INTEGERS, ids=lambda scheme: scheme.value)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_group_with_no_number_in_it_stands_for_none(scheme: Scheme, bad: float) -> None:
    numbers = make_random_numbers(10, 20, 300)
    numbers[3, 130] = bad
    spoilt = np.zeros((20, 300), bool)
    spoilt[3, GROUP_SIZE : 2 * GROUP_SIZE] = True
    np.testing.assert_array_equal(np.isnan(unpack_matrix(pack_matrix(numbers, scheme))), spoilt)


@pytest.mark.parametrize("scheme", INTEGERS, ids=lambda scheme: scheme.value)
def test_a_group_of_zeros_is_zeros(scheme: Scheme) -> None:
    assert not unpack_matrix(pack_matrix(np.zeros((3, 200), np.float32), scheme)).any()


def test_the_layout_of_int4_is_the_one_that_is_written_down() -> None:
    row = np.array([[7, -8, 1, 2, 3, 4, -1, -2]], np.float32)
    first = pack_matrix(row, Scheme.INT4).data.reshape(LANES, 4)[0]
    low, high = (7, -8, 1, 2), (3, 4, -1, -2)
    assert first.tolist() == [(a + 8) | (b + 8) << 4 for a, b in zip(low, high, strict=True)]


def test_the_layout_of_int8_is_the_one_that_is_written_down() -> None:
    row = np.array([[127, -127, 1, -2, 5]], np.float32)
    vectors = pack_matrix(row, Scheme.INT8).data.reshape(2, LANES, 4)
    assert vectors[:, 0].tolist() == [[255, 1, 129, 126], [133, 128, 128, 128]]
    assert (vectors[:, 1:] == 128).all()


def test_the_layout_of_bfloat16_is_the_one_that_is_written_down() -> None:
    columns = np.arange(1, 4, dtype=np.float32) * np.ones((17, 1), np.float32)
    numbers = pack_matrix(columns, Scheme.BFLOAT16).data.view(np.uint16).reshape(2, 2, LANES, 2)
    one, two, three = 0x3F80, 0x4000, 0x4040
    assert numbers[0, :, 3].tolist() == [[one, two], [three, 0]]
    assert numbers[1, :, 0].tolist() == [[one, two], [three, 0]]
    assert not numbers[1, :, 1:].any()
