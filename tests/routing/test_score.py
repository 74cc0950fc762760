import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.routing.score import (
    DEFAULT_SUCCESS,
    SIMILAR,
    THRESHOLD,
    mebibytes,
    order_key,
    score,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "runtime.json").read_text())["score"]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=str)
def test_scores_are_those_of_the_vectors(case: dict[str, float]) -> None:
    computed = score(
        cosine=case["cosine"],
        success=case["success"],
        vram_mb=case["vram_mb"],
        budget_mb=case["budget_mb"],
    )
    assert computed == pytest.approx(case["score"])


def test_thresholds_and_defaults_are_those_of_the_vectors() -> None:
    assert VECTORS["success_default"] == DEFAULT_SUCCESS
    assert f"cosine >= {SIMILAR}" in VECTORS["candidate_rule"]
    assert f"score >= {THRESHOLD:.2f}" in VECTORS["candidate_rule"]


def test_sizes_are_weighed_in_mebibytes() -> None:
    assert mebibytes(3 << 20) == 3


def test_the_score_decides_then_priority_then_name() -> None:
    keys = [
        order_key(score=0.9, priority=0.1, name="z/z"),
        order_key(score=0.8, priority=0.9, name="z/z"),
        order_key(score=0.8, priority=0.5, name="a/a"),
        order_key(score=0.8, priority=0.5, name="a/b"),
    ]
    assert keys == sorted(keys)


candidates = st.tuples(
    st.floats(-1, 1), st.floats(0, 1), st.text(st.characters(codec="ascii"), min_size=1)
)


@given(st.lists(candidates, unique_by=lambda c: c[2]))
def test_the_order_does_not_depend_on_who_comes_first(
    listed: list[tuple[float, float, str]],
) -> None:
    def ranked(items: list[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
        return sorted(items, key=lambda c: order_key(score=c[0], priority=c[1], name=c[2]))

    assert ranked(listed) == ranked(listed[::-1])


@given(st.floats(-1, 1), st.floats(0, 1), st.floats(0, 1e6), st.floats(1, 1e6), st.floats(0, 1e6))
def test_more_memory_never_raises_a_score(
    cosine: float, success: float, vram: float, budget: float, more: float
) -> None:
    def at(size: float) -> float:
        return score(cosine=cosine, success=success, vram_mb=size, budget_mb=budget)

    assert at(vram + more) <= at(vram) <= 0.5 * cosine + 0.3 * success + 0.2
