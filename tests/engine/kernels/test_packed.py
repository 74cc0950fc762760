"""What is packed comes back: every float, and integers within half a step."""

import tracemalloc

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.arrays import widen
from expertctl.engine.kernels.packed_format import GROUP_SIZE, LANES, PACKED_SCHEMES, Scheme
from expertctl.engine.kernels.packed_matrix import (
    PackedMatrix,
    allocate_matrix,
    float32_to_bfloat16,
    pack_matrix,
    pack_rows,
    unpack_matrix,
)
from expertctl.engine.kernels.quantisation import (
    INT8_SCALES,
    RANGE_SHRINKAGE,
    RANGE_STEPS,
    REFINEMENTS,
    decode_scales,
)
from tests.engine.kernels.reference_gemm import INTEGERS, Array, make_random_numbers

TORCH = {
    Scheme.FLOAT32: torch.float32,
    Scheme.FLOAT16: torch.float16,
    Scheme.BFLOAT16: torch.bfloat16,
}
ENDS = {Scheme.INT8: (-127, 127), Scheme.INT5: (-15, 16), Scheme.INT4: (-7, 8)}
"""The first and last of the integers that a scheme holds with a scale of 1."""
FITTED = pytest.mark.parametrize("scheme", [Scheme.INT5, Scheme.INT4], ids=lambda one: one.value)
EVERY = pytest.mark.parametrize("scheme", PACKED_SCHEMES, ids=lambda scheme: scheme.value)
FLOATING = pytest.mark.parametrize("scheme", TORCH, ids=lambda scheme: scheme.value)
shapes = st.tuples(st.integers(1, 100), st.integers(1, 300))


def as_torch_keeps(numbers: Array, scheme: Scheme) -> Array:
    return torch.from_numpy(numbers).to(TORCH[scheme]).float().numpy()


