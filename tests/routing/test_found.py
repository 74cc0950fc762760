"""What a filter says of itself, and how rows are grouped by the expert that owns them."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.reference import Digest
from expertctl.routing.vector_table import SearchFilter, VectorTable, group_by_expert


def table_of(counts: Sequence[int]) -> VectorTable:
    """A table with entries of so many rows."""
    total = sum(counts)
    return VectorTable(
        encoder=Digest.compute(b"encoder"),
        stamp="encoder",
        keys=np.arange(32 * len(counts), dtype=np.int64).astype(np.uint8).reshape(-1, 32),
        counts=np.array(counts, np.int64),
        alive=np.ones(len(counts), np.bool_),
        rows=np.eye(max(total, 1), 4, dtype=np.float32)[:total],
    )


@pytest.mark.parametrize(
    ("mask", "is_open"),
    [([True, True, True], True), ([True, False, True], False), ([False] * 3, False)],
)
def test_a_filter_is_open_when_every_row_passes(mask: list[bool], is_open: bool) -> None:
    assert SearchFilter(table_of([2, 1, 3]), np.array(mask)).admits_all == is_open


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    shuffle=st.randoms(use_true_random=False),
    steps=st.lists(st.integers(-3, 3), min_size=24, max_size=24),
)
def test_each_expert_has_its_best_row_and_of_equal_rows_the_first(
    counts: list[int], shuffle: random.Random, steps: list[int]
) -> None:
    table = table_of(counts)
    rows = list(range(sum(counts)))
    shuffle.shuffle(rows)
    cosines = {row: steps[row] / 10 for row in rows}
    wanted: dict[int, int] = {}
    for row in sorted(rows, key=lambda row: (-cosines[row], row)):
        wanted.setdefault(int(table.owners[row]), row)
    found = group_by_expert(
        table, np.array(rows), np.array([cosines[row] for row in rows], np.float32)
    )
    assert found.experts.tolist() == list(wanted)
    texts = [row - int(table.starts[owner]) for owner, row in wanted.items()]
    assert found.texts.tolist() == texts
    assert found.cosines.tolist() == pytest.approx([cosines[row] for row in wanted.values()])
