"""Answers to chat calls, read by the official client from a server whose words are known."""

import math
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.server.harness import ServerHarness
from tests.server.openai.client import Client, make_client, read_extra_fields
from tests.server.openai.scripted_base import ANSWER, HELLO, INSIDE, THOUGHTS

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def ask(client: Client, said: str = "Hi", **fields: Any) -> ChatCompletion:
    given = {"model": "tiny", "messages": [{"role": "user", "content": said}], "temperature": 0}
    answer = client.chat.completions.create(**{**given, **fields})
    assert isinstance(answer, ChatCompletion)
    ChatCompletion.model_validate(answer.model_dump(exclude_unset=True), strict=True)
    return answer


def test_an_answer_has_its_words_its_end_and_its_tokens(client: Client) -> None:
    answer = ask(client)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert choice.message.role == "assistant"
    assert choice.message.content == "".join(HELLO)
    assert choice.message.refusal is None
    assert choice.message.tool_calls is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(HELLO)
    assert answer.usage.prompt_tokens > 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(HELLO)


def test_an_answer_tells_who_answered_and_how_long_it_took(client: Client) -> None:
    answer = ask(client, model="acme/sql:0.5", seed=7)
    extra = read_extra_fields(answer)
    assert answer.id == f"chatcmpl-{extra['job_id']}"
    assert [(e["ref"], e["weight"]) for e in extra["plan"]["experts"]] == [("acme/sql@1.0.0", 0.5)]
    assert extra["plan"]["seed"] == 7
    assert answer.system_fingerprint == f"fp_{extra['plan']['identity'][7:19]}"
    assert extra["timings_ms"]["total"] > 0
    assert extra["validation_passed"] is None
    assert extra["answers"] == [
        {"index": 0, "finish_reason": "stop", "stopped_by": None, "validation_passed": None}
    ]


def test_the_base_alone_answers_by_its_name_and_with_auto_the_router_chooses(
    client: Client,
) -> None:
    assert read_extra_fields(ask(client))["plan"]["experts"] == []
    assert read_extra_fields(ask(client, model="auto"))["plan"]["base"] == "tiny"


@pytest.mark.parametrize("model", ["tiny", "auto", "acme/sql"])
def test_silence_means_the_same_settings_whatever_the_model(client: Client, model: str) -> None:
    params = read_extra_fields(ask(client, model=model, temperature=None, max_tokens=2))["plan"][
        "params"
    ]
    assert (params["temperature"], params["top_p"]) == (0.6, 0.95)
    assert params["repetition_penalty"] == 1.0


def test_an_answer_ends_with_its_length(client: Client) -> None:
    for limit in ({"max_tokens": 2}, {"max_completion_tokens": 2}):
        answer = ask(client, **limit)
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content == "".join(HELLO[:2])


@pytest.mark.parametrize("stop", ["wör", ["nothing", "wör"]], ids=["one", "several"])
def test_an_answer_ends_before_a_stop_string(client: Client, stop: Any) -> None:
    answer = ask(client, stop=stop)
    assert answer.choices[0].message.content == "Hello, "
    assert answer.choices[0].finish_reason == "stop"
    assert read_extra_fields(answer)["answers"][0]["stopped_by"] == "wör"


def test_several_answers_are_several_choices_and_their_prompt_is_counted_once(
    client: Client,
) -> None:
    answer = ask(client, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"".join(HELLO)}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * len(HELLO)
    assert answer.usage.prompt_tokens == ask(client).usage.prompt_tokens  # type: ignore[union-attr]  # every answer has it


def test_the_scores_of_every_token_are_told_with_its_bytes(client: Client) -> None:
    answer = ask(client, logprobs=True, top_logprobs=2)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    assert [one.token for one in scores.content] == list(HELLO)
    for one, word in zip(scores.content, HELLO, strict=True):
        assert one.bytes == list(word.encode())
        assert math.exp(one.logprob) > 0.99
        assert one.top_logprobs[0].token == word
        assert len(one.top_logprobs) == 2


def test_the_bytes_of_tokens_add_up_to_the_answer_even_where_letters_are_cut(
    served: ServerHarness,
) -> None:
    with make_client(served) as client:
        answer = ask(client, max_tokens=64, logprobs=True, top_logprobs=20)
    [choice] = answer.choices
    assert choice.logprobs is not None
    scores = choice.logprobs.content or []
    others = [other for one in scores for other in one.top_logprobs]
    assert all(one.bytes is not None for one in (*scores, *others))
    assert any("\ufffd" in one.token for one in (*scores, *others))
    written = bytes(byte for one in scores for byte in one.bytes or [])
    assert written.decode(errors="replace") == choice.message.content


