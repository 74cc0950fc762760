"""How often experts are exchanged: the published table, its boundaries and its streaks."""

import json
from pathlib import Path

import pytest

from expertctl.engine.moe.swap_policy import (
    Swap,
    SwapUpdate,
    UpdateHistory,
    UpdatePolicy,
    UpdateSchedule,
    choose_schedule,
)

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "moe_cache.json").read_text())[
    "update_policy"
]
SWAP = (Swap(0, 0, 1, 2),)


@pytest.mark.parametrize("case", CASES, ids=json.dumps)
def test_a_pace_is_the_published_one(case: dict[str, float]) -> None:
    course = UpdateHistory(
        tokens=int(case.get("tokens", 0)),
        fallback_rate=case["fallback_rate"],
        no_swap_streak=int(case.get("no_swap_streak", 0)),
        low_streak=int(case.get("low_streak", 0)),
    )
    pace = choose_schedule(course)
    assert pace.layer_budget == case["budget"]
    if "interval_at_least" in case:
        assert pace.interval >= case["interval_at_least"]
    else:
        assert pace.interval == case["interval"]


@pytest.mark.parametrize(
    ("rate", "tokens", "pace"),
    [
        (0.4, 500, UpdateSchedule(1, 48)),
        (0.3499, 500, UpdateSchedule(1, 32)),
        (0.1999, 500, UpdateSchedule(2, 24)),
        (0.0999, 33, UpdateSchedule(3, 16)),
        (0.0999, 97, UpdateSchedule(4, 12)),
    ],
)
def test_a_rate_that_is_high_decides_and_else_the_length(
    rate: float, tokens: int, pace: UpdateSchedule
) -> None:
    assert choose_schedule(UpdateHistory(tokens, rate)) == pace


@pytest.mark.parametrize(
    ("rate", "no_swap", "low", "pace"),
    [
        (0.149, 3, 0, UpdateSchedule(2, 24)),
        (0.149, 4, 0, UpdateSchedule(4, 12)),
        (0.15, 4, 0, UpdateSchedule(2, 24)),
        (0.079, 0, 5, UpdateSchedule(4, 12)),
        (0.079, 0, 6, UpdateSchedule(12, 8)),
        (0.08, 0, 6, UpdateSchedule(4, 12)),
        (0.079, 4, 0, UpdateSchedule(8, 8)),
        (0.049, 0, 12, UpdateSchedule(20, 8)),
        (0.05, 0, 12, UpdateSchedule(12, 8)),
    ],
)
def test_streaks_make_updates_seldom_while_little_is_missing(
    rate: float, no_swap: int, low: int, pace: UpdateSchedule
) -> None:
    assert choose_schedule(UpdateHistory(200, rate, no_swap, low)) == pace


def test_a_policy_counts_tokens_between_updates_and_streaks_of_them() -> None:
    policy = UpdatePolicy()
    assert not policy.is_due()
    policy.count_tokens()
    assert not policy.is_due()
    policy.count_tokens()
    assert policy.is_due()
    policy.record_update(SwapUpdate(SWAP, (8, 8), (1, 3)))
    assert policy.history == UpdateHistory(tokens=2, fallback_rate=0.25)
    assert policy.layer_budget == 32
    policy.count_tokens()
    assert policy.is_due()
    for _ in range(3):
        policy.record_update(SwapUpdate((), (8, 8), (0, 0)))
    assert policy.history == UpdateHistory(tokens=3, no_swap_streak=3, low_streak=3)
    policy.record_update(SwapUpdate(SWAP, (100, 100), (1, 1)))
    assert policy.history == UpdateHistory(tokens=3, fallback_rate=0.01)
    policy.count_tokens(20)
    assert policy.history.tokens == 23


def test_an_update_without_a_request_says_nothing() -> None:
    policy = UpdatePolicy()
    policy.record_update(SwapUpdate(SWAP, (8,), (4,)))
    before = policy.history
    policy.record_update(SwapUpdate((), (0,), (0,)))
    assert policy.history == before
    assert not policy.is_due()
