"""Tokens as products want them: rounded like torch, or integers of half a step's error."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.arrays import aligned_zeros
from expertctl.engine.kernels.packed_format import GROUP_SIZE, Scheme
from expertctl.engine.kernels.quantisation import (
    activation_arguments,
    activation_kernel,
    allocate_activations,
    wrap_float_activations,
)
from tests.engine.kernels.reference_gemm import (
    Array,
    dequantise_rows,
    make_random_numbers,
    quantise_rows,
)

ODD = (0.0, -0.0, 1e-45, -1e-40, 3.3e38, 3.4e38, -3.4028235e38, np.inf, -np.inf)


def as_torch_rounds(rows: Array) -> Array:
    return torch.from_numpy(rows).to(torch.bfloat16).view(torch.uint16).numpy()


def test_rounding_to_bfloat16_is_that_of_torch_for_any_bits() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, (64, 999), dtype=np.uint32)
    rows = bits.view(np.float32)
    rows[0, : len(ODD)] = ODD
    rows[np.isnan(rows)] = 1
    np.testing.assert_array_equal(
        quantise_rows(rows, Scheme.BFLOAT16).data[:, :999], as_torch_rounds(rows)
    )


def test_ties_go_to_the_even_bfloat16() -> None:
    halfway = (np.arange(0x3F80, 0x3FC0, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    rounded = quantise_rows(halfway[None], Scheme.BFLOAT16).data[0]
    assert (rounded % 2 == 0).all()
    np.testing.assert_array_equal(rounded, as_torch_rounds(halfway))


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000])
def test_what_is_no_number_stays_none_when_rounded(bits: int) -> None:
    rows = np.array([[bits]], np.uint32).view(np.float32)
    assert np.isnan(dequantise_rows(quantise_rows(rows, Scheme.BFLOAT16), rows)).all()


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 5),
    columns=st.integers(1, 400),
    power=st.integers(-90, 120),
    seed=st.integers(0, 99),
)
def test_a_group_has_the_better_of_two_fitted_scales_and_its_sums_are_exact(
    tokens: int, columns: int, power: int, seed: int
) -> None:
    rows = make_random_numbers(seed, tokens, columns) * np.float32(2.0**power)
    ready = quantise_rows(rows, Scheme.INT8)
    for group in range(-(-columns // GROUP_SIZE)):
        part = slice(group * GROUP_SIZE, min((group + 1) * GROUP_SIZE, columns))
        exact = rows[:, part].astype(np.float64)
        error = ((dequantise_rows(ready, rows)[:, part] - exact) ** 2).sum(axis=1)
        least = np.minimum(fitted_error(exact, 127), fitted_error(exact, 124))
        size = (exact**2).sum(axis=1)
        # Which of two nearly equal errors is smaller is found with float32 sums of squares.
        np.testing.assert_array_less(error, least * 1.001 + size * 5e-7)
        once = np.abs(exact).max(axis=1, keepdims=True) / 127
        plain = ((np.rint(exact / once) * once - exact) ** 2).sum(axis=1)
        np.testing.assert_array_less(error, plain * 1.001 + size * 5e-7)
        sums = ready.data[:, part].astype(np.int64).sum(axis=1)
        np.testing.assert_array_equal(ready.sums[:, group], sums)
        largest = np.abs(ready.data[:, part].astype(np.int64)).max(axis=1)
        assert np.isin(largest, (124, 127)).all()


def fitted_error(exact: Array, largest: int) -> Array:
    """Return the squared error of groups of so many steps, with the scale of least squares."""
    steps = np.rint(exact / np.abs(exact).max(axis=1, keepdims=True) * largest)
    scale = (steps * exact).sum(axis=1, keepdims=True) / (steps**2).sum(axis=1, keepdims=True)
    error: Array = ((steps * scale - exact) ** 2).sum(axis=1)
    return error


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 2.0**-101])
def test_a_group_of_next_to_nothing_counts_as_zero(largest: float) -> None:
    rows = np.full((1, 130), largest, np.float32)
    ready = quantise_rows(rows, Scheme.INT8)
    assert not ready.data.any()
    assert not ready.scales.any()
    assert not ready.sums.any()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 127, 128, 200])
def test_a_group_with_no_number_in_it_has_no_scale(bad: float, place: int) -> None:
    rows = make_random_numbers(1, 1, 201)
    rows[0, place] = bad
    ready = quantise_rows(rows, Scheme.INT4)
    spoilt = place // GROUP_SIZE
    assert np.isnan(ready.scales[0, spoilt])
    assert np.isfinite(np.delete(ready.scales[0], spoilt)).all()
    assert not ready.data[0, spoilt * GROUP_SIZE : (spoilt + 1) * GROUP_SIZE].any()
    assert ready.sums[0, spoilt] == 0


@pytest.mark.parametrize("scheme", [Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4])
def test_columns_beyond_the_last_are_zeros_whatever_was_there(scheme: Scheme) -> None:
    rows = make_random_numbers(2, 3, 131)
    ready = quantise_rows(rows, scheme)
    assert ready.data.shape[1] >= 131
    assert not ready.data[:, 131:].any()
    assert ready.nbytes == ready.data.nbytes + ready.scales.nbytes + ready.sums.nbytes


def test_rows_may_be_part_of_wider_ones() -> None:
    wide = aligned_zeros((4, 64), np.float32)
    wide[...] = make_random_numbers(3, 4, 64)
    room = allocate_activations(Scheme.INT8, 4, 40)
    arguments = activation_arguments(rows=wide, columns=40, prepared=room)
    activation_kernel(Scheme.INT8)(0, 4, arguments.ctypes.data)
    np.testing.assert_array_equal(room.data, quantise_rows(wide[:, :40].copy(), Scheme.INT8).data)


def test_rows_for_wide_floats_are_the_rows_themselves() -> None:
    rows = make_random_numbers(4, 2, 10)
    assert wrap_float_activations(rows).data is rows
    assert wrap_float_activations(rows).nbytes == rows.nbytes