def steps(matrix: PackedMatrix) -> Array:
    """What a step of each row and group is worth, [rows, groups]."""
    scales, _ = decode_scales(matrix.scheme, matrix.scales)
    return scales.transpose(0, 2, 1).reshape(matrix.blocks * LANES, -1)[: matrix.rows]


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
def test_int8_has_the_least_error_of_the_scales_that_are_tried(
    shape: tuple[int, int], seed: int
) -> None:
    numbers = make_random_numbers(seed, *shape)
    matrix = pack_matrix(numbers, Scheme.INT8)
    error = np.abs(unpack_matrix(matrix).astype(np.float64) - numbers)
    for group in range(Scheme.INT8.layout.count_groups(shape[1])):
        part = slice(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
        step = steps(matrix)[:, group]
        first = (np.abs(numbers[:, part]).max(axis=1) / np.float32(127)).view(np.uint32) >> 16
        scales = [(first + k - 1) << 16 for k in range(INT8_SCALES)]
        tried = np.stack(scales).astype(np.uint32).view(np.float32).astype(np.float64)[..., None]
        found = np.clip(np.rint(numbers[:, part] / tried), -128, 127) * tried
        least = ((found - numbers[:, part]) ** 2).sum(axis=2).min(axis=0)
        np.testing.assert_allclose((error[:, part] ** 2).sum(axis=1), least, rtol=1e-3, atol=1e-12)
        assert (step[:, None] == tried[..., 0].T).any(axis=1).all()
        assert (error[:, part] <= 1.01 * step[:, None]).all()


def round_scale(scale: Array) -> Array:
    """The nearest float with four bits of fraction."""
    fraction, exponent = np.frexp(scale)
    return np.ldexp(np.rint(fraction * 32) / 32, exponent)


def fit_by_the_formula(numbers: Array, bits: int) -> Array:
    """The least sum of squared errors of each row of one group that the search finds."""
    wide = np.zeros((len(numbers), GROUP_SIZE))
    wide[:, : numbers.shape[1]] = numbers
    top, units = 2**bits - 1, 2 ** (7 - bits)
    low = np.minimum(wide.min(axis=1, keepdims=True), 0)
    high = np.maximum(wide.max(axis=1, keepdims=True), 0)
    least = np.full((len(wide), 1), np.inf)
    for number in range(RANGE_STEPS):
        part = 1 - number * RANGE_SHRINKAGE
        scale, start = (
            round_scale((high - low) * part / top),
            (low + high - (high - low) * part) / 2,
        )
        for _ in range(REFINEMENTS + 1):
            scale = np.maximum(scale, 2.0**-20)
            zero = np.clip(np.rint(-start / scale * units), 0, 127) / units
            found = np.clip(np.rint(wide / scale + zero), 0, top)
            error = ((wide - (found - zero) * scale) ** 2).sum(axis=1, keepdims=True)
            least = np.minimum(least, error)
            spread = found.var(axis=1, keepdims=True)
            common = (wide * found).mean(axis=1, keepdims=True) - (
                wide.mean(axis=1, keepdims=True) * found.mean(axis=1, keepdims=True)
            )
            refined = round_scale(common / np.where(spread > 0, spread, 1))
            scale = np.where(spread > 0, refined, scale)
            start = wide.mean(axis=1, keepdims=True) - scale * found.mean(axis=1, keepdims=True)
    return least[:, 0]


@FITTED
@settings(max_examples=60, deadline=None)
@given(shape=shapes, seed=st.integers(0, 99), tails=st.booleans())
def test_a_group_has_the_least_error_that_the_search_finds(
    scheme: Scheme, shape: tuple[int, int], seed: int, tails: bool
) -> None:
    numbers = make_random_numbers(seed, *shape)
    numbers = numbers**3 if tails else numbers
    error = (unpack_matrix(pack_matrix(numbers, scheme)).astype(np.float64) - numbers) ** 2
    for begin in range(0, shape[1], GROUP_SIZE):
        part = slice(begin, begin + GROUP_SIZE)
        least = fit_by_the_formula(numbers[:, part], scheme.layout.bits)
        most = (numbers[:, part].astype(np.float64) ** 2).sum(axis=1)
        ours = error[:, part].sum(axis=1)
        # Where two steps are equally near, float32 may choose the other one.
        np.testing.assert_array_less(ours, 1.5 * least + 1e-4 * most + 1e-12)
        assert ours.sum() <= 1.01 * least.sum() + 2e-5 * most.sum()


@pytest.mark.parametrize(
    ("scheme", "rival", "gain"),
    [
        (Scheme.INT8, GGMLQuantizationType.Q8_0, 0.90),
        (Scheme.INT5, GGMLQuantizationType.Q5_0, 0.80),
        (Scheme.INT4, GGMLQuantizationType.Q4_0, 0.75),
        (Scheme.INT4, GGMLQuantizationType.Q4_1, 0.90),
    ],
    ids=str,
)
@pytest.mark.parametrize("tails", [False, True], ids=["normal", "long tails"])
def test_the_error_is_smaller_than_that_of_a_format_of_llama_cpp(
    scheme: Scheme, rival: GGMLQuantizationType, gain: float, tails: bool
) -> None:
    """Sums of squared errors; the rival is as large, but for Q4_1, which has half a bit more."""
    numbers = make_random_numbers(0, 512, 1024)
    numbers = numbers * np.abs(numbers) if tails else numbers
    theirs = dequantize(quantize(numbers, rival), rival)
    ours = unpack_matrix(pack_matrix(numbers, scheme))
    assert ((ours - numbers) ** 2).sum() <= gain * ((theirs - numbers) ** 2).sum()


@FITTED
@pytest.mark.parametrize("power", [-14, -5, 5, 11])
def test_small_and_large_numbers_are_fitted_alike(scheme: Scheme, power: int) -> None:
    numbers, size = make_random_numbers(12, 20, 300), np.float32(2.0**power)
    expected = unpack_matrix(pack_matrix(numbers, scheme)) * size
    np.testing.assert_array_equal(unpack_matrix(pack_matrix(numbers * size, scheme)), expected)


@EVERY
def test_what_a_scheme_can_hold_comes_back_exactly(scheme: Scheme) -> None:
    low, high = ENDS.get(scheme, (-7, 8))
    integers = np.random.default_rng(0).integers(low, high + 1, (40, 2 * GROUP_SIZE + 5))
    numbers = integers.astype(np.float32)
    numbers[:, ::GROUP_SIZE], numbers[:, 1::GROUP_SIZE] = low, high
    np.testing.assert_array_equal(unpack_matrix(pack_matrix(numbers, scheme)), numbers)


@FLOATING
def test_a_packed_matrix_is_packed_to_itself(scheme: Scheme) -> None:
    once = pack_matrix(make_random_numbers(1, 50, 200), scheme)
    twice = pack_matrix(unpack_matrix(once), scheme)
    np.testing.assert_array_equal(once.data, twice.data)


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
    sizes = {scheme: pack_matrix(numbers, scheme).nbytes for scheme in PACKED_SCHEMES}
    weights, scales = 1 << 20, 1024 * 32 * 2
    assert sizes == {
        Scheme.FLOAT32: 4 * weights,
        Scheme.FLOAT16: 2 * weights,
        Scheme.BFLOAT16: 2 * weights,
        Scheme.INT8: weights + scales,
        Scheme.INT5: weights * 5 // 8 + scales,
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
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 130, 299])
def test_integers_say_that_they_cannot_hold_what_is_no_number(
    scheme: Scheme, bad: float, place: int
) -> None:
    numbers = make_random_numbers(10, 20, 300)
    matrix = allocate_matrix(scheme, *numbers.shape)
    assert pack_rows(matrix, numbers)
    numbers[3, place] = bad
    assert not pack_rows(matrix, numbers)


