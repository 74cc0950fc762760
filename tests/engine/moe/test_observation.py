"""What was counted, as a document that may be planned from."""

import json

import numpy as np
import pytest

from expertctl.engine.moe.counters import Counters
from expertctl.engine.moe.profile_codecs import read_activity, write_activity
from expertctl.engine.moe.usage_profile import build_counted_profile

HOT_AND_COLD = np.array([0, -1, 0, -1])


@pytest.fixture
def counters() -> Counters:
    """Two calls of each layer, where layer 1 chose no expert."""
    counted = Counters([1, 3], experts=4)
    requests, times = np.array([[0] * 4, [2, 1, 0, 0]]), np.array([0, 1])
    lanes = np.stack((HOT_AND_COLD, HOT_AND_COLD))
    for _ in range(2):
        counted.count_passes(
            requests[None], lanes[None], hot_ns=times * 3_000, cold_ns=times * 5_000
        )
    counted.count_swaps(3, 4)
    return counted


def test_the_document_has_every_layer_and_is_read_again(counters: Counters) -> None:
    document = build_counted_profile(counters.observed_snapshot(), used=2)
    back = read_activity(write_activity(document), what="ours")
    assert [layer.layer for layer in back.layers] == [1, 3]
    assert (back.mode, back.experts, back.used, back.updates) == ("full", 4, 2, 2)
    idle, busy = back.layers
    assert (idle.calls, idle.hits) == (2, {})
    assert (busy.calls, busy.hot, busy.cold) == (2, {0: 4}, {1: 2})
    assert (busy.requests, busy.missed_requests, busy.swaps) == (4, 2, 4)
    assert back.is_usable


def test_times_are_those_of_a_call_in_microseconds(counters: Counters) -> None:
    _, busy = build_counted_profile(counters.observed_snapshot(), used=2).layers
    times = busy.times
    assert times.parallel_hot_lane_wall == pytest.approx(3.0)
    assert times.parallel_cold_lane_wall == times.parallel_join_wait == pytest.approx(5.0)
    assert times.parallel_region_wall == pytest.approx(8.0)
    assert busy.pressure == pytest.approx(5.0)


def test_where_nothing_is_counted_the_document_is_the_one_of_whoever_observes_nothing(
    counters: Counters,
) -> None:
    counters.configure(mode="off")
    assert write_activity(build_counted_profile(counters.observed_snapshot(), used=2)) == (
        b'{"enabled":false,"mode":"off","schema":"llama.cpp.moe_layer_opt_perf.v1","layers":[]}'
    )
    counters.configure(mode="update")
    written = json.loads(
        write_activity(build_counted_profile(counters.observed_snapshot(), used=2))
    )
    assert (written["mode"], written["schema"]) == ("update", "llama.cpp.moe_layer_opt_perf.v1")
