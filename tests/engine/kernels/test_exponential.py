"""The exponential, against float64."""

from functools import cache
from typing import Any

import numpy as np

from expertctl.engine.kernels.compiled.llvm_math import (
    MAX_EXP_ARGUMENT,
    MIN_EXP_ARGUMENT,
    exponential,
)
from expertctl.engine.kernels.compiled.memory import float32_view, load_int64s
from expertctl.engine.kernels.jit import Kernel, load_kernel

Numbers = np.ndarray[Any, Any]


@cache
def each_kernel() -> Kernel:
    return load_kernel("exponential of each", __name__, "_each")


def _each(first: int, last: int, arguments: int) -> None:
    rows, out, count = load_int64s(arguments, 3)
    for k in range(first, last):
        float32_view(out, count)[k] = exponential(float32_view(rows, count)[k])


def exponentials(numbers: Numbers) -> Numbers:
    out = np.empty_like(numbers)
    arguments = np.array([numbers.ctypes.data, out.ctypes.data, len(numbers)], np.int64)
    each_kernel()(0, len(numbers), arguments.ctypes.data)
    return out


def test_it_is_within_two_units_in_the_last_place_everywhere() -> None:
    numbers = np.linspace(MIN_EXP_ARGUMENT, MAX_EXP_ARGUMENT, 2_000_001).astype(np.float32)
    exact = np.exp(numbers.astype(np.float64))
    units = np.abs(exponentials(numbers) - exact) / np.spacing(exact.astype(np.float32))
    assert units.max() <= 2


def test_beyond_its_range_it_stays_finite() -> None:
    low, high = exponentials(np.array([MIN_EXP_ARGUMENT, MAX_EXP_ARGUMENT], np.float32))
    found = exponentials(np.array([-np.inf, -1e30, -100, 100, 1e30, np.inf], np.float32))
    np.testing.assert_array_equal(found, [low] * 3 + [high] * 3)
    assert 0 < low < 2e-38
    assert 2e38 < high < np.inf


def test_zero_is_exactly_one_and_nan_stays_nan() -> None:
    found = exponentials(np.array([0.0, -0.0, np.nan], np.float32))
    np.testing.assert_array_equal(found, [1, 1, np.nan])
