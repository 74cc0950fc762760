"""The text of a conversation: what experts are chosen by, and how much of it there may be."""

import pytest

from expertctl.engine.text.prompt import ConversationMessage
from expertctl.errors import ContextLengthError
from expertctl.http.operation import FieldError
from expertctl.server.chat_prompt import (
    check_conversation_length,
    check_tools_length,
    find_routing_text,
)
from expertctl.user_request import MAX_PROMPT_CHARACTERS


def test_experts_are_chosen_by_the_last_words_of_the_user() -> None:
    said = [
        ConversationMessage("user", "Sort this"),
        ConversationMessage("assistant", "What?"),
        ConversationMessage("user", "3, 1"),
        ConversationMessage("user", " "),
        ConversationMessage("tool", "a result"),
    ]
    assert find_routing_text(said) == "3, 1"


def test_where_the_user_says_nothing_the_last_words_of_all_count() -> None:
    assert (
        find_routing_text(
            [ConversationMessage("system", "Tell a joke"), ConversationMessage("assistant", "")]
        )
        == "Tell a joke"
    )


def test_a_conversation_without_a_word_is_refused() -> None:
    with pytest.raises(FieldError, match="none of them has text"):
        find_routing_text([ConversationMessage("user", " \n"), ConversationMessage("user", "")])


def test_a_conversation_may_be_as_long_as_a_prompt_and_no_longer() -> None:
    half = MAX_PROMPT_CHARACTERS // 2
    check_conversation_length(
        [ConversationMessage("user", "a" * half), ConversationMessage("assistant", "b" * half)]
    )
    with pytest.raises(ContextLengthError, match=f"at most {MAX_PROMPT_CHARACTERS}"):
        check_conversation_length(
            [
                ConversationMessage("user", "a" * half),
                ConversationMessage("assistant", "b" * (half + 1)),
            ]
        )


def test_thoughts_and_calls_count_like_what_is_said() -> None:
    half = MAX_PROMPT_CHARACTERS // 2
    thought = ConversationMessage("assistant", "a" * half, {"reasoning_content": "b" * half})
    call = ConversationMessage(
        "assistant", "", {"tool_calls": [{"arguments": {"of": "c" * half * 2}}]}
    )
    for message in (thought, call):
        with pytest.raises(ContextLengthError, match=f"at most {MAX_PROMPT_CHARACTERS}"):
            check_conversation_length([message])


def test_tools_have_a_bound_of_their_own() -> None:
    check_tools_length([{"description": "a" * (MAX_PROMPT_CHARACTERS - 13)}])
    with pytest.raises(FieldError, match=f"tools: they have {MAX_PROMPT_CHARACTERS + 1}"):
        check_tools_length([{"description": "a" * (MAX_PROMPT_CHARACTERS - 12)}])


def test_values_without_a_letter_count_too() -> None:
    with pytest.raises(FieldError, match="tools: they have"):
        check_tools_length([{"parameters": {"enum": [[]] * MAX_PROMPT_CHARACTERS}}])
