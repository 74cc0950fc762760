"""What the benchmark of residency compares with, by hand; and that its replay is the real thing."""

from collections import Counter

import pytest

from benchmarks.cache_policies import (
    belady_hit_rate,
    best_static_hit_rate,
    lru_hit_rate,
    make_requests,
    make_shifting_requests,
)
from benchmarks.residency import BUDGET, EXPERT_BYTES, EXPERTS, NoticedJob, _compare_notice, replay

WANTED = [1, 2, 3, 1, 2, 1, 4, 1]


def test_rules_of_keeping_serve_what_they_would_by_hand() -> None:
    assert best_static_hit_rate(WANTED, 2) == 6 / 8, "1 four times, 2 twice"
    assert lru_hit_rate(WANTED, 2) == 2 / 8, "1 at the sixth and at the last request"
    assert belady_hit_rate(WANTED, 2) == 3 / 8, (
        "1 at the fourth, sixth and last, when 2, 3 and 2 went"
    )


def test_requests_follow_the_law_of_zipf_and_are_the_same_each_time() -> None:
    wanted = make_requests(20_000, experts=100, seed=0)
    assert wanted == make_requests(20_000, experts=100, seed=0)
    first, second, tenth = (wanted.count(n) for n in (0, 1, 9))
    assert 1.9 < first / second < 2.1
    assert 9 < first / tenth < 11


def test_favourites_that_shift_are_as_popular_as_ever_and_others_each_time() -> None:
    wanted = make_shifting_requests(20_000, experts=100, seed=0, every=2_500)
    assert wanted == make_shifting_requests(20_000, experts=100, seed=0, every=2_500)
    parts = [Counter(wanted[begin : begin + 2_500]) for begin in range(0, 20_000, 2_500)]
    law = 1 / sum(1 / rank for rank in range(1, 101))
    for part in parts:
        [(_, first), (_, second)] = part.most_common(2)
        assert first / 2_500 == pytest.approx(law, rel=0.15)
        assert second / 2_500 == pytest.approx(law / 2, rel=0.2)
    assert len({part.most_common(1)[0][0] for part in parts}) > 4


def test_where_favourites_shift_a_replay_beats_what_remembers_only_the_last_use_or_all() -> None:
    wanted = make_shifting_requests(6_000, experts=EXPERTS, seed=1, every=1_500)
    hits = sum(replay(wanted, [EXPERT_BYTES] * EXPERTS).hits) / 6_000
    fit = BUDGET // EXPERT_BYTES
    assert hits > 1.2 * lru_hit_rate(wanted, fit)
    assert hits > 1.2 * best_static_hit_rate(wanted, fit)
    assert hits < belady_hit_rate(wanted, fit)


def test_a_replay_stays_within_the_budget_and_keeps_what_is_popular() -> None:
    wanted = make_requests(2_000, experts=EXPERTS, seed=1)
    outcome = replay(wanted, [EXPERT_BYTES] * EXPERTS)
    copies = replay(wanted, [EXPERT_BYTES] * EXPERTS, plan_bytes=EXPERT_BYTES)
    fit = BUDGET // EXPERT_BYTES
    assert BUDGET - EXPERT_BYTES < outcome.ledger <= BUDGET
    assert lru_hit_rate(wanted, fit) < sum(copies.hits) / 2_000 < sum(outcome.hits) / 2_000
    assert sum(outcome.hits) / 2_000 < belady_hit_rate(wanted, fit)


def test_notice_that_was_never_long_enough_is_a_row_that_fails() -> None:
    late = NoticedJob(wait_seconds=0.02, has_waited=True, notice=0.001, load=0.01)
    there = NoticedJob(wait_seconds=0.001, has_waited=False, notice=0.1, load=None)
    in_time = NoticedJob(wait_seconds=0.001, has_waited=False, notice=0.1, load=0.01)
    for told, untold in (([late, there], [late]), ([], []), ([in_time], [there])):
        [row] = _compare_notice(told, untold)
        assert row.ok is False, row
    waits, _ = _compare_notice([in_time], [late])
    assert waits.ok is True
