"""Messages as they are sent, and as a chat template is given them."""

from typing import Any

import pytest

from expertctl.engine.text.prompt import ConversationMessage
from expertctl.errors import ContextLengthError
from expertctl.http.operation import FieldError, parse_body
from expertctl.server.anthropic.conversation import read_messages
from expertctl.server.anthropic.message_request import CountRequest
from tests.server.anthropic.client import make_body, make_text_block

USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "15 degrees"}
CALL = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Paris"}},
}
IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}


def read(*turns: dict[str, Any], system: Any = None) -> tuple[ConversationMessage, ...]:
    body = parse_body(make_body(messages=list(turns), system=system), CountRequest)
    return read_messages(body.system, body.messages)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def test_text_is_the_same_with_and_without_blocks() -> None:
    plain = read(user("Hi"), assistant("Hello"), user("Bye"), system="Be brief.")
    assert plain == (
        ConversationMessage("system", "Be brief."),
        ConversationMessage("user", "Hi"),
        ConversationMessage("assistant", "Hello"),
        ConversationMessage("user", "Bye"),
    )
    blocks = read(
        user([make_text_block("Hi")]),
        assistant([make_text_block("Hello")]),
        user([make_text_block("Bye")]),
        system=[
            {**make_text_block("Be brief."), "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        ],
    )
    assert blocks == plain


def test_neighbours_of_one_role_are_one_turn() -> None:
    assert read(
        user("a"),
        user([make_text_block("b"), make_text_block("c")]),
        assistant("d"),
        assistant("e"),
        user("f"),
    ) == (
        ConversationMessage("user", "a\nb\nc"),
        ConversationMessage("assistant", "d\ne"),
        ConversationMessage("user", "f"),
    )


def test_an_empty_system_prompt_is_none() -> None:
    assert (
        read(user("Hi"), system="")
        == read(user("Hi"), system=[])
        == (ConversationMessage("user", "Hi"),)
    )


def test_instructions_may_stand_in_the_middle() -> None:
    assert read(
        user("Hi"), {"role": "system", "content": [make_text_block("Stop.")]}, user("Go")
    ) == (
        ConversationMessage("user", "Hi"),
        ConversationMessage("system", "Stop."),
        ConversationMessage("user", "Go"),
    )


def test_a_call_and_its_answer_are_read_as_templates_know_them() -> None:
    assert read(
        user("Weather?"),
        assistant([make_text_block("Let me look."), USE]),
        user([RESULT, make_text_block("And now?")]),
    ) == (
        ConversationMessage("user", "Weather?"),
        ConversationMessage("assistant", "Let me look.", {"tool_calls": [CALL]}),
        ConversationMessage("tool", "15 degrees", {"tool_call_id": "toolu_1", "name": "weather"}),
        ConversationMessage("user", "And now?"),
    )


@pytest.mark.parametrize(
    ("given", "content"),
    [
        ({"content": [make_text_block("15"), make_text_block("degrees")]}, "15\ndegrees"),
        ({"content": ""}, ""),
        ({"content": []}, ""),
        ({"content": "no such city", "is_error": True}, "Error: no such city"),
        ({"content": "fine", "is_error": False}, "fine"),
    ],
)
def test_what_a_tool_answers_may_be_text_blocks_nothing_or_an_error(
    given: dict[str, Any], content: str
) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", **given}
    assert read(user("?"), assistant([USE]), user([result]))[-1].content == content


def test_several_calls_are_answered_in_any_order() -> None:
    second = {**USE, "id": "toolu_2", "name": "now", "input": {}}
    turns = read(
        user("?"),
        assistant([USE, second]),
        user([{**RESULT, "tool_use_id": "toolu_2", "content": "noon"}, RESULT]),
    )
    assert [(m.content, m.fields["name"]) for m in turns[2:]] == [
        ("noon", "now"),
        ("15 degrees", "weather"),
    ]


def test_what_was_thought_goes_back_as_what_templates_call_reasoning() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "msg_1"}
    hidden = {"type": "redacted_thinking", "data": "xyz"}
    turns = read(user("?"), assistant([thought, hidden, make_text_block("Yes.")]), user("Sure?"))
    assert turns[1] == ConversationMessage("assistant", "Yes.", {"reasoning_content": "Hm."})


@pytest.mark.parametrize(
    ("turns", "field"),
    [
        ([user([make_text_block("What is it?"), IMAGE])], "messages[0].content[1]"),
        ([user([DOCUMENT])], "messages[0].content[0]"),
        ([user("?"), assistant([IMAGE]), user("!")], "messages[1].content[0]"),
        (
            [
                user("?"),
                assistant([USE]),
                user([{**RESULT, "content": [make_text_block("a"), IMAGE]}]),
            ],
            "messages[2].content[0].content[1]",
        ),
        ([user([])], "messages[0].content"),
        ([user("")], "messages[0].content"),
        ([user([RESULT])], "messages[0].content[0].tool_use_id"),
        (
            [user("?"), assistant([USE]), user([RESULT, RESULT])],
            "messages[2].content[1].tool_use_id",
        ),
        ([user("?"), assistant([USE, USE]), user([RESULT])], "messages[1].content[1].id"),
        ([user("?"), assistant([USE]), user("Well?")], "messages[2]"),
        ([user("?"), assistant([USE]), assistant("Well?"), user("!")], "messages[2]"),
        ([user("?"), assistant([USE])], "messages"),
        ([user("Say it:"), assistant(" ")], "messages"),
    ],
)
def test_what_is_not_read_is_refused_by_its_place(turns: list[Any], field: str) -> None:
    with pytest.raises(FieldError) as refused:
        read(*turns)
    assert refused.value.field == field
    assert field in refused.value.message


def test_too_much_text_is_refused() -> None:
    with pytest.raises(ContextLengthError, match="500006 characters"):
        read(user("x" * 250_000), assistant("y" * 250_000), user("more…z"))
