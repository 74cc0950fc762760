"""What experts are worth: the published cases, and each formula worked out beside it."""

import json
from math import sqrt
from pathlib import Path

import pytest

from expertctl.engine.moe.placement import WEIGHTINGS, ScoredExpert, Weighting, score_experts
from expertctl.engine.moe.profile_codecs import read_activity
from expertctl.engine.moe.usage_profile import LaneTimes, LayerUsage

CASES = {
    case["kind"]: case
    for case in json.loads((Path(__file__).parents[2] / "vectors" / "moe_cache.json").read_text())[
        "weighting"
    ]
}


def waiting(layer: int, wait: float, *, hot: dict[int, int], cold: dict[int, int]) -> LayerUsage:
    return LayerUsage(layer, hot=hot, cold=cold, times=LaneTimes(parallel_join_wait=wait))


def places(found: list[ScoredExpert]) -> list[list[int]]:
    return [[scored.layer, scored.expert] for scored in found]


def test_flat_takes_the_first_of_every_layer_before_the_second_of_any() -> None:
    case = CASES["flat"]
    layers = [LayerUsage(n, raw=dict(enumerate(hits))) for n, hits in enumerate(case["hits"])]
    found = score_experts(layers)
    assert places(found)[:4] == case["order_starts"]
    assert places(found) == [[layer, rank] for rank in range(3) for layer in range(3)]
    assert found[0].score == 3_000_100
    assert found[-1].score == 1_000_005


def test_pressure_scores_are_the_published_ones() -> None:
    case = CASES["pressure"]
    layers = [
        waiting(number, wait, hot={}, cold={number: hits})
        for number, (wait, hits) in enumerate(zip(case["waits"], case["hits"], strict=True))
    ]
    found = score_experts(layers, weighting="pressure", curve=case["curve"])
    assert [scored.score for scored in found] == case["scores"]


def test_a_hot_hit_counts_a_twentieth_more_as_published() -> None:
    layers = [
        waiting(0, 20, hot={1: 10}, cold={2: 10}),
        waiting(1, 10, hot={3: 12}, cold={}),
    ]
    found = score_experts(layers, weighting="pressure")
    assert found == [ScoredExpert(0, 1, 12), ScoredExpert(0, 2, 12), ScoredExpert(1, 3, 11)]


def test_balanced_ranks_within_a_layer_and_prefers_a_layer_with_more_experts() -> None:
    layers = [LayerUsage(0, raw={1: 20, 2: 10}), LayerUsage(1, raw={3: 30, 4: 2, 5: 1})]
    found = score_experts(layers, weighting="balanced")
    assert found == [
        ScoredExpert(1, 3, 3_000_030),
        ScoredExpert(0, 1, 2_000_020),
        ScoredExpert(1, 4, 2_000_002),
        ScoredExpert(0, 2, 1_000_010),
        ScoredExpert(1, 5, 1_000_001),
    ]


@pytest.mark.parametrize("weighting", ["flat", "balanced"])
def test_a_rank_counts_before_any_number_of_hits(weighting: Weighting) -> None:
    found = score_experts([LayerUsage(0, raw={1: 10**12, 2: 10**12 - 1})], weighting=weighting)
    assert [scored.score for scored in found] == [2_999_999, 1_999_999]


def test_pressure_weights_stay_within_their_bounds() -> None:
    layers = [waiting(n, wait, hot={}, cold={0: 1000}) for n, wait in enumerate((1, 1, 1000))]
    found = score_experts(layers, weighting="pressure", curve=1.0)
    assert [scored.score for scored in found] == [1600, 700, 700]


def test_smooth_weights_rise_with_the_root_between_percentiles() -> None:
    layers = [waiting(n, 10 * n + 10, hot={}, cold={0: 100_000}) for n in range(5)]
    by_layer = {
        one.layer: one.score for one in score_experts(layers, weighting="smooth", curve=1.0)
    }
    low, high = 14, 46  # of 10, 20, 30, 40, 50
    expected = [1 + 0.3 * sqrt(min(max((p - low) / (high - low), 0), 1)) for p in range(10, 60, 10)]
    assert by_layer == {n: round(100_000 * weight) for n, weight in enumerate(expected)}


