import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.routing.score import (
    DEFAULT_SUCCESS_RATE,
    THRESHOLD,
    CandidateSortKey,
    build_sort_key,
    discount_by_success,
    explain_tie,
    to_mebibytes,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "runtime.json").read_text())["score"]

DECIDES = ("its score", "a flag", "success", "priority", "size", "name")
BETTER_FIRST = (
    {"score": 0.9, "flagged": True, "success": 0.1, "priority": 0.1, "vram_mb": 9.0, "name": "z"},
    {"score": 0.8, "flagged": False, "success": 0.1, "priority": 0.1, "vram_mb": 9.0, "name": "z"},
    {"score": 0.8, "flagged": True, "success": 0.9, "priority": 0.1, "vram_mb": 9.0, "name": "z"},
    {"score": 0.8, "flagged": True, "success": 0.8, "priority": 0.9, "vram_mb": 9.0, "name": "z"},
    {"score": 0.8, "flagged": True, "success": 0.8, "priority": 0.8, "vram_mb": 1.0, "name": "z"},
    {"score": 0.8, "flagged": True, "success": 0.8, "priority": 0.8, "vram_mb": 2.0, "name": "a"},
    {"score": 0.8, "flagged": True, "success": 0.8, "priority": 0.8, "vram_mb": 2.0, "name": "b"},
)
KEYS = [build_sort_key(**each) for each in BETTER_FIRST]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=str)
def test_scores_are_those_of_the_vectors(case: dict[str, float]) -> None:
    assert discount_by_success(case["head"], success=case["success"]) == pytest.approx(
        case["score"]
    )


def test_thresholds_and_defaults_are_those_of_the_vectors() -> None:
    assert VECTORS["success_default"] == DEFAULT_SUCCESS_RATE
    assert VECTORS["threshold"] == THRESHOLD


def test_sizes_are_told_in_mebibytes() -> None:
    assert to_mebibytes(3 << 20) == 3


def test_each_of_the_order_counts_only_where_all_before_it_are_equal() -> None:
    assert sorted(KEYS[::-1]) == KEYS
    told = [explain_tie(a, b) for a, b in pairwise(KEYS)]
    assert told == ["", *DECIDES[1:]]


def test_scores_that_look_the_same_are_the_same() -> None:
    key = {**BETTER_FIRST[0], "name": "a"}
    near = {**key, "score": 0.9004, "name": "b"}
    assert explain_tie(build_sort_key(**key), build_sort_key(**near)) == "name"


def test_scores_near_one_are_not_the_same_where_their_odds_differ() -> None:
    key = {**BETTER_FIRST[0], "score": 0.99999, "priority": 0.0}
    near = {**key, "score": 0.9995, "priority": 1.0}
    assert sorted([build_sort_key(**near), build_sort_key(**key)]) == [
        build_sort_key(**key),
        build_sort_key(**near),
    ]
    assert explain_tie(build_sort_key(**key), build_sort_key(**near)) == ""


@given(st.floats(0, 1), st.floats(0, 1))
def test_equals_are_close_and_a_better_score_never_sorts_behind(one: float, two: float) -> None:
    first, second = (build_sort_key(**{**BETTER_FIRST[0], "score": score}) for score in (one, two))
    assert first[0] != second[0] or abs(one - two) < 0.03
    assert first[0] <= second[0] or one < two


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_no_answers_lift_a_score_and_worse_ones_never_help(
    score: float, success: float, worse: float
) -> None:
    assert (
        discount_by_success(score, success=min(success, worse))
        <= discount_by_success(score, success=success)
        <= score
    )


candidates = st.builds(
    build_sort_key,
    score=st.floats(0, 1),
    flagged=st.booleans(),
    success=st.floats(0, 1),
    priority=st.floats(0, 1),
    vram_mb=st.floats(0, 1e6),
    name=st.text(st.characters(codec="ascii"), min_size=1),
)


@given(st.lists(candidates, unique_by=lambda key: key[-1]))
def test_the_order_does_not_depend_on_who_comes_first(listed: list[CandidateSortKey]) -> None:
    assert sorted(listed) == sorted(listed[::-1])
