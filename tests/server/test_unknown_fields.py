"""Fields that no type knows: left out and named, unless the answer would be another one."""

import json
from typing import Any

import pytest

from expertctl.http.operation import FieldError, ParsedBody, parse_body
from expertctl.server.anthropic.message_request import MessageRequest
from expertctl.server.openai.chat_request import ChatRequest
from expertctl.server.openai.completion_request import CompletionRequest
from expertctl.server.request_body import (
    IGNORED_HEADER,
    MAX_REPORTED,
    build_ignored_headers,
    format_ignored_warning,
    parse_lenient_body,
)

HI: list[Any] = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> ParsedBody[ChatRequest]:
    body = {"model": "auto", "messages": HI, **fields}
    return parse_lenient_body(json.dumps(body).encode(), ChatRequest)


def message(**fields: Any) -> ParsedBody[MessageRequest]:
    body = {"model": "auto", "max_tokens": 9, "messages": HI, **fields}
    return parse_lenient_body(json.dumps(body).encode(), MessageRequest)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep_alive", "5m"),  # Ollama's clients
        ("options", {"num_ctx": 4096}),
        ("enable_thinking", False),  # Qwen's examples
        ("thinking", {"type": "disabled"}),
        ("provider", {"order": ["any"]}),  # OpenRouter's clients
        ("transforms", ["middle-out"]),
        ("cache_prompt", True),  # llama.cpp's clients
        ("include", ["usage"]),
        ("skip_special_tokens", True),  # vLLM's clients
        ("guided_json", None),  # asks for nothing
    ],
)
def test_a_field_of_another_server_is_left_out_and_named(name: str, value: Any) -> None:
    read = chat(**{name: value})
    assert read.ignored_fields == (name,)
    assert read.value == parse_body(
        json.dumps({"model": "auto", "messages": HI}).encode(), ChatRequest
    )


def test_fields_at_any_depth_are_left_out_and_named_once() -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": n, "id": n}]} for n in "abc"]
    tool = {"type": "function", "function": {"name": "f", "returns": {}}, "index": 0}
    read = chat(messages=turns, tools=[tool], stream_options={"chunk_size": 9}, seed=1)
    assert set(read.ignored_fields) == {
        "messages[].content[].id",
        "tools[].index",
        "tools[].function.returns",
        "stream_options.chunk_size",
    }
    assert read.value.seed == 1
    assert len(read.value.messages) == 3


def test_a_coding_agent_may_send_what_later_versions_of_the_api_know() -> None:
    cached = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    read = message(
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        system=[{"type": "text", "text": "You write code.", "cache_control": cached}],
        tools=[{"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}],
    )
    assert set(read.ignored_fields) == {
        "context_management",
        "system[].cache_control.scope",
        "tools[].defer_loading",
    }


def test_how_and_where_an_answer_is_made_is_left_to_the_server_and_said() -> None:
    read = message(speed="fast", inference_geo="us", diagnostics={"previous_message_id": None})
    assert read.ignored_fields == ("speed", "inference_geo", "diagnostics")
    assert message(speed="standard", inference_geo=None).ignored_fields == ()
    body = {"model": "auto", "max_tokens": 9, "messages": HI, "speed": "fast"}
    with pytest.raises(FieldError, match="speed"):  # a server with strict fields
        parse_body(json.dumps(body).encode(), MessageRequest)


def test_what_a_type_leaves_open_is_not_looked_at() -> None:
    schema = {"type": "object", "properties": {"image": {"type": "string"}}, "$defs": {}}
    tool = {"name": "f", "input_schema": schema}
    read = message(tools=[tool])
    assert read.ignored_fields == ()
    assert (read.value.tools or [])[0].input_schema == schema
    assert chat(metadata={"images": "two"}).ignored_fields == ()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"guided_regex": "[a-z]+"}, "guided_regex"),
        ({"guided_choice": ["yes", "no"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"grammar": 'root ::= "yes"'}, "grammar"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        (
            {"messages": [{"role": "user", "content": "What is it?", "images": ["aGk="]}]},
            "messages[].images",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_that_would_change_the_answer_is_refused_by_its_place(
    fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(FieldError) as refused:
        chat(**fields)
    assert refused.value.field == field
    assert field in refused.value.message


def test_a_form_of_the_answer_is_refused_in_a_call_that_does_not_take_it() -> None:
    body = {"model": "auto", "prompt": "Hi", "response_format": {"type": "json_object"}}
    with pytest.raises(FieldError, match="response_format: this call does not support it"):
        parse_lenient_body(json.dumps(body).encode(), CompletionRequest)
    with pytest.raises(FieldError, match=r"output_config\.format"):
        message(output_format={"type": "json_schema", "schema": {"type": "object"}})


def test_tools_that_the_server_would_have_to_call_are_refused() -> None:
    with pytest.raises(FieldError, match="mcp_servers"):
        message(mcp_servers=[{"type": "url", "url": "https://example.com", "name": "a"}])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "hot", "keep_alive": 1},
        {"seed": 1.5, "keep_alive": 1},
        {"stream_options": {"include_usage": 3, "more": 1}, "stream": True},
        {"messages": [{"role": "robot", "content": "Hi", "more": 1}]},
        {"messages": [{"role": "user", "content": [{"type": "hologram", "more": 1}]}]},
    ],
    ids=str,
)
def test_a_known_field_with_a_wrong_value_is_still_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(FieldError):
        chat(**fields)


def test_an_image_is_still_refused() -> None:
    read = chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    assert read.ignored_fields == ()  # refused by name where the conversation is read


def test_names_are_bounded_and_cannot_end_a_header() -> None:
    hostile = {f"a{n}": n for n in range(1000)}
    told = build_ignored_headers(chat(**hostile).ignored_fields)[IGNORED_HEADER]
    assert told.endswith(", and more")
    assert told.count(",") == MAX_REPORTED
    for name in ("x\r\nSet-Cookie: a=b", "ключ", "x" * 10_000):
        read = chat(**{name: 1})
        header = build_ignored_headers(read.ignored_fields)[IGNORED_HEADER]
        assert header.isascii()
        assert header.isprintable()
        assert len(header) <= 80
        assert header in format_ignored_warning(read.ignored_fields)[0]


def test_where_nothing_was_ignored_nothing_is_said() -> None:
    assert build_ignored_headers(()) == {}
    assert format_ignored_warning(()) == ()
