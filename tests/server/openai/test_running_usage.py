"""``continuous_usage_stats``: every chunk tells what was read and written until then."""

from typing import Any

import pytest

from tests.server.openai.client import Client

ASK: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6, "stream": True}
OPTIONS: Any = {"include_usage": True, "continuous_usage_stats": True}


def chunks(client: Client, options: Any, **fields: Any) -> list[Any]:
    if "prompt" in fields:
        return list(client.completions.create(**ASK, **fields, stream_options=options))
    return list(client.chat.completions.create(**ASK, **fields, stream_options=options))


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "forever"}]},
        {"messages": [{"role": "user", "content": "forever"}], "n": 2},
        {"prompt": "Hi"},
        {"prompt": ["Hi", "Ho"]},
    ],
    ids=["chat", "two chat answers", "completion", "two prompts"],
)
def test_usage_grows_from_chunk_to_chunk_up_to_that_of_the_whole(
    client: Client, fields: Any
) -> None:
    came = chunks(client, OPTIONS, **fields)
    *running, last = [chunk.usage for chunk in came]
    assert all(usage is not None for usage in running)
    written = [usage.completion_tokens for usage in running]
    assert written == sorted(written)
    assert written[-1] == last.completion_tokens
    assert running[-1].prompt_tokens == last.prompt_tokens
    assert all(u.total_tokens == u.prompt_tokens + u.completion_tokens for u in running)


def test_each_chunk_counts_the_tokens_up_to_it(client: Client) -> None:
    came = chunks(client, OPTIONS, messages=[{"role": "user", "content": "forever"}])
    said = [(c.choices[0].delta.content, c.usage.completion_tokens) for c in came[:-1]]
    assert said[:3] == [("", 0), ("On", 1), (" and", 2)]


@pytest.mark.parametrize("options", [{"include_usage": True}, {"continuous_usage_stats": True}])
def test_otherwise_only_the_last_chunk_has_usage_if_any(client: Client, options: Any) -> None:
    came = chunks(client, options, messages=[{"role": "user", "content": "forever"}])
    assert not any(chunk.usage for chunk in came[:-1])
    assert bool(came[-1].usage) is bool(options.get("include_usage"))
