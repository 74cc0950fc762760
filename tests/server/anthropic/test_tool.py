"""Tools as they are sent, and as a chat template is given them."""

from typing import Any

import pytest

from expertctl.http.operation import FieldError, parse_body
from expertctl.server.anthropic.conversation import OfferedTool, is_single_call, select_tools
from expertctl.server.anthropic.message_request import CountRequest
from tests.server.anthropic.client import WEATHER, make_body


def read(tools: list[Any], choice: dict[str, Any] | None = None) -> tuple[OfferedTool, ...]:
    body = parse_body(make_body(tools=tools, tool_choice=choice), CountRequest)
    return select_tools(body.tools or (), body.tool_choice)


def test_a_tool_is_given_to_templates_as_a_function() -> None:
    [tool] = read([{**WEATHER, "type": "custom", "cache_control": {"type": "ephemeral"}}])
    assert tool.to_json() == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather of a city.",
            "parameters": WEATHER["input_schema"],
        },
    }
    [bare] = read([{"name": "now", "input_schema": {"type": "object"}}])
    assert bare.to_json() == {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object"}},
    }


def test_the_model_is_told_of_all_tools_or_of_none() -> None:
    now = {"name": "now", "input_schema": {"type": "object"}}
    assert [tool.name for tool in read([WEATHER, now])] == ["weather", "now"]
    assert [tool.name for tool in read([WEATHER, now], {"type": "auto"})] == ["weather", "now"]
    assert read([WEATHER, now], {"type": "none"}) == ()


def test_one_call_at_a_time_can_be_asked_for() -> None:
    def asked(choice: dict[str, Any] | None) -> bool:
        body = parse_body(make_body(tools=[WEATHER], tool_choice=choice), CountRequest)
        return is_single_call(body.tool_choice)

    assert asked({"type": "auto", "disable_parallel_tool_use": True})
    assert not asked({"type": "auto"})
    assert not asked({"type": "none"})
    assert not asked(None)


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([WEATHER], {"type": "any"}, "tool_choice"),
        ([WEATHER], {"type": "tool", "name": "weather"}, "tool_choice"),
        ([WEATHER, WEATHER], None, "tools[1].name"),
        ([{"type": "web_search_20250305", "name": "web_search"}], None, "tools[0].type"),
        ([{**WEATHER, "type": "bash_20250124"}], None, "tools[0].type"),
        ([{**WEATHER, "name": "with space"}], None, "tools[0].name"),
        ([{"name": "weather"}], None, "tools[0]"),
        ([WEATHER], {"type": "sometimes"}, "tool_choice.type"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_place(
    tools: list[Any], choice: dict[str, Any] | None, field: str
) -> None:
    with pytest.raises(FieldError) as refused:
        read(tools, choice)
    assert refused.value.field == field