def test_without_top_logprobs_no_other_token_is_told(client: Client) -> None:
    scores = ask(client, logprobs=True).choices[0].logprobs
    assert scores is not None
    assert [one.top_logprobs for one in scores.content or []] == [[]] * len(HELLO)


@pytest.mark.parametrize("thinking", [True, "inside"])
def test_what_was_thought_stands_beside_the_answer(client: Client, thinking: Any) -> None:
    answer = ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": thinking}})
    message = answer.choices[0].message
    thoughts = {True: "A greeting is due", "inside": "Still thinking"}
    assert message.model_extra == {"reasoning_content": thoughts[thinking]}
    assert message.content == {True: "Good day", "inside": "Enough"}[thinking]


@pytest.mark.parametrize(
    ("thinking", "tokens"),
    [(True, THOUGHTS.index("</think>") + 1), ("inside", INSIDE.index("Enough")), (False, None)],
)
def test_tokens_that_were_thought_are_told_apart(
    client: Client, thinking: Any, tokens: int | None
) -> None:
    body = {"chat_template_kwargs": {"enable_thinking": thinking}}
    answer = ask(client, n=2, extra_body=body)
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert (details and details.reasoning_tokens) == (tokens and 2 * tokens)
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=body,
    )
    *_, last = stream
    assert last.usage is not None
    details = last.usage.completion_tokens_details
    assert (details and details.reasoning_tokens) == tokens


def test_tools_are_called_and_their_answers_are_read(client: Client) -> None:
    question = {"role": "user", "content": "The weather in Paris?"}
    called = ask(client, tools=[WEATHER], messages=[question])
    message = called.choices[0].message
    assert called.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me look."
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answer = ask(client, tools=[WEATHER], messages=[question, message, result])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "".join(ANSWER)


def test_several_calls_have_ids_of_their_own_and_one_is_kept_where_one_is_wanted(
    client: Client,
) -> None:
    both = ask(client, "both", tools=[WEATHER], n=2)
    calls = [call for choice in both.choices for call in choice.message.tool_calls or []]
    assert len({call.id for call in calls}) == 4
    assert both.choices[0].message.content is None
    one = ask(client, "both", tools=[WEATHER], parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls or []) == 1
    assert read_extra_fields(one)["warnings"] == [
        "tool calls left out, since only one was requested: 1"
    ]


def strict(city: Any) -> Any:
    """The tool, which takes such a city only."""
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    return {
        "type": "function",
        "function": {"name": "weather", "strict": True, "parameters": schema},
    }


@pytest.mark.parametrize(
    ("words", "city", "passed"),
    [
        ("one", {"type": "string"}, True),
        ("one", {"type": "integer"}, False),
        ("both", {"enum": ["Rome"]}, False),
        ("both", {"enum": ["Rome", "Paris"]}, True),
    ],
)
def test_what_a_strict_tool_is_called_with_is_checked_afterwards(
    client: Client, words: str, city: Any, passed: bool
) -> None:
    answer = ask(client, words, tools=[strict(city)])
    assert answer.choices[0].finish_reason == "tool_calls"
    assert read_extra_fields(answer)["validation_passed"] is passed
    assert (
        any("the input of weather" in one for one in read_extra_fields(answer)["warnings"])
        is not passed
    )
    loose = ask(client, words, tools=[WEATHER])
    assert read_extra_fields(loose)["validation_passed"] is None


def test_a_strict_tool_whose_schema_cannot_be_checked_is_refused(client: Client) -> None:
    unread = strict({"$ref": "https://example.com/city"})
    with pytest.raises(openai.BadRequestError, match="city") as refused:
        ask(client, tools=[WEATHER | {"function": {"name": "now"}}, unread])
    assert refused.value.param == "tools[1].function.parameters"
    assert ask(client, tools=[unread], tool_choice="none").choices[0].finish_reason == "stop"


def test_a_model_that_may_not_call_is_told_of_no_tools(client: Client) -> None:
    answer = ask(client, tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content == "".join(HELLO)


SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "sorted",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"sorted": {"type": "array", "items": {"type": "integer"}}},
            "required": ["sorted"],
        },
    },
}


