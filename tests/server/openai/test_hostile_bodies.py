"""Bodies that nobody means well with: each is read, or refused as the client's own fault."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import NotFoundError, UsageError
from expertctl.http.operation import FieldError, parse_body
from expertctl.server.chat_prompt import ChatTemplateTraits
from expertctl.server.openai.chat_request import ChatRequest, build_chat_call
from expertctl.server.openai.completion_request import CompletionRequest, build_completion_call
from expertctl.server.responses import Caller
from expertctl.server.settings import ServeSettings
from tests.server.harness import ServerHarness
from tests.server.openai.test_chat_answer import SCHEMA, WEATHER

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    ],
    "tools": [WEATHER],
    "tool_choice": "auto",
    "response_format": SCHEMA,
    "stop": ["a"],
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "metadata": {"cache_key": "a"},
    "chat_template_kwargs": {"enable_thinking": True},
    "exclude_experts": ["acme/sql"],
    "stream": True,
    "stream_options": {"include_usage": True},
}
COMPLETION: dict[str, Any] = {
    "model": "acme/sql:0.5",
    "prompt": ["a", [1, 2]],
    "stop": "a",
    "n": 2,
    "echo": True,
    "logprobs": 2,
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53) + 1, 2**53 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from(["tiny", "auto", "acme/sql", "function", "text", "json_schema", "user"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    if not isinstance(value, dict | list):
        return [path]
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return [path, *(one for key, child in inner for one in places(child, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], by)
    return copy


def changed(body: dict[str, Any], kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """A body with another value in one place, or in a field that it had not."""
    names = [field.name for field in msgspec.structs.fields(kind)]
    inside = st.sampled_from(places(body)[1:])
    one = st.builds(lambda path, value: replaced(body, path, value), inside, VALUES)
    another = st.builds(lambda name, value: {**body, name: value}, st.sampled_from(names), VALUES)
    return one | another


def refused_or_read(body: Any, read: Callable[[bytes], Any]) -> None:
    with suppress(UsageError, NotFoundError):
        read(json.dumps(body).encode())


@pytest.fixture(scope="module")
def text(scripted: ServerHarness) -> ChatTemplateTraits:
    return ChatTemplateTraits(scripted.engine.tokenizer)


@settings(max_examples=300)
@given(body=changed(CHAT, ChatRequest))
def test_any_chat_is_read_or_refused(text: ChatTemplateTraits, body: Any) -> None:
    def read(data: bytes) -> None:
        build_chat_call(
            parse_body(data, ChatRequest),
            caller=Caller(),
            base_name="tiny",
            template=text,
            settings=ServeSettings(),
        )

    refused_or_read(body, read)


@settings(max_examples=200)
@given(body=changed(COMPLETION, CompletionRequest))
def test_any_completion_is_read_or_refused(text: ChatTemplateTraits, body: Any) -> None:
    def read(data: bytes) -> None:
        build_completion_call(
            parse_body(data, CompletionRequest),
            caller=Caller(),
            base_name="tiny",
            tokenizer=text.tokenizer,
            settings=ServeSettings(),
        )

    refused_or_read(body, read)


def test_the_bodies_that_are_changed_are_good_ones(text: ChatTemplateTraits) -> None:
    request = parse_body(json.dumps(CHAT).encode(), ChatRequest)
    chosen = ServeSettings()
    call = build_chat_call(
        request, caller=Caller(), base_name="tiny", template=text, settings=chosen
    )
    assert call.job.answers == 2
    other = parse_body(json.dumps(COMPLETION).encode(), CompletionRequest)
    calls = build_completion_call(
        other, caller=Caller(), base_name="tiny", tokenizer=text.tokenizer, settings=chosen
    )
    assert len(calls.jobs) == 2


def test_only_a_length_that_the_call_says_bounds_the_least_one(text: ChatTemplateTraits) -> None:
    def read(**fields: Any) -> int:
        body = {"prompt": "a", **fields}
        [job] = build_completion_call(
            parse_body(json.dumps(body).encode(), CompletionRequest),
            caller=Caller(),
            base_name="tiny",
            tokenizer=text.tokenizer,
            settings=ServeSettings(),
        ).jobs
        return job.stop_rules.min_tokens

    assert read(model="auto", min_tokens=20) == 20
    assert read(model="tiny", min_tokens=20, max_tokens=20) == 20
    for fields in ({"model": "tiny"}, {"model": "auto", "max_tokens": 0}):
        with pytest.raises(FieldError, match="min_tokens 20 is more than max_tokens"):
            read(min_tokens=20, **fields)
