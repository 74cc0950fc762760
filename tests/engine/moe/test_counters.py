"""What is counted, what is ignored, and what happens at the end of 64 bits."""

from threading import Thread

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from expertctl.engine.moe.counters import (
    MAX_COUNTER,
    CounterMode,
    Counters,
    LayerCounts,
    count_requests_by_layer,
)
from expertctl.engine.moe.usage_profile import (
    EMPTY_PROFILE,
    UsageProfile,
    add_profiles,
    build_counted_profile,
    subtract_profile,
)

LANES = np.array([0, -1, 1, -1])
"""Experts 0 and 2 are hot, 1 and 3 cold."""


def counters() -> Counters:
    return Counters([2, 5], experts=4)


def count(
    counted: Counters, layer: int, requests: list[int], *, hot_ns: int = 0, cold_ns: int = 0
) -> None:
    """Count a pass in which only one of the layers chose experts."""
    row = np.array([[layer == 2], [layer == 5]])
    counted.count_passes(
        np.where(row, np.array(requests), 0)[None],
        np.stack((LANES, LANES))[None],
        hot_ns=row[:, 0] * np.array(hot_ns, np.uint64),
        cold_ns=row[:, 0] * np.array(cold_ns, np.uint64),
    )


def layer_counts(counted: Counters, layer: int) -> LayerCounts:
    return counted.observed_snapshot().layers[layer]


def document(counted: Counters) -> tuple[object, ...]:
    seen = counted.observed_snapshot()
    return seen.overflow_resets, seen.summary, seen.layers, seen.expert_counts.tolist()


def test_requests_are_counted_by_expert_and_ids_that_do_not_exist_are_ignored() -> None:
    selected = np.array([[[0, 3], [3, -1], [4, 2**40], [3, -(2**40)]], [[1, 1]] * 4])
    assert count_requests_by_layer(selected, 4).tolist() == [[1, 0, 0, 3], [0, 8, 0, 0]]
    assert count_requests_by_layer(np.zeros((1, 0, 2), np.int64), 4).tolist() == [[0] * 4]


def test_a_pass_counts_routed_slots_and_each_expert_once() -> None:
    counted = counters()
    count(counted, 5, [2, 3, 0, 0], hot_ns=1_500_000, cold_ns=2_000_000)
    count(counted, 5, [1, 0, 1, 1], hot_ns=500_000)
    counted.count_swaps(5, 7)
    counted.check_integrity()
    seen = counted.observed_snapshot()
    found = seen.layers[5]
    assert found == LayerCounts(
        calls=2,
        hits=4,
        misses=4,
        requests=5,
        missed_requests=2,
        swaps=7,
        hot_ns=2_000_000,
        cold_ns=2_000_000,
    )
    assert (found.fallback_rate, found.hot_slot_ratio) == (0.4, 0.5)
    assert seen.expert_counts[1].tolist() == [[3, 0, 1, 0], [0, 3, 0, 1]]
    idle = {**dict.fromkeys(LayerCounts.__slots__, 0), "calls": 2}
    assert seen.layers[2] == LayerCounts(**idle)


def test_the_counts_of_a_layer_are_a_document_with_milliseconds() -> None:
    counted = counters()
    count(counted, 2, [3, 1, 0, 0], hot_ns=250_000, cold_ns=1_000_000)
    count(counted, 5, [0, 2, 2, 0], hot_ns=750_000)
    counted.count_swaps(2, 3)
    seen = counted.observed_snapshot()
    assert seen.summary.to_json() == {
        "calls": 4, "hits": 5, "misses": 3, "requests": 4, "missed_requests": 2,
        "fallback_rate": 0.5, "hot_slot_ratio": 0.625, "swaps": 3,
        "hot_ms": 1.0, "cold_ms": 1.0,
    }  # fmt: skip
    assert seen.layers[5].to_json() == {
        "calls": 2, "hits": 2, "misses": 2, "requests": 2, "missed_requests": 1,
        "fallback_rate": 0.5, "hot_slot_ratio": 0.5, "swaps": 0,
        "hot_ms": 0.75, "cold_ms": 0.0,
    }  # fmt: skip


def test_nothing_counted_has_ratios_of_zero() -> None:
    assert set(counters().observed_snapshot().summary.to_json().values()) == {0}


