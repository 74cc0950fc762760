"""Streams of chat calls: what the official client makes of the chunks is the whole answer."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.server.harness import ServerHarness
from tests.server.openai.client import Client, read_extra_fields
from tests.server.openai.scripted_base import BOTH, HELLO
from tests.server.openai.test_chat_answer import WEATHER, ask

TOOLS = {"tools": [WEATHER]}
USAGE = {"stream_options": {"include_usage": True}}


def chunks(client: Client, said: str = "Hi", **fields: Any) -> list[ChatCompletionChunk]:
    given = {"model": "tiny", "messages": [{"role": "user", "content": said}], "temperature": 0}
    stream = client.chat.completions.create(**{**given, **fields}, stream=True)
    read = list(stream)
    for chunk in read:
        ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True), strict=True)
    return read


def lines(served: ServerHarness, **fields: Any) -> Iterator[str]:
    """The lines of a stream as they are on the wire."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    answer = served.client().post("/v1/chat/completions", json={**body, **fields})
    assert answer.headers["content-type"].startswith("text/event-stream")
    return (line for line in answer.text.split("\n\n") if line)


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(client: Client) -> None:
    read = chunks(client)
    assert len({(one.id, one.created, one.model, one.object) for one in read}) == 1
    assert read[0].choices[0].delta.model_dump(exclude_unset=True) == {
        "role": "assistant",
        "content": "",
    }
    assert "".join(one.choices[0].delta.content or "" for one in read) == "".join(HELLO)
    assert [one.choices[0].finish_reason for one in read] == [None] * (len(read) - 1) + ["stop"]
    assert all(one.usage is None for one in read)
    assert read_extra_fields(read[-1])["plan"]["base"] == "tiny"
    assert not any("expertctl" in (one.model_extra or {}) for one in read[:-1])


def test_every_word_is_sent_when_it_is_certain(client: Client) -> None:
    said = [one.choices[0].delta.content for one in chunks(client)]
    assert said == ["", *HELLO, None]


def test_a_stream_ends_with_done(scripted: ServerHarness) -> None:
    assert list(lines(scripted))[-1] == "data: [DONE]"


def test_usage_comes_last_and_is_null_before(scripted: ServerHarness) -> None:
    *read, done = lines(scripted, **USAGE)
    documents = [json.loads(line.removeprefix("data: ")) for line in read]
    assert all(one["usage"] is None for one in documents[:-1])
    assert documents[-1]["choices"] == []
    assert documents[-1]["usage"]["completion_tokens"] == len(HELLO)
    assert "expertctl" in documents[-1]
    assert done == "data: [DONE]"


def test_without_being_asked_for_there_is_no_word_of_usage(scripted: ServerHarness) -> None:
    assert not any('"usage"' in line for line in lines(scripted))


def test_several_answers_come_by_their_index(client: Client) -> None:
    read = chunks(client, n=3, **USAGE)
    texts = {0: "", 1: "", 2: ""}
    ended = {}
    for one in read:
        for choice in one.choices:
            texts[choice.index] += choice.delta.content or ""
            ended[choice.index] = choice.finish_reason
    assert texts == dict.fromkeys(range(3), "".join(HELLO))
    assert ended == dict.fromkeys(range(3), "stop")
    assert read[-1].usage is not None
    assert read[-1].usage.completion_tokens == 3 * len(HELLO)


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("Hi", {}),
        ("Hi", {"n": 2}),
        ("Hi", {"stop": "wör"}),
        ("Hi", {"logprobs": True, "top_logprobs": 3}),
        ("Hi", {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}),
        ("Hi", {"extra_body": {"chat_template_kwargs": {"enable_thinking": "inside"}}}),
        ("Where?", TOOLS),
        ("both", TOOLS),
        ("both", {**TOOLS, "parallel_tool_calls": False}),
        ("Sort, broken", {"response_format": {"type": "json_object"}}),
    ],
    ids=str,
)
def test_what_is_streamed_is_what_is_answered_at_once(
    client: Client, said: str, fields: Any
) -> None:
    at_once = ask(client, said, **fields)
    messages: Any = [{"role": "user", "content": said}]
    with client.chat.completions.stream(
        model="tiny", messages=messages, temperature=0, **fields, **USAGE
    ) as stream:
        streamed = stream.get_final_completion()
    assert len(streamed.choices) == len(at_once.choices)
    for one, other in zip(streamed.choices, at_once.choices, strict=True):
        assert one.finish_reason == other.finish_reason
        assert (one.message.content or "") == (other.message.content or "")
        assert reasoning(one.message) == reasoning(other.message)
        assert calls(one.message) == calls(other.message)
        assert scores(one) == scores(other)
    assert streamed.usage is not None
    assert at_once.usage is not None
    assert streamed.usage.completion_tokens == at_once.usage.completion_tokens


def reasoning(message: Any) -> Any:
    return (message.model_extra or {}).get("reasoning_content")


def calls(message: Any) -> list[tuple[str, str]]:
    return [(one.function.name, one.function.arguments) for one in message.tool_calls or []]


def scores(choice: Any) -> Any:
    return choice.logprobs and choice.logprobs.model_dump()["content"]


def test_a_stream_that_is_cut_off_says_so(client: Client) -> None:
    read = chunks(client, max_tokens=2)
    assert [one.choices[0].delta.content for one in read] == ["", *HELLO[:2], None]
    assert read[-1].choices[0].finish_reason == "length"


def test_calls_come_with_their_place_their_id_and_their_arguments(client: Client) -> None:
    read = chunks(client, "both", **TOOLS)
    called = [call for one in read for call in one.choices[0].delta.tool_calls or []]
    assert [call.index for call in called] == [0, 1]
    assert all(call.id and call.type == "function" for call in called)
    assert [call.function and call.function.arguments for call in called] == [
        '{"city": "Rome"}',
        '{"city": "Paris"}',
    ]
    assert not any(one.choices[0].delta.content for one in read)
    assert sum(map(len, BOTH)) > 100  # what is written is long, and none of it is told


def test_an_error_before_the_first_word_is_an_ordinary_answer(client: Client) -> None:
    with pytest.raises(openai.NotFoundError):
        chunks(client, model="acme/none")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 16384 tokens"):
        chunks(client, "a" * 20_000)
