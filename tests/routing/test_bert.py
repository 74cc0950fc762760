import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.routing.minilm import apply_gelu, exponentiate, multiply_blocked


def exact_gelu(x: float) -> float:
    return x * 0.5 * math.erfc(-x / math.sqrt(2))


def test_gelu_is_that_of_the_standard_library_within_4e_6() -> None:
    x = np.linspace(-40, 40, 200_001, dtype=np.float32)
    expected = np.array([exact_gelu(value) for value in x.tolist()])
    apply_gelu(x)
    assert np.abs(x - expected).max() < 5e-6


def test_gelu_of_what_no_float_can_square_is_zero_or_itself() -> None:
    x = np.array([-3e38, -1e20, -0.0, 0.0, 1e20, 3e38], np.float32)
    apply_gelu(x)
    assert x.tolist() == np.array([0, 0, 0, 0, 1e20, 3e38], np.float32).tolist()


def test_gelu_of_many_numbers_is_that_of_each() -> None:
    x = np.random.default_rng(0).standard_normal((100, 1000)).astype(np.float32)
    parts = x.copy()
    apply_gelu(x)
    for row in parts:
        apply_gelu(row)
    assert np.array_equal(x, parts)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40))
def test_exponentials_over_their_sums_are_the_softmax_of_torch(values: list[float]) -> None:
    x = np.array(values, np.float32)[:, None]
    sums = exponentiate(x)
    expected = torch.softmax(torch.tensor(values), -1).numpy()
    assert np.allclose((x / sums)[:, 0], expected, atol=1e-6)


@pytest.mark.parametrize("columns", [1, 16, 128, 129])
@pytest.mark.parametrize("shape", [(3, 5), (1024, 300), (7, 300_000)])
def test_a_product_is_that_of_numpy_however_it_is_computed(
    shape: tuple[int, int], columns: int
) -> None:
    random = np.random.default_rng(0)
    weight = random.standard_normal(shape).astype(np.float32)
    x = random.standard_normal((shape[1], columns)).astype(np.float32)
    assert np.allclose(multiply_blocked(weight, x), weight @ x, rtol=1e-4, atol=1e-2)
