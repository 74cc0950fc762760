"""What a call says, and what it is called."""

import json

from expertctl.server.tool_parser import (
    MAX_CALLS,
    ParsedToolCall,
    make_call_id,
    parse_named_call,
    parse_tool_calls,
)


def test_ids_are_the_same_each_time_and_differ_from_each_other() -> None:
    ids = [make_call_id("call_", job_id=job, number=n) for job in ("a", "b") for n in range(3)]
    assert len(set(ids)) == 6
    assert ids[0] == make_call_id("call_", job_id="a", number=0)
    assert ids[0].startswith("call_")
    assert len(ids[0]) == len("call_") + 24
    assert make_call_id("toolu_", job_id="a", number=0) == ids[0].replace("call_", "toolu_")


def test_arguments_are_written_as_json() -> None:
    call = ParsedToolCall("get", {"city": "Zürich", "days": [1, 2.5, None]})
    assert json.loads(call.arguments_json) == call.arguments
    assert "Zürich" in call.arguments_json


def test_a_list_beyond_the_bound_is_no_call() -> None:
    one = {"name": "now", "arguments": {}}
    assert len(parse_tool_calls(json.dumps([one] * MAX_CALLS), tools=["now"]) or ()) == MAX_CALLS
    assert parse_tool_calls(json.dumps([one] * (MAX_CALLS + 1)), tools=["now"]) is None


def test_half_a_character_is_no_call() -> None:
    assert parse_tool_calls('{"name": "now", "arguments": {"a": "\ud800"}}', tools=["now"]) is None
    assert parse_named_call("now", '{"a": "\\ud800"}') is None