@pytest.mark.parametrize("form", [{"type": "json_object"}, SCHEMA], ids=lambda form: form["type"])
def test_the_form_of_an_answer_is_checked_afterwards(client: Client, form: Any) -> None:
    whole = ask(client, "Sort, as JSON", response_format=form)
    assert read_extra_fields(whole)["validation_passed"] is True
    assert whole.choices[0].finish_reason == "stop"
    cut = ask(client, "Sort, broken", response_format=form)
    assert read_extra_fields(cut)["validation_passed"] is False
    assert any("not JSON" in warning for warning in read_extra_fields(cut)["warnings"])
    assert cut.choices[0].message.content == '{"sorted": [1, 2'
    assert cut.choices[0].finish_reason == "stop"


def test_a_form_is_not_looked_for_in_thoughts_and_calls(client: Client) -> None:
    form = {"type": "json_object"}
    called = ask(client, "both", tools=[WEATHER], response_format=form)
    assert read_extra_fields(called)["validation_passed"] is None
    thought = ask(
        client,
        response_format=form,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    assert read_extra_fields(thought)["validation_passed"] is False


def test_a_form_that_the_prompt_calls_for_is_not_looked_for_in_calls(client: Client) -> None:
    called = ask(client, "The weather, as json", tools=[WEATHER])
    assert called.choices[0].finish_reason == "tool_calls"
    assert read_extra_fields(called)["validation_passed"] is None
    assert read_extra_fields(called)["warnings"] == []
    said = ask(client, "The weather, as json")
    assert read_extra_fields(said)["validation_passed"] is False


def test_an_answer_that_is_read_by_its_type_is_parsed_by_the_client(client: Client) -> None:
    answer = client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "Sort, as JSON"}],
        temperature=0,
        response_format=SCHEMA,
    )
    assert answer.choices[0].message.content == '{"sorted": [1, 2, 3] }'


def test_a_prompt_is_read_once_by_the_same_key_only(client: Client) -> None:
    long = "Tell me everything about prefixes that are read once"
    first = ask(client, long, extra_body={"cache_key": "a"})
    again = ask(client, long, prompt_cache_key="a")
    other = ask(client, long, user="b")
    cached = [one.usage.prompt_tokens_details.cached_tokens for one in (first, again, other)]  # type: ignore[union-attr]  # every answer has it
    assert cached[0] == cached[2] == 0
    assert cached[1] > 40


@pytest.mark.parametrize(
    ("fields", "kind", "param", "code"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, None, "model_not_found"),
        ({"model": "/etc/passwd"}, openai.NotFoundError, None, "model_not_found"),
        ({"model": "acme/none"}, openai.NotFoundError, None, "model_not_found"),
        ({"temperature": 3}, openai.BadRequestError, "temperature", None),
        ({"n": 17}, openai.BadRequestError, None, None),
        (
            {"tool_choice": "required", "tools": [WEATHER]},
            openai.BadRequestError,
            "tool_choice",
            None,
        ),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs", None),
        ({"max_tokens": 1, "max_completion_tokens": 2}, openai.BadRequestError, "max_tokens", None),
        (
            {"max_tokens": 3, "extra_body": {"min_tokens": 9}},
            openai.BadRequestError,
            "min_tokens",
            None,
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            openai.BadRequestError,
            "response_format",
            None,
        ),
        ({"extra_body": {"guided_json": {"a": 1}}}, openai.BadRequestError, "guided_json", None),
        ({"extra_body": {"exclude_experts": ["a b"]}}, openai.BadRequestError, None, None),
        (
            {"extra_body": {"chat_template_kwargs": {"messages": []}}},
            openai.BadRequestError,
            "chat_template_kwargs.messages",
            None,
        ),
        ({"messages": []}, openai.BadRequestError, "messages", None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_errors_are_those_of_the_api(
    client: Client, fields: Any, kind: type[openai.APIStatusError], param: Any, code: Any
) -> None:
    with pytest.raises(kind) as refused:
        ask(client, **fields)
    error = refused.value
    assert (error.param, error.code) == (param, code)
    assert isinstance(error.body, dict)
    assert set(error.body) == {"message", "type", "param", "code"}


def test_a_prompt_beyond_the_context_is_refused(client: Client) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 16384 tokens"):
        ask(client, "a" * 20_000)


def test_an_answer_whose_time_is_over_ends_where_it_is(scripted: ServerHarness) -> None:
    """A time that is over before anything was read leaves no answer; see the suite on sockets."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "timeout_ms": 60_000}
    answer = scripted.client().post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