def test_swaps_of_a_layer_without_routed_experts_are_ignored() -> None:
    counted = counters()
    before = document(counted)
    counted.count_swaps(-1, 2)
    assert document(counted) == before


def filled(counted: Counters, requests: int) -> None:
    count(counted, 2, [requests, 0, 0, 0])


def test_the_largest_number_is_counted_and_one_more_begins_again() -> None:
    counted = counters()
    for part in (2**63 - 1, 2**63 - 1, 1):
        filled(counted, part)
    assert layer_counts(counted, 2).hits == MAX_COUNTER
    count(counted, 5, [1, 1, 1, 1])
    filled(counted, 1)
    assert document(counted) == (1, *document(counters())[1:])
    filled(counted, 1)
    assert layer_counts(counted, 2).hits == 1
    counted.check_integrity()


@pytest.mark.parametrize("name", ["swaps", "hot_ns", "cold_ns"])
def test_whatever_goes_over_all_begin_again(name: str) -> None:
    counted = counters()
    for amount in (5, MAX_COUNTER - 5, 1):
        match name:
            case "swaps":
                counted.count_swaps(2, amount)
            case "hot_ns":
                count(counted, 2, [0] * 4, hot_ns=amount)
            case "cold_ns":
                count(counted, 2, [0] * 4, cold_ns=amount)
    assert counted.observed_snapshot().overflow_resets == 1
    assert getattr(layer_counts(counted, 2), name) == 0


def test_sums_over_layers_saturate() -> None:
    counted = counters()
    for layer in (2, 5):
        counted.count_swaps(layer, MAX_COUNTER - 1)
    seen = counted.observed_snapshot()
    assert (seen.summary.swaps, seen.overflow_resets) == (MAX_COUNTER, 0)


def test_a_reset_begins_again_and_keeps_how_often_counters_went_over() -> None:
    counted = counters()
    counted.count_swaps(2, MAX_COUNTER)
    counted.count_swaps(2, 1)
    filled(counted, 9)
    counted.reset()
    assert document(counted) == (1, *document(counters())[1:])


@given(st.lists(st.tuples(st.sampled_from([2, 5]), st.lists(st.integers(-2, 5))), max_size=8))
def test_counts_equal_those_of_counting_one_by_one(calls: list[tuple[int, list[int]]]) -> None:
    counted = counters()
    for layer, ids in calls:
        count(counted, layer, count_requests_by_layer(np.array([ids], np.int64), 4)[0].tolist())
    counted.check_integrity()
    for layer in (2, 5):
        lists = [[i for i in ids if 0 <= i < 4] for at, ids in calls if at == layer]
        found = layer_counts(counted, layer)
        assert found.calls == len(calls)
        assert found.hits == sum(i in (0, 2) for ids in lists for i in ids)
        assert found.misses == sum(i in (1, 3) for ids in lists for i in ids)
        assert found.requests == sum(len(set(ids)) for ids in lists)
        assert found.missed_requests == sum(len(set(ids) & {1, 3}) for ids in lists)


def test_a_reader_never_sees_half_of_a_call() -> None:
    counted = counters()
    torn: list[object] = []

    def look() -> None:
        for _ in range(300):
            found = layer_counts(counted, 2)
            if not found.calls == found.hits == found.misses:
                torn.append(found)

    reader = Thread(target=look)
    reader.start()
    for _ in range(300):
        count(counted, 2, [1, 1, 0, 0])
    reader.join()
    assert torn == []


def test_nothing_is_observed_while_that_is_off_and_what_was_is_forgotten() -> None:
    counted = counters()
    filled(counted, 3)
    counted.count_swaps(2, 1)
    assert counted.configure(mode="off").passes == 0
    filled(counted, 5)
    counted.count_swaps(2, 1)
    seen = counted.configure(mode="update")
    assert (seen.mode, seen.passes, seen.summary) == (
        "update",
        0,
        counters().observed_snapshot().summary,
    )
    filled(counted, 2)
    assert counted.observed_snapshot().layers[2].hits == 2


def test_the_mode_that_is_there_already_forgets_nothing() -> None:
    counted = counters()
    filled(counted, 3)
    for _ in range(2):
        assert counted.configure(mode="full").layers[2].hits == 3
    assert counted.configure().layers[2].hits == 3
    for _ in range(2):
        seen = counted.configure(mode="full", reset=True)
        assert (seen.mode, seen.passes, seen.layers[2].hits) == ("full", 0, 0)


