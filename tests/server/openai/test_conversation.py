"""Messages of a chat call: texts are read, all else is refused by its name."""

import json
from typing import Any

import pytest

from expertctl.engine.text.prompt import ConversationMessage
from expertctl.errors import ContextLengthError
from expertctl.http.operation import FieldError, parse_body
from expertctl.server.openai.chat_request import ChatRequest
from expertctl.server.openai.conversation import read_messages
from expertctl.user_request import MAX_PROMPT_CHARACTERS

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def messages(*turns: dict[str, Any]) -> tuple[ConversationMessage, ...]:
    body = {"model": "tiny", "messages": list(turns)}
    return read_messages(parse_body(json.dumps(body).encode(), ChatRequest).messages)


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def test_every_role_is_read_and_developer_is_the_newer_name_of_system() -> None:
    read = messages(
        {"role": "developer", "content": "Be brief."},
        {"role": "system", "content": "Be kind.", "name": "house"},
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "content": "Hello"},
        {"role": "tool", "content": "12", "tool_call_id": "call_1"},
    )
    assert read == (
        ConversationMessage("system", "Be brief."),
        ConversationMessage("system", "Be kind.", {"name": "house"}),
        ConversationMessage("user", "Hi", {"name": "ann"}),
        ConversationMessage("assistant", "Hello"),
        ConversationMessage("tool", "12", {"tool_call_id": "call_1"}),
    )


def test_texts_of_one_message_are_joined_by_line_ends() -> None:
    parts = [text("One"), {**text("Two"), "prompt_cache_breakpoint": {"mode": "explicit"}}]
    [read] = messages({"role": "user", "content": parts})
    assert read.content == "One\nTwo"


def test_a_call_without_text_is_read_with_its_arguments_as_an_object() -> None:
    [_, read] = messages(
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    )
    called = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert read == ConversationMessage("assistant", "", {"tool_calls": [called]})


@pytest.mark.parametrize("wrong", ["{", "[1]", '{"a": 1, "a": 2}', "[" * 5000, '"\\ud800"'])
def test_arguments_that_are_no_object_stay_as_the_model_wrote_them(wrong: str) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": wrong}}
    [_, read] = messages(
        {"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}
    )
    [kept] = read.fields["tool_calls"]  # type: ignore[misc]  # a list, as the test above shows
    assert kept["function"]["arguments"] == wrong  # type: ignore[index,call-overload]


def test_an_answer_is_read_back_in_the_form_that_it_was_given_in() -> None:
    answer = {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "reasoning_content": "A greeting",
    }
    [_, read] = messages({"role": "user", "content": "Hi"}, answer)
    assert read == ConversationMessage("assistant", "Hello", {"reasoning_content": "A greeting"})


def test_a_refusal_is_what_an_assistant_said() -> None:
    [one, other] = messages(
        {"role": "assistant", "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]},
    )
    assert (one.content, other.content) == ("No.", "Never.")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1/secret"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "/etc/passwd"}},
    ],
    ids=lambda part: part["type"],
)
def test_what_is_no_text_is_refused_by_its_name_and_place(part: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match=f"{part['type']} is not supported") as refused:
        messages({"role": "system", "content": "?"}, {"role": "user", "content": [text("a"), part]})
    assert refused.value.field == "messages[1].content[1]"


@pytest.mark.parametrize(
    ("turn", "field"),
    [
        ({"role": "function", "name": "f", "content": "1"}, "messages[0].role"),
        ({"role": "user"}, "messages[0]"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "user", "content": "a", "mood": "b"}, "messages[0]"),
        ({"role": "user", "content": [{"type": "video"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "tool", "content": "a"}, "messages[0]"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": []}, "messages[0].content"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]},
            "messages[0].tool_calls[0].type",
        ),
        ({"content": "a"}, "messages[0]"),
        ("a", "messages[0]"),
    ],
)
def test_a_malformed_message_is_refused_with_its_place(turn: Any, field: str) -> None:
    with pytest.raises(FieldError) as refused:
        messages(turn)
    assert refused.value.field == field


def test_no_message_at_all_is_refused() -> None:
    with pytest.raises(FieldError, match="length >= 1") as refused:
        messages()
    assert refused.value.field == "messages"


def test_more_text_than_any_prompt_may_have_is_refused() -> None:
    half = {"role": "user", "content": "a" * (MAX_PROMPT_CHARACTERS // 2 + 1)}
    with pytest.raises(ContextLengthError, match=f"at most {MAX_PROMPT_CHARACTERS}"):
        messages(half, half)
