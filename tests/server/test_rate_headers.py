"""What is left of a caller's limits, in the names that each API's clients read."""

from datetime import UTC, datetime

import pytest

from expertctl.server.responses import (
    LimitStatus,
    RateLimits,
    anthropic_rate_headers,
    format_duration,
    openai_rate_headers,
)
from tests.server.conftest import MakeServed
from tests.server.harness import BASE

CHAT = {"model": BASE, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
LIMITS = RateLimits(requests=LimitStatus(60, 59, 1.0), tokens=LimitStatus(20_000, 0, 90.5))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.12, "120ms"), (1, "1s"), (1.25, "1.25s"), (60, "1m0s"), (389.5, "6m29.5s")],
)
def test_a_duration_is_written_as_openai_does(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_each_api_has_names_of_its_own() -> None:
    assert dict(openai_rate_headers(LIMITS)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "20000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m30.5s",
    }
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert dict(anthropic_rate_headers(LIMITS, now=now)) == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "59",
        "anthropic-ratelimit-requests-reset": "2026-01-02T03:04:06Z",
        "anthropic-ratelimit-tokens-limit": "20000",
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": "2026-01-02T03:05:35Z",
    }


def test_without_a_limit_there_is_no_header() -> None:
    assert dict(openai_rate_headers(RateLimits())) == {}


def test_a_key_with_limits_sees_them_shrink_and_end_in_429(make_served: MakeServed) -> None:
    served = make_served()
    served.service.quotas._clock = lambda: 1000.0  # nothing fills again meanwhile
    keys = served.service.keys
    secret = keys.create("few", now=0.0, requests_per_minute=2, tokens_per_minute=10**6).secret
    client = served.client(secret)
    first = client.post("/v1/chat/completions", json=CHAT)
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    used = first.json()["usage"]["total_tokens"]
    assert int(first.headers["x-ratelimit-remaining-tokens"]) == 10**6 - used
    second = client.post("/v1/messages", json=CHAT)
    assert second.headers["anthropic-ratelimit-requests-remaining"] == "0"
    third = client.post("/v1/chat/completions", json=CHAT)
    assert third.status_code == 429
    assert third.headers["x-ratelimit-remaining-requests"] == "0"
    free = keys.create("free", now=0.0).secret
    assert not any("ratelimit" in name for name in served.client(free).get("/v1/models").headers)
