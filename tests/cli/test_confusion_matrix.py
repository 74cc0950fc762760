"""The matrix that is drawn: every decision is in it once, and confused experts are neighbours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.cli import routing_plot
from expertctl.cli.routing_plot import build_confusion_matrix, order_by_confusion
from tests.routing.evaluations import Row, make_evaluation

pytestmark = pytest.mark.all

NAMES = st.none() | st.sampled_from([f"e{i}" for i in range(8)])
ROWS = st.lists(
    st.tuples(NAMES, NAMES, st.sampled_from([0.9, 0.1])).map(
        lambda row: row if row[1] else (row[0], None, None)
    ),
    min_size=1,
    max_size=40,
)


def test_rows_are_who_was_wanted_and_columns_who_answered() -> None:
    matrix = build_confusion_matrix(
        make_evaluation([("a", "a", 0.9), ("a", "b", 0.9), ("b", "b", 0.1), (None, "a", 0.9)])
    )
    assert matrix.names == ("acme/a", "acme/b", "none")
    assert matrix.counts == ((1, 1, 0), (0, 0, 1), (1, 0, 0))
    assert (matrix.experts, matrix.hidden) == (2, 0)
    assert matrix.row_sums == [2, 1, 1]


def test_without_a_prompt_for_nobody_and_without_abstention_there_is_no_row_for_none() -> None:
    assert build_confusion_matrix(make_evaluation([("a", "a", 0.9)])).names == ("acme/a",)


def test_experts_that_are_confused_stand_beside_each_other() -> None:
    cells = {("a", "c"): 9, ("c", "a"): 1, ("b", "d"): 5, ("d", "c"): 1, ("a", "a"): 50}
    assert order_by_confusion(["a", "b", "c", "d"], cells) == ["a", "c", "d", "b"]


def test_experts_without_confusion_keep_their_order() -> None:
    assert order_by_confusion(["b", "a", "c"], {("a", "a"): 3}) == ["b", "a", "c"]


def test_beyond_the_rows_that_fit_the_best_are_put_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing_plot, "MAX_ROWS", 2)
    rows: list[Row] = [("a", "b", 0.9)] * 3 + [("c", "d", 0.9), ("c", "c", 0.9), ("d", "d", 0.9)]
    matrix = build_confusion_matrix(make_evaluation([*rows, ("c", "a", 0.9), (None, "d", 0.9)]))
    assert matrix.names == ("acme/a", "acme/b", "2 others", "none")
    assert matrix.counts == ((0, 3, 0, 0), (0, 0, 0, 0), (1, 0, 2, 0), (0, 0, 1, 0))
    assert (matrix.experts, matrix.hidden) == (4, 1)


@given(ROWS, st.integers(1, 9))
def test_every_decision_is_in_one_cell_or_told_to_be_hidden(rows: list[Row], most: int) -> None:
    found = make_evaluation(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing_plot, "MAX_ROWS", most)
        matrix = build_confusion_matrix(found)
    assert sum(matrix.row_sums) + matrix.hidden == len(rows)
    assert {len(row) for row in matrix.counts} == {len(matrix.names)} == {len(matrix.counts)}
    right = sum(row[i] for i, row in enumerate(matrix.counts))
    assert right == found.accuracy.correct
    assert len(set(matrix.names)) == len(matrix.names)


@given(st.permutations([f"e{i}" for i in range(6)]), st.dictionaries(
    st.tuples(*[st.sampled_from([f"e{i}" for i in range(6)])] * 2), st.integers(1, 5)
))  # fmt: skip
def test_ordering_loses_nobody(names: list[str], cells: dict[tuple[str, str], int]) -> None:
    placed = order_by_confusion(names, cells)
    assert sorted(placed) == sorted(names)
    assert placed[0] == names[0] or cells