def test_time_weights_go_from_the_fastest_to_the_slowest_layer() -> None:
    layers = [
        LayerUsage(n, raw={0: 1000}, times=LaneTimes(total_moe=time))
        for n, time in enumerate((100, 150, 200))
    ]
    found = score_experts(layers, weighting="time", curve=1.0)
    assert [scored.score for scored in found] == [1800, 1100, 400]
    half = score_experts(layers, weighting="time", curve=0.5)
    assert [scored.score for scored in half] == [1400, 1050, 700]


def test_the_time_of_a_layer_is_that_of_its_lanes_where_no_whole_one_is_told() -> None:
    """Together where they ran side by side, one after the other where that is not told either."""
    times = [
        LaneTimes(total_moe=100, parallel_region_wall=1, parallel_hot_lane_wall=1),
        LaneTimes(parallel_region_wall=150, parallel_hot_lane_wall=140),
        LaneTimes(parallel_hot_lane_wall=120, parallel_cold_lane_wall=80),
    ]
    layers = [LayerUsage(n, raw={0: 1000}, times=each) for n, each in enumerate(times)]
    found = score_experts(layers, weighting="time", curve=1.0)
    assert [(scored.layer, scored.score) for scored in found] == [(2, 1800), (1, 1100), (0, 400)]


def test_a_layer_without_a_time_is_weighed_by_its_pressure() -> None:
    layers = [
        LayerUsage(0, raw={0: 1000}, times=LaneTimes(total_moe=100)),
        waiting(1, 200, hot={}, cold={0: 1000}),
    ]
    assert [s.layer for s in score_experts(layers, weighting="time")] == [1, 0]


@pytest.mark.parametrize("weighting", ["pressure", "smooth", "time"])
def test_where_nothing_is_known_or_all_are_alike_hits_alone_count(weighting: Weighting) -> None:
    unknown = [LayerUsage(n, raw={0: 50 + n}) for n in range(3)]
    alike = [waiting(n, 20, hot={}, cold={0: 50 + n}) for n in range(3)]
    for layers in (unknown, alike):
        assert [s.score for s in score_experts(layers, weighting=weighting)] == [52, 51, 50]


def test_a_layer_without_pressure_counts_as_it_is() -> None:
    layers = [
        waiting(0, 0, hot={}, cold={0: 100}),
        waiting(1, 10, hot={}, cold={0: 90}),
        waiting(2, 10, hot={}, cold={0: 80}),
    ]
    assert [s.score for s in score_experts(layers, weighting="pressure")] == [100, 90, 80]


@pytest.mark.parametrize("curve", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_curve_that_is_none_is_the_usual_one(curve: float) -> None:
    layers = [waiting(0, 20, hot={}, cold={1: 10}), waiting(1, 10, hot={}, cold={2: 11})]
    assert [s.score for s in score_experts(layers, weighting="pressure", curve=curve)] == [12, 9]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_curve_of_0_changes_no_hits_and_whoever_was_asked_for_is_worth_1(
    weighting: Weighting,
) -> None:
    layers = [waiting(0, 1000, hot={}, cold={1: 1}), waiting(1, 1, hot={}, cold={2: 1})]
    found = score_experts(layers, weighting=weighting, curve=0)
    assert all(scored.score >= 1 for scored in found)
    assert score_experts([], weighting=weighting) == []


def test_the_published_profile_weighs_total_waits_of_layers() -> None:
    document = {
        "schema": "llama.cpp.moe_layer_perf.v1",
        "layers": [
            {
                "layer": n,
                "cold_experts": [[n + 1, 10]],
                "cold_slots_per_call": 10 / (n + 1),
                "parallel_join_wait_time_per_call_us": 20 / (n + 1),
            }
            for n in range(2)
        ],
    }
    read = read_activity(json.dumps(document).encode(), what="profile")
    assert score_experts(read.layers, weighting="pressure") == [
        ScoredExpert(0, 1, 12),
        ScoredExpert(1, 2, 8),
    ]