def test_what_was_observed_is_of_one_moment_and_stays() -> None:
    counted = counters()
    count(counted, 5, [2, 3, 0, 0], cold_ns=7)
    seen = counted.observed_snapshot()
    counted.reset()
    assert (seen.passes, seen.layers[5].hits, seen.layers[5].cold_ns) == (1, 2, 7)
    assert seen.expert_counts.tolist() == [[[0] * 4, [0] * 4], [[2, 0, 0, 0], [0, 3, 0, 0]]]
    torn: list[object] = []

    def look() -> None:
        for _ in range(300):
            now = counted.observed_snapshot()
            if {now.passes} != {layer.calls for layer in now.layers.values()}:
                torn.append(now)

    reader = Thread(target=look)
    reader.start()
    for _ in range(300):
        counted.count_passes(np.ones((1, 2, 4), np.int64), np.stack((LANES, LANES))[None])
    reader.join()
    assert torn == []


def test_several_passes_count_as_one_after_the_other() -> None:
    at_once, in_turn = counters(), counters()
    drawn = np.random.default_rng(0)
    requests = drawn.integers(0, 3, (5, 2, 4))
    lanes = drawn.integers(-1, 2, (5, 2, 4))
    times = drawn.integers(0, 100, (5, 2))
    for number in range(5):
        one = slice(number, number + 1)
        in_turn.count_passes(requests[one], lanes[one], cold_ns=times[number])
    at_once.count_passes(requests, lanes, cold_ns=times.sum(0))
    at_once.check_integrity()
    one, other = at_once.observed_snapshot(), in_turn.observed_snapshot()
    assert (one.passes, one.layers) == (other.passes, other.layers)
    np.testing.assert_equal(one.expert_counts, other.expert_counts)


class TwoReaders(RuleBasedStateMachine):
    """Whoever learns and whoever observes never take anything from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = counters()
        self.mode: CounterMode = "full"
        self.asked = np.zeros((2, 4), np.int64)
        self.observed = np.zeros((2, 4), np.int64)
        self.learnt, self.kept = EMPTY_PROFILE, EMPTY_PROFILE

    @rule(requests=st.lists(st.integers(0, 3), min_size=8, max_size=8), hot=st.booleans())
    def count_a_pass(self, requests: list[int], hot: bool) -> None:
        asked = np.array(requests).reshape(2, 4)
        self.counted.count_passes(asked[None], np.full((1, 2, 4), 0 if hot else -1))
        self.asked += asked
        self.observed += 0 if self.mode == "off" else asked

    @rule(mode=st.sampled_from(["full", "update", "off", None]), reset=st.booleans())
    def observe(self, mode: CounterMode | None, reset: bool) -> None:
        self.counted.configure(mode=mode, reset=reset)
        if reset or mode not in {None, self.mode}:
            self.observed[...] = 0
        self.mode = mode or self.mode

    @rule()
    def learn(self) -> None:
        seen = build_counted_profile(self.counted.cumulative_snapshot(), used=2)
        self.learnt, self.kept = (
            add_profiles(self.learnt, subtract_profile(seen, self.kept)),
            seen,
        )
        assert hits_of(self.learnt) == hits_by_layer(self.asked)

    @invariant()
    def what_is_observed_is_what_was_counted_since_it_began_again(self) -> None:
        self.counted.check_integrity()
        seen = self.counted.observed_snapshot()
        assert seen.mode == self.mode
        assert seen.expert_counts.sum(1).tolist() == self.observed.tolist()
        assert [each.hits + each.misses for each in seen.layers.values()] == [*self.observed.sum(1)]


def hits_of(document: UsageProfile) -> dict[int, dict[int, int]]:
    return {layer.layer: layer.hits for layer in document.layers if layer.hits}


def hits_by_layer(asked: NDArray[np.int64]) -> dict[int, dict[int, int]]:
    each = zip((2, 5), asked.tolist(), strict=True)
    found = {n: {e: count for e, count in enumerate(row) if count} for n, row in each}
    return {number: counts for number, counts in found.items() if counts}


TwoReaders.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestTwoReaders = TwoReaders.TestCase
