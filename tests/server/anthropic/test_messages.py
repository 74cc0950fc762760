"""Messages asked for with the official client, of a real engine whose answers are known."""

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, TextBlock, ThinkingBlock, ToolUseBlock

from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.request import RunRequest
from expertctl.routing.planner import Planner
from expertctl.routing.request import RouteRequest
from expertctl.settings import Home, Settings
from expertctl.user_request import SamplingOverrides, UserMessage
from tests.server.anthropic.client import WEATHER
from tests.server.harness import BASE, ServerHarness
from tests.server.openai.scripted_base import ANSWER, HELLO, THOUGHTS

ASK: dict[str, Any] = {"model": BASE, "max_tokens": 64, "extra_body": {"temperature": 0}}
HI = [{"role": "user", "content": "Hi"}]
THINKING = {"type": "enabled", "budget_tokens": 1024}


def said(message: Message) -> str:
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def by_engine(served: ServerHarness, prompt: str, *, max_tokens: int) -> Any:
    """What `run` answers, greedily, with the base alone."""
    planner = Planner.open(Settings(Home(served.user_home.root), encoder="lexical"))
    wishes = SamplingOverrides(temperature=0.0, max_tokens=max_tokens)
    request = RunRequest(
        message=UserMessage(prompt=prompt),
        route=RouteRequest(prompt=prompt, base_alone=True, sampling=wishes),
    )
    engine = LocalEngine(planner, budget=64 << 20)
    running = engine.run(request)
    try:
        while True:
            next(running)
    except StopIteration as done:
        return done.value
    finally:
        engine.close()


def test_a_message_is_what_the_published_api_calls_one(client: anthropic.Anthropic) -> None:
    raw = client.messages.with_raw_response.create(messages=HI, **ASK)
    message = Message.model_validate(raw.http_response.json(), strict=True)
    assert raw.headers["request-id"].startswith("req_")
    assert message.id.startswith("msg_")
    assert (message.role, message.type, message.model) == ("assistant", "message", BASE)
    assert [block.type for block in message.content] == ["text"]
    assert said(message) == "".join(HELLO)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


def test_the_text_and_the_counts_are_those_of_the_engine(
    client: anthropic.Anthropic, scripted: ServerHarness
) -> None:
    wanted = by_engine(scripted, "Hi there", max_tokens=3)
    ask = {**ASK, "max_tokens": 3, "extra_body": {"temperature": 0, "cache_key": "counts"}}
    message = client.messages.create(messages=[{"role": "user", "content": "Hi there"}], **ask)
    assert said(message) == wanted.generated.text
    assert message.stop_reason == "max_tokens"
    assert message.usage.input_tokens == wanted.prompt_tokens
    assert message.usage.output_tokens == len(wanted.generated.tokens) == 3
    assert message.usage.cache_read_input_tokens == 0


def test_what_was_kept_is_counted_apart(client: anthropic.Anthropic) -> None:
    ask = {**ASK, "metadata": {"user_id": "u-kept"}}
    first = client.messages.create(messages=HI, **ask)
    again = client.messages.create(
        messages=[*HI, {"role": "assistant", "content": said(first)}, *HI], **ask
    )
    whole = first.usage.input_tokens + len(HELLO)
    assert first.usage.cache_read_input_tokens == 0
    assert 0 < (again.usage.cache_read_input_tokens or 0) <= whole
    stranger = client.messages.create(messages=HI, **{**ask, "metadata": {"user_id": "u-other"}})
    assert stranger.usage.cache_read_input_tokens == 0
    assert stranger.usage.input_tokens == first.usage.input_tokens


def test_a_stop_sequence_ends_the_answer_and_is_named(client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=HI, stop_sequences=["nope", "wörld"], **ASK)
    assert said(message) == "Hello, "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "wörld")


def test_a_tool_is_called_and_what_it_says_is_answered(client: anthropic.Anthropic) -> None:
    question: Any = {"role": "user", "content": "Weather in Paris?"}
    first = client.messages.create(messages=[question], tools=[WEATHER], **ASK)
    text, call = first.content
    assert isinstance(text, TextBlock)
    assert isinstance(call, ToolUseBlock)
    assert text.text == "Let me look."
    assert (call.name, call.input) == ("weather", {"city": "Paris"})
    assert call.id.startswith("toolu_")
    assert first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    second = client.messages.create(
        messages=[
            question,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ],
        tools=[WEATHER],
        **ASK,
    )
    assert said(second) == "".join(ANSWER)
    assert second.stop_reason == "end_turn"


@pytest.mark.parametrize(("alone", "cities"), [(False, ["Rome", "Paris"]), (True, ["Rome"])])
def test_several_tools_are_called_unless_one_is_asked_for(
    client: anthropic.Anthropic, alone: bool, cities: list[str]
) -> None:
    message = client.messages.create(
        messages=[{"role": "user", "content": "both"}],
        tools=[WEATHER],
        tool_choice={"type": "auto", "disable_parallel_tool_use": alone},
        **ASK,
    )
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    assert [call.input["city"] for call in calls] == cities
    assert len({call.id for call in calls}) == len(cities) == len(message.content)
    extension = message.to_dict()["expertctl"]
    assert isinstance(extension, dict)
    assert any("left out" in warning for warning in extension["warnings"]) is alone


def strict(city: Any) -> Any:
    """The tool, which takes such a city only."""
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    return {**WEATHER, "strict": True, "input_schema": schema}


