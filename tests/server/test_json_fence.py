"""One fence around JSON that was asked for goes; everything else stays."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.server.answer_check import answer_check
from expertctl.server.answer_reader import AnswerReader, Reading
from expertctl.server.json_fence import MAX_SPACE, FenceFilter, without_fence
from expertctl.server.post_processing.check import check_of
from expertctl.server.post_processing.response_format import ResponseFormat
from expertctl.server.tool_calls.call import Call
from expertctl.server.tool_calls.call_format import HERMES
from expertctl.server.tool_calls.scanner import Text

INNER = '{"a": [1, 2], "b": "```not a fence```"}'


def in_pieces(text: str, size: int) -> str:
    fence = FenceFilter()
    pieces = [fence.push(text[i : i + size]) for i in range(0, len(text), size)]
    return "".join([*pieces, fence.finish()])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "text",
    [
        f"```json\n{INNER}\n```",
        f"```\n{INNER}\n```",
        f"\n\n``` JSON \r\n\n{INNER}\r\n```\n\n",
        f"```json\n{INNER}```",
        f"````json\n{INNER}\n````",
        f"```json\n{INNER}",  # the limit cut the end
        f"```json\n{INNER}\n``",
    ],
)
def test_json_is_left_without_its_fence(text: str, size: int) -> None:
    assert json.loads(in_pieces(text, size).rstrip("`")) == json.loads(INNER)
    assert in_pieces(text, size) == without_fence(text)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "",
        INNER,
        f"  {INNER}\n",
        f"Here it is:\n```json\n{INNER}\n```",
        "```python\nprint(1)\n```",
        "```json and more",
        "``json\n{}\n``",
        "`{}`",
        "```",
        "```json\n",
        " " * (MAX_SPACE + 5) + "```json\n{}\n```",
        "[1, 2]\n```",
    ],
)
def test_what_is_no_fence_around_json_stays_as_it_is(text: str, size: int) -> None:
    assert in_pieces(text, size) == text


def test_what_stands_behind_the_fence_is_kept_and_seen_to_be_no_json() -> None:
    text = "```json\n{}\n```\nThis is an empty object."
    assert without_fence(text) == "{}\n```\nThis is an empty object."


def test_json_is_given_out_while_it_is_written() -> None:
    fence = FenceFilter()
    assert fence.push("```js") == ""
    assert fence.push('on\n{"a"') == '{"a"'
    assert fence.push(": 1}\n") == ": 1}"
    assert fence.push("```") == ""
    assert fence.finish() == ""
    assert fence.removed


@given(
    parts=st.lists(st.sampled_from(["```", "`", "json", "\n", " ", "{", "}", "1", "x"])),
    size=st.integers(1, 9),
)
def test_how_a_text_is_cut_does_not_matter(parts: list[str], size: int) -> None:
    text = "".join(parts)
    found = in_pieces(text, size)
    assert found == without_fence(text)
    assert found in text


def test_space_without_end_is_not_held_back() -> None:
    fence = FenceFilter()
    given_out = fence.push("```\n{") + "".join(fence.push(" " * 100) for _ in range(100))
    assert len(given_out) > 10_000 - MAX_SPACE - 100


@pytest.mark.parametrize("asked", [False, True])
def test_a_fence_goes_only_where_json_was_asked_for(asked: bool) -> None:
    reading = Reading(form=HERMES, json_asked=asked)
    text = f"```json\n{INNER}\n```"
    whole = reading.whole(f"<think>Hm.</think>{text}")
    assert whole.said == (INNER if asked else text)
    assert whole.warnings == (("a Markdown fence around the JSON was removed",) if asked else ())


def test_a_call_in_a_fence_is_a_call_where_json_was_asked_for() -> None:
    reader = AnswerReader(Reading(form=HERMES, tools={"now"}, json_asked=True))
    parts = [*reader.push('```json\n{"name": "now", "arguments": {}}\n```'), *reader.finish()]
    assert parts == [Call("now", {})]
    reader = AnswerReader(Reading(form=HERMES, tools={"now"}, json_asked=True))
    parts = [*reader.push("```json\n{}"), *reader.finish()]
    assert Text("{}") in parts


SCHEMA = ResponseFormat("json_schema", schema={"type": "object", "required": ["a"]})


@pytest.mark.parametrize(
    ("before", "text", "passed"),
    [
        ("", f"```json\n{INNER}\n```", True),
        ("", "```json\n[]\n```", False),
        ("{", '"a": 1}', True),
        ("```json\n{", '"a": 1}\n```', True),
        ("{", '"b": 1}', False),
    ],
)
def test_the_check_reads_what_the_client_has_in_the_end(
    before: str, text: str, passed: bool
) -> None:
    reading = Reading(form=HERMES, json_asked=True)
    check = answer_check(reading, form=check_of(SCHEMA), tools=(), before=before)
    assert check is not None
    found = check(text)
    assert not isinstance(found, str)
    assert found.passed is passed
