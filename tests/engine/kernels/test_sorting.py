"""Choices in the order of experts: each once, those of one expert as the tokens stand."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.kernels.moe_layer import NO_POSITION, allocate_permutation
from expertctl.engine.kernels.packed_format import PACKED_SCHEMES, Scheme
from expertctl.engine.kernels.quantisation import PreparedActivations
from tests.engine.kernels.reference_gemm import make_random_numbers, quantise_rows
from tests.engine.kernels.reference_moe import (
    FOREIGN_VALUE,
    gather_rows,
    make_random_choices,
    sort_choices,
    sort_choices_in_parts,
)

Array = np.ndarray[Any, Any]


def check(selected: Array, experts: int) -> None:
    """See that the order is what a stable sort by id makes of those who ask for somebody."""
    order, ids = sort_choices(selected, experts), selected.reshape(-1)
    asks = (ids >= 0) & (ids < experts)
    count = int(asks.sum())
    expected = np.flatnonzero(asks)[np.argsort(ids[asks], kind="stable")]
    np.testing.assert_array_equal(order.sources[:count], expected)
    assert (order.sources[count:] == int(FOREIGN_VALUE)).all()
    inverse = np.full(ids.size, NO_POSITION)
    inverse[expected] = np.arange(count)
    np.testing.assert_array_equal(order.inverse, inverse)
    counts = np.bincount(ids[asks], minlength=experts)
    np.testing.assert_array_equal(order.counts, counts)
    np.testing.assert_array_equal(order.offsets, np.cumsum([0, *counts]))
    active = np.flatnonzero(counts)
    assert order.active_count[0] == len(active)
    np.testing.assert_array_equal(order.active[: len(active)], active)


@settings(max_examples=300, deadline=None)
@given(
    experts=st.integers(1, 20),
    used=st.integers(1, 5),
    tokens=st.integers(0, 12),
    seed=st.integers(0, 9999),
)
def test_each_choice_is_there_once_and_in_order(
    experts: int, used: int, tokens: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    check(random.integers(-2, experts + 2, (tokens, used), dtype=np.int64), experts)


@settings(max_examples=300, deadline=None)
@given(
    experts=st.integers(1, 20),
    used=st.integers(1, 5),
    tokens=st.integers(0, 12),
    seed=st.integers(0, 9999),
)
def test_whoever_comes_later_is_sorted_behind_those_who_were_there(
    experts: int, used: int, tokens: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    selected = random.integers(-2, experts + 2, (tokens, used), dtype=np.int64)
    came = 64 * random.integers(0, 2, experts, dtype=np.int64)
    more = came + 64 * random.integers(0, 2, experts, dtype=np.int64)
    ids = selected.reshape(-1)
    left = (ids >= 0) & (ids < experts)
    expected: list[int] = []
    parts = (came, more, None)
    for places, found in zip(parts, sort_choices_in_parts(selected, experts, parts), strict=True):
        order = found
        part = left & (True if places is None else places[np.where(left, ids, 0)] != 0)
        left &= ~part
        expected += np.flatnonzero(part)[np.argsort(ids[part], kind="stable")].tolist()
        counts = np.bincount(ids[part], minlength=experts)
        np.testing.assert_array_equal(found.counts, counts)
        begin = len(expected) - int(part.sum())
        np.testing.assert_array_equal(found.offsets, begin + np.cumsum([0, *counts]))
        assert found.active[: found.active_count[0]].tolist() == np.flatnonzero(counts).tolist()
    assert order.sources[: len(expected)].tolist() == expected, "each once"
    inverse = np.full(ids.size, NO_POSITION)
    inverse[expected] = np.arange(len(expected))
    np.testing.assert_array_equal(order.inverse, inverse)


@pytest.mark.parametrize("wrong", [-(1 << 62), -1, 4, 1 << 62])
def test_ids_of_no_expert_ask_for_nobody(wrong: int) -> None:
    check(np.array([[wrong, 3], [0, wrong]], np.int64), 4)
    check(np.full((3, 2), wrong, np.int64), 4)


def test_a_prompt_of_many_tokens_is_sorted() -> None:
    check(make_random_choices(0, 2048, 8, 64), 64)


def test_only_so_many_tokens_count_as_there_are_at_that_run() -> None:
    selected = make_random_choices(1, 6, 2, 5)
    order, few = sort_choices(selected, 5, tokens=4), sort_choices(selected[:4].copy(), 5)
    np.testing.assert_array_equal(order.offsets, few.offsets)
    np.testing.assert_array_equal(order.sources[:8], few.sources)
    np.testing.assert_array_equal(order.inverse[:8], few.inverse)
    assert (order.inverse[8:] == int(FOREIGN_VALUE)).all()


def test_the_room_is_known_in_bytes() -> None:
    assert allocate_permutation(4, 10).nbytes == 8 * (4 + 5 + 4 + 1 + 10 + 10)


@pytest.mark.parametrize("scheme", PACKED_SCHEMES, ids=lambda scheme: scheme.value)
@pytest.mark.parametrize("columns", [1, 130, 256])
def test_a_position_has_the_row_of_its_token(scheme: Scheme, columns: int) -> None:
    used, selected = 3, make_random_choices(2, 7, 3, 9)
    selected[2, 1] = selected[5, 0] = NO_POSITION
    order, rows = (
        sort_choices(selected, 9),
        quantise_rows(make_random_numbers(3, 7, columns), scheme),
    )
    count = int(order.offsets[-1])
    assert count == 19
    found, tokens = (
        gather_rows(order, rows, scheme=scheme, used=used),
        order.sources[:count] // used,
    )
    for name in PreparedActivations.__slots__:
        got, expected = getattr(found, name), getattr(rows, name)[tokens]
        np.testing.assert_array_equal(got[:count], expected, strict=True)
        assert not got[count:].any()


def test_rows_that_lie_in_wider_ones_are_gathered() -> None:
    order = sort_choices(make_random_choices(4, 5, 2, 3), 3)
    wide = make_random_numbers(5, 5, 40)
    rows = PreparedActivations(
        wide[:, :20], np.zeros((5, 0), np.float32), np.zeros((5, 0), np.int32)
    )
    found = gather_rows(order, rows, scheme=Scheme.FLOAT32, used=2)
    np.testing.assert_array_equal(found.data, wide[order.sources // 2, :20])
