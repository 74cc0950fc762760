"""How often a caller may ask, and how much it may have."""

from dataclasses import dataclass

import pytest

from expertctl.errors import RateLimitError
from expertctl.server.responses import Caller, Quotas


@dataclass
class QuotaClock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def test_who_has_no_limits_is_never_told_to_wait() -> None:
    quotas = Quotas(QuotaClock())
    for _ in range(1000):
        quotas.count_request(Caller())
    quotas.spend_tokens("local", 10**9)
    quotas.require_tokens("local")


def test_requests_beyond_the_limit_wait() -> None:
    clock = QuotaClock()
    quotas, caller = Quotas(clock), Caller(id="a", requests_per_minute=2)
    quotas.count_request(caller)
    quotas.count_request(caller)
    with pytest.raises(RateLimitError, match="requests") as caught:
        quotas.count_request(caller)
    assert caught.value.retry_after == 30
    quotas.count_request(Caller(id="b", requests_per_minute=2))
    clock.now += 30
    quotas.count_request(caller)


def test_an_answer_that_took_more_than_there_was_is_waited_for() -> None:
    clock = QuotaClock()
    quotas, caller = Quotas(clock), Caller(id="a", tokens_per_minute=100)
    quotas.count_request(caller)
    quotas.require_tokens("a")
    quotas.spend_tokens("a", 200)
    with pytest.raises(RateLimitError, match="tokens") as caught:
        quotas.require_tokens("a")
    assert caught.value.retry_after == 61
    clock.now += 61
    quotas.require_tokens("a")


def test_a_limit_that_was_taken_away_counts_no_more() -> None:
    quotas = Quotas(QuotaClock())
    quotas.count_request(Caller(id="a", tokens_per_minute=1))
    quotas.spend_tokens("a", 50)
    quotas.count_request(Caller(id="a"))
    quotas.require_tokens("a")
