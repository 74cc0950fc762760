"""How often experts are exchanged: the published table, its boundaries and its streaks."""

import json
from pathlib import Path

import pytest

from expertctl.engine.moe.update_policy import Course, Pace, UpdatePolicy, pace_of
from expertctl.engine.moe.updates import Swap, Update

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "moe_cache.json").read_text())[
    "update_policy"
]
SWAP = (Swap(0, 0, 1, 2),)


@pytest.mark.parametrize("case", CASES, ids=json.dumps)
def test_a_pace_is_the_published_one(case: dict[str, float]) -> None:
    course = Course(
        tokens=int(case.get("tokens", 0)),
        fallback_rate=case["fallback_rate"],
        no_swap_streak=int(case.get("no_swap_streak", 0)),
        low_streak=int(case.get("low_streak", 0)),
    )
    pace = pace_of(course)
    assert pace.budget == case["budget"]
    if "interval_at_least" in case:
        assert pace.interval >= case["interval_at_least"]
    else:
        assert pace.interval == case["interval"]


@pytest.mark.parametrize(
    ("rate", "tokens", "pace"),
    [
        (0.4, 500, Pace(1, 48)),
        (0.3499, 500, Pace(1, 32)),
        (0.1999, 500, Pace(2, 24)),
        (0.0999, 33, Pace(3, 16)),
        (0.0999, 97, Pace(4, 12)),
    ],
)
def test_a_rate_that_is_high_decides_and_else_the_length(
    rate: float, tokens: int, pace: Pace
) -> None:
    assert pace_of(Course(tokens, rate)) == pace


@pytest.mark.parametrize(
    ("rate", "no_swap", "low", "pace"),
    [
        (0.149, 3, 0, Pace(2, 24)),
        (0.149, 4, 0, Pace(4, 12)),
        (0.15, 4, 0, Pace(2, 24)),
        (0.079, 0, 5, Pace(4, 12)),
        (0.079, 0, 6, Pace(12, 8)),
        (0.08, 0, 6, Pace(4, 12)),
        (0.079, 4, 0, Pace(8, 8)),
        (0.049, 0, 12, Pace(20, 8)),
        (0.05, 0, 12, Pace(12, 8)),
    ],
)
def test_streaks_make_updates_seldom_while_little_is_missing(
    rate: float, no_swap: int, low: int, pace: Pace
) -> None:
    assert pace_of(Course(200, rate, no_swap, low)) == pace


def test_a_policy_counts_tokens_between_updates_and_streaks_of_them() -> None:
    policy = UpdatePolicy()
    assert not policy.is_due()
    policy.generated()
    assert not policy.is_due()
    policy.generated()
    assert policy.is_due()
    policy.updated(Update(SWAP, (8, 8), (1, 3)))
    assert policy.course == Course(tokens=2, fallback_rate=0.25)
    assert policy.budget == 32
    policy.generated()
    assert policy.is_due()
    for _ in range(3):
        policy.updated(Update((), (8, 8), (0, 0)))
    assert policy.course == Course(tokens=3, no_swap_streak=3, low_streak=3)
    policy.updated(Update(SWAP, (100, 100), (1, 1)))
    assert policy.course == Course(tokens=3, fallback_rate=0.01)
    policy.generated(20)
    assert policy.course.tokens == 23


def test_an_update_without_a_request_says_nothing() -> None:
    policy = UpdatePolicy()
    policy.updated(Update(SWAP, (8,), (4,)))
    before = policy.course
    policy.updated(Update((), (0,), (0,)))
    assert policy.course == before
    assert not policy.is_due()
