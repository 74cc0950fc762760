"""The tools of a chat call: which of them the model is told of."""

import json
from typing import Any

import pytest

from expertctl.http.operation import FieldError, parse_body
from expertctl.server.openai.chat_request import ChatRequest
from expertctl.server.openai.conversation import list_strict_tools, select_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Tells it", "parameters": SCHEMA}
TOOLS = [
    {"type": "function", "function": {**WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "time"}},
]


def list_offered_tools(choice: Any = None, tools: Any = TOOLS) -> list[Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "tools": tools}
    request = parse_body(json.dumps({**body, "tool_choice": choice}).encode(), ChatRequest)
    return [tool.to_json() for tool in select_tools(request.tools or (), request.tool_choice)]


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(FieldError, match=r"tools\[2\].function.name: duplicate tool name 'time'"):
        list_offered_tools(tools=[*TOOLS, TOOLS[1]])


@pytest.mark.parametrize("choice", [None, "auto"])
def test_the_model_is_told_of_all_tools_in_the_form_that_templates_read(choice: Any) -> None:
    assert list_offered_tools(choice) == [
        {"type": "function", "function": WEATHER},
        {"type": "function", "function": {"name": "time"}},
    ]


def test_a_model_that_may_call_none_is_told_of_none() -> None:
    assert list_offered_tools("none") == []
    assert list_offered_tools(tools=[]) == list_offered_tools("auto", tools=None) == []


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_a_model_is_told_of_the_tools_that_are_allowed_now() -> None:
    assert [one["function"]["name"] for one in list_offered_tools(allowed("auto", "time"))] == [
        "time"
    ]


def test_a_tool_that_is_allowed_but_not_given_is_refused() -> None:
    with pytest.raises(FieldError, match="clock is not one of the tools"):
        list_offered_tools(allowed("auto", "time", "clock"))


def test_strict_tools_are_known_by_their_place_and_without_a_schema_take_nothing() -> None:
    strict = {"type": "function", "function": {"name": "now", "strict": True}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "?"}]}
    request = parse_body(json.dumps({**body, "tools": [*TOOLS, strict]}).encode(), ChatRequest)
    first, last = list_strict_tools(request.tools or ())
    assert (first.name, first.schema, first.field) == (
        "weather",
        SCHEMA,
        "tools[0].function.parameters",
    )
    assert last.schema == {"type": "object", "additionalProperties": False}
    assert last.field == "tools[2].function.parameters"


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "weather"}},
        {"type": "custom", "custom": {"name": "weather"}},
        allowed("required", "weather"),
    ],
)
def test_no_call_can_be_demanded(choice: Any) -> None:
    with pytest.raises(FieldError, match="a tool call cannot be required") as refused:
        list_offered_tools(choice)
    assert refused.value.field == "tool_choice"


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"type": "custom", "custom": {"name": "a"}}, "tools[0].type"),
        ({"type": "function", "function": {"name": "a b"}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "a" * 65}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": ""}}, "tools[0].function.name"),
        ({"type": "function", "function": {}}, "tools[0].function"),
        (
            {"type": "function", "function": {"name": "a", "parameters": 1}},
            "tools[0].function.parameters",
        ),
        ({"type": "function", "function": {"name": "a", "code": "b"}}, "tools[0].function"),
    ],
)
def test_a_malformed_tool_is_refused_with_its_place(tool: Any, field: str) -> None:
    with pytest.raises(FieldError) as refused:
        list_offered_tools(tools=[tool])
    assert refused.value.field == field


def test_more_tools_than_the_published_limit_are_refused() -> None:
    with pytest.raises(FieldError, match="length <= 128") as refused:
        list_offered_tools(tools=[TOOLS[1]] * 129)
    assert refused.value.field == "tools"
