"""What slots are compared with, by hand and against any choice; and the targets that they meet."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cache_policies import (
    Trace,
    belady,
    best_static,
    lru,
    lru_by_token,
    make_drifting_trace,
    replay_our_policy,
)
from benchmarks.cache_policies import lru_hit_rate as lru_share


def one_layer(*tokens: list[int]) -> Trace:
    return np.array(tokens)[:, None]


TRACE = one_layer([1, 2], [3, 1], [2, 1], [4, 1])


def test_rules_of_keeping_have_the_hits_that_they_would_by_hand() -> None:
    assert best_static(TRACE, 2) == 6, "1 four times, 2 twice"
    assert lru(TRACE, 2) == 2, "1 at the sixth and at the last request"
    assert lru_by_token(TRACE, 2) == 3, "1 whenever it is asked for again"
    assert belady(TRACE, 2) == 4, "1 three times and 2 once; neither 3 nor 4 is taken in"


def test_layers_are_apart() -> None:
    both = np.concatenate([TRACE, TRACE], axis=1)
    for rule in (best_static, lru, lru_by_token, belady):
        assert rule(both, 2) == 2 * rule(TRACE, 2)


def test_lru_is_that_of_the_benchmark_of_residency() -> None:
    trace = make_drifting_trace(300, layers=1, experts=20, used=4, skew=1.0, every=90, seed=3)
    wanted = trace.ravel().tolist()
    for capacity in (1, 5, 19):
        assert lru(trace, capacity) == pytest.approx(lru_share(wanted, capacity) * len(wanted))


requests = st.lists(st.integers(0, 3), min_size=1, max_size=9)


@settings(deadline=None)
@given(requests, st.integers(0, 3))
def test_no_choice_of_residents_has_more_hits_than_belady(wanted: list[int], capacity: int) -> None:
    @cache
    def most(at: int, there: frozenset[int]) -> int:
        if at == len(wanted):
            return 0
        able = there | {wanted[at]}
        kept = [frozenset(some) for some in combinations(sorted(able), min(capacity, len(able)))]
        return (wanted[at] in there) + max(most(at + 1, some) for some in kept)

    trace = one_layer(*[[expert] for expert in wanted])
    assert belady(trace, capacity) == most(0, frozenset())


def test_a_token_asks_for_different_experts_by_the_law_of_zipf() -> None:
    trace = make_drifting_trace(20_000, layers=2, experts=64, used=1, skew=1.0, every=0, seed=0)
    assert trace.shape == (20_000, 2, 1)
    for layer in range(2):
        first, second, *_, tenth = np.sort(np.bincount(trace[:, layer, 0]))[::-1][:10]
        assert 1.8 < first / second < 2.2
        assert 8 < first / tenth < 12
    several = make_drifting_trace(500, layers=1, experts=64, used=8, skew=1.0, every=100, seed=0)
    assert all(len(set(asked)) == 8 for asked in several[:, 0].tolist())
    again = make_drifting_trace(500, layers=1, experts=64, used=8, skew=1.0, every=100, seed=0)
    assert (several == again).all()


def test_favourites_are_others_after_a_drift() -> None:
    trace = make_drifting_trace(600, layers=1, experts=64, used=8, skew=1.0, every=200, seed=1)
    favourites = [
        set(np.argsort(-np.bincount(trace[at : at + 200].ravel(), minlength=64))[:8].tolist())
        for at in range(0, 600, 200)
    ]
    assert len(favourites[0] & favourites[1]) < 5
    assert len(favourites[1] & favourites[2]) < 5


@pytest.mark.parametrize("capacity", [0, 1, 16])
def test_ours_has_no_more_hits_than_belady_and_all_where_everybody_is_resident(
    capacity: int,
) -> None:
    trace = make_drifting_trace(120, layers=2, experts=16, used=4, skew=1.0, every=50, seed=2)
    outcome = replay_our_policy(trace, capacity, experts=16)
    assert outcome.hits.shape == (120, 2)
    if capacity == 16:
        assert outcome.hits.sum() == trace.size
        assert outcome.swaps == 0
    else:
        beginning = 2 * capacity  # ours begins with full slots
        assert outcome.hits.sum() <= belady(trace, capacity) + beginning


@pytest.mark.parametrize("every", [0, 200], ids=["favourites stay", "favourites drift"])
def test_ours_meets_its_targets_at_40_percent_of_64_experts(every: int) -> None:
    trace = make_drifting_trace(1000, layers=4, experts=64, used=8, skew=1.0, every=every, seed=0)
    hits = replay_our_policy(trace, 25, experts=64).hits.sum()
    assert hits >= 0.95 * best_static(trace, 25)
    assert hits >= 1.1 * lru(trace, 25)
    assert hits <= belady(trace, 25)
