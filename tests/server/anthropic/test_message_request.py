"""Which requests are read, and which are refused, and why."""

from typing import Any

import pytest

from expertctl.http.operation import FieldError, parse_body
from expertctl.server.anthropic.message_request import (
    CountRequest,
    MessageRequest,
    ThinkingEnabled,
    check_thinking_budget,
)
from tests.server.anthropic.client import WEATHER, make_body


def read(**fields: Any) -> MessageRequest:
    return parse_body(make_body(**{"max_tokens": 16, **fields}), MessageRequest)


def test_every_field_of_the_published_api_that_is_done_here_is_read() -> None:
    request = read(
        system="Be brief.",
        stop_sequences=["END"],
        stream=True,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        metadata={"user_id": "u-1"},
        tools=[WEATHER],
        tool_choice={"type": "auto"},
        thinking={"type": "disabled"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        speed="standard",
    )
    assert (request.max_tokens, request.temperature, request.top_k) == (16, 0.5, 40)
    assert request.metadata is not None
    assert request.metadata.user_id == "u-1"


def test_nothing_is_asked_for_by_a_null() -> None:
    nothing = b'"container": null, "metadata": {"user_id": null}, "thinking": null'
    body = make_body(max_tokens=1)[:-1] + b", " + nothing + b"}"
    assert parse_body(body, MessageRequest).thinking is None


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "content[0].type"),
        ({"messages": [{"role": "user", "content": "Hi", "name": "x"}]}, "messages[0]"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
        ({"system": {"text": "x"}}, "system"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"metadata": {"name": "x"}}, "name"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"service_tier": "best"}, "service_tier"),
        ({"cache_control": {"type": "eternal"}}, "cache_control.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"stream": "yes"}, "stream"),
        ({"seed": -1}, "seed"),
        ({"priority": 10}, "priority"),
    ],
)
def test_a_field_that_is_wrong_or_unknown_is_named(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(FieldError) as refused:
        read(**fields)
    assert place in refused.value.message


def test_a_thought_must_fit_into_the_answer() -> None:
    enabled = {"type": "enabled", "budget_tokens": 1024}
    check_thinking_budget(read(thinking=enabled, max_tokens=1025))
    with pytest.raises(FieldError, match="less than max_tokens"):
        check_thinking_budget(read(thinking=enabled, max_tokens=1024))


@pytest.mark.parametrize(
    ("thinking", "thinks", "shown"),
    [
        (None, False, False),
        ({"type": "disabled"}, False, False),
        ({"type": "adaptive"}, True, True),
        ({"type": "adaptive", "display": "omitted"}, True, False),
        ({"type": "enabled", "budget_tokens": 2048}, True, True),
        ({"type": "enabled", "budget_tokens": 2048, "display": "omitted"}, True, False),
        ({"type": "enabled", "budget_tokens": 2048, "display": "summarized"}, True, True),
    ],
)
def test_what_is_thought_is_shown_where_it_is_asked_for(
    thinking: dict[str, Any] | None, thinks: bool, shown: bool
) -> None:
    request = read(thinking=thinking)
    assert (request.enables_thinking, request.shows_thinking) == (thinks, shown)
    assert thinking != {"type": "enabled"} or isinstance(request.thinking, ThinkingEnabled)


def test_counting_takes_a_conversation_and_nothing_about_the_answer() -> None:
    assert parse_body(make_body(system="x", tools=[WEATHER]), CountRequest).system == "x"
    with pytest.raises(FieldError, match="max_tokens"):
        parse_body(make_body(max_tokens=1), CountRequest)
