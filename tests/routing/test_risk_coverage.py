"""Risk and coverage against counting by hand, and against the plain definition."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.routing.score import (
    ConfidenceBin,
    OperatingPoint,
    Prediction,
    bin_by_confidence,
    compute_calibration_error,
    compute_mean_risk,
    compute_risk_coverage,
    find_best_point,
    find_point_at,
    thin_points,
)

HAND = [
    Prediction(0.9, is_correct=True, in_scope=True),
    Prediction(0.8, is_correct=False, in_scope=False),
    Prediction(0.7, is_correct=True, in_scope=True),
    Prediction(0.7, is_correct=False, in_scope=True),
    Prediction(None, is_correct=False, in_scope=False),
]
GUESSES = st.lists(
    st.builds(
        lambda confidence, right, in_scope: Prediction(
            confidence, right and in_scope and confidence is not None, in_scope
        ),
        st.none() | st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.95, 1.0]),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=30,
)


def test_the_curve_is_what_counting_by_hand_gives() -> None:
    assert compute_risk_coverage(HAND) == [
        OperatingPoint(None, 0, 0.0, None, accuracy=2 / 5, in_scope=0.0, out_of_scope=1.0),
        OperatingPoint(0.9, 1, 1 / 5, 0.0, accuracy=3 / 5, in_scope=1 / 3, out_of_scope=1.0),
        OperatingPoint(0.8, 2, 2 / 5, 0.5, accuracy=2 / 5, in_scope=1 / 3, out_of_scope=0.5),
        OperatingPoint(0.7, 4, 4 / 5, 0.5, accuracy=3 / 5, in_scope=2 / 3, out_of_scope=0.5),
    ]


def test_the_best_point_is_the_strictest_of_the_most_accurate() -> None:
    assert find_best_point(compute_risk_coverage(HAND)).threshold == 0.9


def test_the_area_is_the_mean_risk_over_the_answered() -> None:
    assert compute_mean_risk(compute_risk_coverage(HAND)) == pytest.approx(
        (0.0 * 1 + 0.5 * 1 + 0.5 * 2) / 4
    )
    assert compute_mean_risk(compute_risk_coverage(HAND[-1:])) is None


@pytest.mark.parametrize(("coverage", "threshold"), [(0.1, 0.9), (0.4, 0.8), (0.5, 0.7)])
def test_the_point_of_a_coverage_is_the_strictest_that_reaches_it(
    coverage: float, threshold: float
) -> None:
    point = find_point_at(compute_risk_coverage(HAND), coverage)
    assert point is not None
    assert point.threshold == threshold


def test_a_coverage_that_is_never_reached_has_no_point() -> None:
    assert find_point_at(compute_risk_coverage(HAND), 0.9) is None


@given(GUESSES)
def test_each_point_is_what_its_threshold_gives(guesses: list[Prediction]) -> None:
    for point in compute_risk_coverage(guesses)[1:]:
        assert point.threshold is not None
        answered = [
            g for g in guesses if g.confidence is not None and g.confidence >= point.threshold
        ]
        left = [g for g in guesses if g not in answered]
        wanted = [g for g in guesses if g.in_scope]
        strays = [g for g in guesses if not g.in_scope]
        right = sum(g.is_correct for g in answered)
        assert point.answered == len(answered)
        assert point.coverage == len(answered) / len(guesses)
        assert point.risk == pytest.approx(1 - right / len(answered))
        well = right + sum(not g.in_scope for g in left)
        assert point.accuracy == pytest.approx(well / len(guesses))
        assert (point.in_scope is None) == (not wanted)
        assert (point.out_of_scope is None) == (not strays)


@given(GUESSES)
def test_thresholds_fall_and_coverage_grows(guesses: list[Prediction]) -> None:
    points = compute_risk_coverage(guesses)
    thresholds = [math.inf if p.threshold is None else p.threshold for p in points]
    assert thresholds == sorted(set(thresholds), reverse=True)
    assert [p.answered for p in points] == sorted({p.answered for p in points})
    assert points[0].answered == 0


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    points = compute_risk_coverage(
        [Prediction(i / 1000, is_correct=True, in_scope=True) for i in range(1000)]
    )
    few = thin_points(points)
    assert len(few) == 102
    assert (few[0], few[-1]) == (points[0], points[-1])
    assert set(few) < set(points)
    assert thin_points(points[:50]) == points[:50]


def test_bins_hold_each_guess_once_and_those_beyond_the_ends() -> None:
    guesses = [
        Prediction(-0.5, is_correct=False, in_scope=True),
        Prediction(0.05, is_correct=True, in_scope=True),
        Prediction(0.1, is_correct=True, in_scope=True),
        Prediction(1.0, is_correct=True, in_scope=True),
        Prediction(1.5, is_correct=False, in_scope=True),
        Prediction(None, is_correct=False, in_scope=True),
    ]
    found = bin_by_confidence(guesses)
    assert [b.n for b in found] == [2, 1, 0, 0, 0, 0, 0, 0, 0, 2]
    assert found[1] == ConfidenceBin(0.1, 0.2, 1, 1, 0.1)
    assert found[2] == ConfidenceBin(0.2, 0.3, 0, 0, 0.0)
    assert [b.correct for b in found][9] == 1


def test_the_calibration_error_is_the_mean_distance_of_confidence_from_truth() -> None:
    sure = [Prediction(0.95, is_correct=i < 9, in_scope=True) for i in range(10)]
    unsure = [Prediction(0.35, is_correct=False, in_scope=True) for _ in range(10)]
    assert compute_calibration_error(bin_by_confidence(sure + unsure)) == pytest.approx(
        (0.05 + 0.35) / 2
    )
    assert compute_calibration_error(bin_by_confidence([])) is None


@given(GUESSES)
def test_the_calibration_error_is_a_share(guesses: list[Prediction]) -> None:
    error = compute_calibration_error(bin_by_confidence(guesses))
    assert error is None or 0 <= error <= 1
