"""Rows of experts come back to their tokens, in bits that only the choices decide."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.kernels.moe_layer import (
    NO_POSITION,
    MoePermutation,
    combine_arguments,
    combine_kernel,
)
from tests.engine.kernels.reference_gemm import make_random_numbers
from tests.engine.kernels.reference_moe import make_random_choices, sort_choices

Array = np.ndarray[Any, Any]


def merge(order: MoePermutation, weights: Array, rows: Array, onto: Array, *, width: int) -> Array:
    out = onto.copy()
    arguments = combine_arguments(order=order, weights=weights, rows=rows, out=out, width=width)
    combine_kernel()(0, len(out), arguments.ctypes.data)
    return out


def plainly(order: MoePermutation, weights: Array, rows: Array, onto: Array, width: int) -> Array:
    """The formula in float32, one rounded operation after the other."""
    out = onto.copy()
    for token, shares in enumerate(weights):
        total = np.zeros(width, np.float32)
        for place, weight in enumerate(shares):
            position = order.inverse[token * len(shares) + place]
            if position != NO_POSITION:
                total += weight * rows[position, :width]
        out[token, :width] += total
    return out


@settings(max_examples=60, deadline=None)
@given(
    experts=st.integers(1, 9),
    tokens=st.integers(0, 6),
    width=st.sampled_from([1, 15, 48, 511, 512, 513, 1100]),
    missed=st.floats(0, 1),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_a_token_gets_the_sum_of_its_choices_from_first_to_last(
    experts: int, tokens: int, width: int, missed: float, seed: int, data: st.DataObject
) -> None:
    used = data.draw(st.integers(1, experts))
    selected = make_random_choices(seed, tokens, used, experts)
    selected[np.random.default_rng(seed).random(selected.shape) < missed] = NO_POSITION
    order, weights = sort_choices(selected, experts), make_random_numbers(seed, tokens, used)
    rows = make_random_numbers(seed + 1, tokens * used, width + 3)
    rows[int(order.offsets[-1]) :] = np.nan
    onto = make_random_numbers(seed + 2, tokens, width + 5)
    got = merge(order, weights, rows, onto, width=width)
    np.testing.assert_array_equal(got, plainly(order, weights, rows, onto, width), strict=True)


def test_where_an_expert_was_computed_changes_no_bit() -> None:
    selected, weights = make_random_choices(1, 5, 3, 8), make_random_numbers(2, 5, 3)
    outputs, onto = make_random_numbers(3, 5, 3, 100), make_random_numbers(4, 5, 100)
    found = []
    for renamed in (np.arange(8), np.arange(8)[::-1], np.random.default_rng(5).permutation(8)):
        order = sort_choices(renamed[selected].astype(np.int64), 8)
        rows = outputs.reshape(15, 100)[order.sources]
        found.append(merge(order, weights, rows, onto, width=100))
    np.testing.assert_array_equal(found[1], found[0], strict=True)
    np.testing.assert_array_equal(found[2], found[0], strict=True)


@pytest.mark.parametrize("weight", [0.0, 1.5])
def test_an_expert_that_makes_no_numbers_is_seen_in_its_tokens_only(weight: float) -> None:
    order = sort_choices(np.array([[0, 1], [1, 2]], np.int64), 3)
    rows = np.ones((4, 16), np.float32)
    rows[order.inverse[0]] = np.inf
    weights = np.full((2, 2), weight, np.float32)
    out = merge(order, weights, rows, np.zeros((2, 16), np.float32), width=16)
    assert not np.isfinite(out[0]).any()
    np.testing.assert_array_equal(out[1], np.full(16, 2 * weight, np.float32))
