"""API keys, as the official client sends them."""

import time
from typing import Any

import anthropic
import pytest

from tests.server.anthropic.client import make_client
from tests.server.conftest import MakeServed
from tests.server.harness import BASE

ASK: dict[str, Any] = {"model": BASE, "max_tokens": 1}
HI: Any = [{"role": "user", "content": "Hi"}]


def test_where_there_are_keys_one_is_needed(make_served: MakeServed) -> None:
    served = make_served()
    key = served.service.keys.create("alice", now=time.time())
    with make_client(served, "xpk_wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(messages=HI, **ASK)
        assert refused.value.type == "authentication_error"
    with make_client(served, key.secret) as client:
        assert client.messages.create(messages=HI, **ASK).role == "assistant"
    shown = served.client(**{"x-api-key": key.secret})
    assert shown.post("/v1/messages", json={"messages": HI, **ASK}).status_code == 200


def test_what_is_kept_of_one_key_is_not_reached_by_another(make_served: MakeServed) -> None:
    served = make_served()
    keys = [served.service.keys.create(name, now=time.time()) for name in ("alice", "bob")]
    turns: Any = [{"role": "user", "content": "A secret of alice, which is quite long"}]
    ask = {**ASK, "extra_body": {"cache_key": "shared", "temperature": 0}}

    def reused(secret: str) -> int:
        with make_client(served, secret) as client:
            usage = client.messages.create(messages=turns, **ask).usage
        return usage.cache_read_input_tokens or 0

    alice, bob = (key.secret for key in keys)
    assert reused(alice) == 0
    assert reused(alice) > 0
    assert reused(bob) == 0