@pytest.mark.parametrize(
    ("words", "city", "passed"),
    [
        ("one", {"type": "string"}, True),
        ("one", {"type": "integer"}, False),
        ("both", {"enum": ["Rome"]}, False),
    ],
)
def test_what_a_strict_tool_is_called_with_is_checked_afterwards(
    client: anthropic.Anthropic, words: str, city: Any, passed: bool
) -> None:
    asked: Any = [{"role": "user", "content": words}]
    message = client.messages.create(messages=asked, tools=[strict(city)], **ASK)
    assert message.stop_reason == "tool_use"
    extension: Any = message.to_dict()["expertctl"]
    assert extension["validation_passed"] is passed
    warned = any("the input of weather" in warning for warning in extension["warnings"])
    assert warned is not passed


def test_a_strict_tool_whose_schema_cannot_be_checked_is_refused(
    client: anthropic.Anthropic,
) -> None:
    unread = strict({"$ref": "https://example.com/city"})
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.input_schema"):
        client.messages.create(messages=HI, tools=[unread], **ASK)


def test_without_a_choice_of_tools_the_model_is_told_of_none(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        messages=HI, tools=[WEATHER], tool_choice={"type": "none"}, **ASK
    )
    assert said(message) == "".join(HELLO)


def test_a_call_of_a_tool_that_was_not_offered_stays_text(client: anthropic.Anthropic) -> None:
    other = {"name": "now", "input_schema": {"type": "object"}}
    message = client.messages.create(messages=HI, tools=[other], **ASK)
    assert [block.type for block in message.content] == ["text"]
    assert '<tool_call>{"name": "weather"' in said(message)


def test_thinking_is_a_block_where_it_is_asked_for(client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=HI, thinking=THINKING, **{**ASK, "max_tokens": 2048})
    thought, text = message.content
    assert isinstance(thought, ThinkingBlock)
    assert isinstance(text, TextBlock)
    assert thought.thinking == "A greeting is due"
    assert thought.signature
    assert text.text == "Good day"
    back = client.messages.create(
        messages=[*HI, {"role": "assistant", "content": message.content}, *HI], **ASK
    )
    assert said(back) == "".join(HELLO)


@pytest.mark.parametrize("thinking", [{"type": "adaptive", "display": "omitted"}])
def test_thinking_that_is_not_asked_for_is_left_out(
    client: anthropic.Anthropic, thinking: Any
) -> None:
    message = client.messages.create(messages=HI, thinking=thinking, **ASK)
    assert [block.type for block in message.content] == ["text"]
    assert said(message) == "Good day"
    assert message.usage.output_tokens == 6


@pytest.mark.parametrize(
    ("thinking", "tokens"),
    [
        ({"type": "adaptive"}, THOUGHTS.index("</think>") + 1),
        ({"type": "adaptive", "display": "omitted"}, THOUGHTS.index("</think>") + 1),
        ({"type": "disabled"}, None),
    ],
)
def test_tokens_that_were_thought_are_told_apart(
    client: anthropic.Anthropic, thinking: Any, tokens: int | None
) -> None:
    whole = client.messages.create(messages=HI, thinking=thinking, **ASK)
    with client.messages.stream(messages=HI, thinking=thinking, **ASK) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        details = message.usage.output_tokens_details
        assert (details and details.thinking_tokens) == tokens


@pytest.mark.parametrize(("words", "passed"), [("JSON", True), ("broken JSON", False)])
def test_an_answer_is_checked_against_a_schema_after_the_fact(
    client: anthropic.Anthropic, words: str, passed: bool
) -> None:
    schema = {
        "type": "object",
        "properties": {"sorted": {"type": "array", "items": {"type": "integer"}}},
        "required": ["sorted"],
    }
    message = client.messages.create(
        messages=[{"role": "user", "content": words}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
        **ASK,
    )
    extension = message.to_dict()["expertctl"]
    assert isinstance(extension, dict)
    assert extension["validation_passed"] is passed
    assert passed is False or json.loads(said(message)) == {"sorted": [1, 2, 3]}


def test_the_extension_tells_of_the_job_and_its_plan(client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=HI, **{**ASK, "model": "acme/sql:0.5"})
    extension: Any = message.to_dict()["expertctl"]
    assert message.id == f"msg_{extension['job_id']}"
    assert extension["plan"]["identity"].startswith("sha256:")
    [expert] = extension["plan"]["experts"]
    assert (expert["ref"], expert["weight"]) == ("acme/sql@1.0.0", 0.5)
    assert extension["warnings"] == []
    assert extension["timings_ms"]["total"] > 0
    assert message.model == "acme/sql:0.5"


def test_a_budget_of_thought_is_said_to_be_none(client: anthropic.Anthropic) -> None:
    message = client.messages.create(messages=HI, thinking=THINKING, **{**ASK, "max_tokens": 2048})
    extension: Any = message.to_dict()["expertctl"]
    assert any("budget_tokens" in warning for warning in extension["warnings"])


def test_an_answer_whose_time_is_over_before_it_begins_is_an_error(
    client: anthropic.Anthropic,
) -> None:
    ask = {**ASK, "extra_body": {"temperature": 0, "timeout_ms": 1}}
    with pytest.raises(anthropic.APIStatusError, match="passed before it started"):
        client.messages.create(messages=HI, **ask)


@pytest.mark.parametrize("count", [{}, {"system": "Be brief."}, {"tools": [WEATHER]}])
def test_tokens_are_counted_as_they_are_read(
    client: anthropic.Anthropic, count: dict[str, Any]
) -> None:
    counted = client.messages.count_tokens(model=BASE, messages=HI, **count)
    ask = {**ASK, "metadata": {"user_id": f"u-{sorted(count)}"}}
    read = client.messages.create(messages=HI, **count, **ask)
    assert counted.input_tokens == read.usage.input_tokens
    assert counted.input_tokens > 0


def test_tokens_of_a_model_that_is_not_there_are_not_counted(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="gpt-9", messages=HI)
