"""The body of a chat call: every published field is known, and every other is refused."""

from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.shared import reasoning_effort

from expertctl.http.operation import FieldError
from expertctl.server.openai.chat_request import ChatRequest
from expertctl.server.openai.generation_request import check_unsupported
from tests.server.openai.client import make_chat_request

PUBLISHED = {
    *get_type_hints(chat_params.CompletionCreateParamsNonStreaming),
    *get_type_hints(chat_params.CompletionCreateParamsStreaming),
}
OURS = {
    "priority",
    "timeout_ms",
    "cache_key",
    "session_id",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "add_generation_prompt",
    "continue_final_message",
    "exclude_experts",
    "max_experts",
    "chat_template_kwargs",
}


def test_every_published_field_is_known_and_none_but_ours_is_added() -> None:
    known = {field.name for field in msgspec.structs.fields(ChatRequest)}
    assert known - OURS == PUBLISHED
    assert known >= OURS


@pytest.mark.parametrize("name", sorted(PUBLISHED - {"model", "messages"}))
def test_a_published_field_may_be_null(name: str) -> None:
    check_unsupported(make_chat_request(**{name: None}))


@pytest.mark.parametrize(
    "effort", [one for one in get_args(get_args(reasoning_effort.ReasoningEffort)[0])]
)
def test_every_published_reasoning_effort_is_known(effort: str) -> None:
    assert make_chat_request(reasoning_effort=effort).reasoning_effort == effort


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"colour": "red"}, None),  # read strictly; see test_unknown_fields for the usual reading
        ({"model": 5}, "model"),
        ({"model": ""}, "model"),
        ({"messages": None}, "messages"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 200_001}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a" * 201]}, "stop[0]"),
        ({"seed": "1"}, "seed"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_cost": True}}, "stream_options"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"metadata": {str(n): "a" for n in range(17)}}, "metadata"),
        ({"user": "a" * 513}, "user"),
        ({"priority": 10}, "priority"),
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"top_k": -2}, "top_k"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.5}, "repetition_penalty"),
        ({"max_experts": 11}, "max_experts"),
        ({"exclude_experts": ["acme/sql"] * 101}, "exclude_experts"),
        ({"reasoning_effort": "endless"}, "reasoning_effort"),
        ({"tool_choice": "always"}, "tool_choice"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_field_that_is_not_as_it_must_be_is_named(
    fields: dict[str, Any], field: str | None
) -> None:
    with pytest.raises(FieldError) as refused:
        make_chat_request(**fields)
    assert refused.value.field == (field or "")


def test_an_unknown_field_is_named_in_the_message() -> None:
    with pytest.raises(FieldError, match="unknown field `colour`"):
        make_chat_request(colour="red")


def test_whole_numbers_may_be_written_as_fractions() -> None:
    assert make_chat_request(n=2.0, max_tokens=5.0).n == 2