def test_a_group_with_no_number_in_it_is_none_in_int8() -> None:
    numbers = make_random_numbers(10, 20, 300)
    numbers[3, 130] = np.inf
    spoilt = np.zeros((20, 300), bool)
    spoilt[3, 128 : 128 + GROUP_SIZE] = True
    found = unpack_matrix(pack_matrix(numbers, Scheme.INT8))
    np.testing.assert_array_equal(np.isnan(found), spoilt)


@FITTED
def test_outliers_are_held_up_to_what_a_scale_can_be(scheme: Scheme) -> None:
    numbers = make_random_numbers(11, 20, 300)
    numbers[5, 7] = 1e4
    matrix = allocate_matrix(scheme, *numbers.shape)
    assert pack_rows(matrix, numbers)
    found = unpack_matrix(matrix)
    assert abs(found[5, 7] - 1e4) < 300
    apart = np.ones_like(numbers, bool)
    apart[5, :GROUP_SIZE] = False
    assert np.abs(found - numbers)[apart].max() < 0.5, "no other group is worse for it"
    numbers[5, 7] = 1e6
    assert not pack_rows(matrix, numbers)


@pytest.mark.parametrize("scheme", INTEGERS, ids=lambda scheme: scheme.value)
def test_a_group_of_zeros_is_zeros(scheme: Scheme) -> None:
    assert not unpack_matrix(pack_matrix(np.zeros((3, 200), np.float32), scheme)).any()


def test_the_layout_of_int4_is_the_one_that_is_written_down() -> None:
    row = np.array([[8, -7, 1, 2, 3, 4, -1, -2]], np.float32)
    matrix = pack_matrix(row, Scheme.INT4)
    low, high = (8, -7, 1, 2), (3, 4, -1, -2)
    wanted = [(a + 7) | (b + 7) << 4 for a, b in zip(low, high, strict=True)]
    assert matrix.data.reshape(LANES, 4)[0].tolist() == wanted
    assert matrix.scales[0, 0, 0] == (20 << 4) << 7 | 7 * 8, "2^0, counted from 2^-20; eighths"


def test_the_layout_of_int5_is_the_one_that_is_written_down() -> None:
    row = np.array([[16, -15, 1, 2, 3, 4, -1, -2]], np.float32)
    matrix = pack_matrix(np.repeat(row, 2, axis=0), Scheme.INT5)
    steps = [int(number) + 15 for number in row[0]]
    wanted = [a & 15 | (b & 15) << 4 for a, b in zip(steps[:4], steps[4:], strict=True)]
    assert matrix.data[:64].reshape(LANES, 4)[:2].tolist() == [wanted] * 2
    for half in range(2):
        fifth = sum(step >> 4 << k for k, step in enumerate(steps[4 * half : 4 * half + 4]))
        assert matrix.data[64 + 8 * half] == fifth | fifth << 4, "rows are nibbles"
    assert matrix.scales[0, 0, 0] == (20 << 4) << 7 | 15 * 4


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
