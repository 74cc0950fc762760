"""How often a caller may ask, and how much it may have."""

from dataclasses import dataclass

import pytest

from expertctl.errors import RateLimitError
from expertctl.server.caller import Caller
from expertctl.server.quotas import Quotas


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def test_who_has_no_limits_is_never_told_to_wait() -> None:
    quotas = Quotas(Clock())
    for _ in range(1000):
        quotas.enter(Caller())
    quotas.spend("local", 10**9)
    quotas.demand_tokens("local")


def test_requests_beyond_the_limit_wait() -> None:
    clock = Clock()
    quotas, caller = Quotas(clock), Caller(id="a", requests_per_minute=2)
    quotas.enter(caller)
    quotas.enter(caller)
    with pytest.raises(RateLimitError, match="requests") as caught:
        quotas.enter(caller)
    assert caught.value.retry_after == 30
    quotas.enter(Caller(id="b", requests_per_minute=2))
    clock.now += 30
    quotas.enter(caller)


def test_an_answer_that_took_more_than_there_was_is_waited_for() -> None:
    clock = Clock()
    quotas, caller = Quotas(clock), Caller(id="a", tokens_per_minute=100)
    quotas.enter(caller)
    quotas.demand_tokens("a")
    quotas.spend("a", 200)
    with pytest.raises(RateLimitError, match="tokens") as caught:
        quotas.demand_tokens("a")
    assert caught.value.retry_after == 61
    clock.now += 61
    quotas.demand_tokens("a")


def test_a_limit_that_was_taken_away_counts_no_more() -> None:
    quotas = Quotas(Clock())
    quotas.enter(Caller(id="a", tokens_per_minute=1))
    quotas.spend("a", 50)
    quotas.enter(Caller(id="a"))
    quotas.demand_tokens("a")
