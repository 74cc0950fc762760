"""Of an answer that was to be JSON the JSON stays: without one fence, and without what follows."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.server.output_parser import (
    JsonExtractor,
    OutputParser,
    OutputParserConfig,
    build_answer_validator,
    extract_json,
)
from expertctl.server.reasoning_parser import MAX_SPACE
from expertctl.server.response_format import ResponseFormat, build_check
from expertctl.server.tool_parser import HERMES, ParsedToolCall, PlainText

INNER = '{"a": [1, 2], "b": "```not a fence```"}'


def in_pieces(text: str, size: int) -> str:
    fence = JsonExtractor()
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
    assert json.loads(in_pieces(text, size)) == json.loads(INNER)
    assert in_pieces(text, size) == extract_json(text)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "",
        INNER,
        f"  {INNER}",
        f"Here it is:\n```json\n{INNER}\n```",
        "```python\nprint(1)\n```",
        "```json and more",
        "``json\n{}\n``",
        "`{}`",
        "```",
        "```json\n",
        " " * (MAX_SPACE + 5) + "```json\n{}\n```",
    ],
)
def test_what_is_no_fence_around_json_stays_as_it_is(text: str, size: int) -> None:
    assert in_pieces(text, size) == text


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"```json\n{INNER}\n```\n\nThis is an object.", INNER),
        (f"{INNER}\n\nThis is an object, ```really```.", INNER),
        (f" \n{INNER} {INNER}", f" \n{INNER}"),
        ('["a", "]"], and so on', '["a", "]"]'),
        ('"a text" and so on', '"a text" and so on'),  # only an object and a list have an end
        ('{"a": oops} and so on', '{"a": oops} and so on'),
        ('```\n{"a": oops}\n```', '{"a": oops}'),
    ],
)
def test_what_follows_whole_json_is_left_out(text: str, left: str, size: int) -> None:
    assert in_pieces(text, size) == left


def test_what_follows_json_stays_where_it_may_be_a_call() -> None:
    text = f'{INNER}\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>'
    whole = OutputParserConfig(call_format=HERMES, tools={"now"}, expects_json=True).parse(text)
    assert (whole.text, whole.calls) == (INNER, (ParsedToolCall("now", {}),))


def test_whoever_reads_the_answer_is_told_what_was_left_out() -> None:
    reading = OutputParserConfig(call_format=HERMES, expects_json=True)
    told = ("a Markdown fence around the JSON was removed", "text after the JSON was left out")
    assert reading.parse(f"```json\n{INNER}\n```\nDone.").warnings == told
    assert reading.parse(f"```json\n{INNER}\n```\n").warnings == told[:1]
    assert reading.parse(f"{INNER}\n").warnings == ()


def test_json_is_given_out_while_it_is_written() -> None:
    fence = JsonExtractor()
    assert fence.push("```js") == ""
    assert fence.push('on\n{"a"') == '{"a"'
    assert fence.push(": [") == ": ["
    assert fence.push("1]}\n") == "1]}"
    assert fence.push("```") == ""
    assert fence.finish() == ""
    assert fence.removed_fence


@given(
    parts=st.lists(st.sampled_from(["```", "`", "json", "\n", " ", "{", "}", "1", "x"])),
    size=st.integers(1, 9),
)
def test_how_a_text_is_cut_does_not_matter(parts: list[str], size: int) -> None:
    text = "".join(parts)
    found = in_pieces(text, size)
    assert found == extract_json(text)
    assert found in text


def test_space_without_end_is_not_held_back() -> None:
    fence = JsonExtractor()
    given_out = fence.push("```\n{") + "".join(fence.push(" " * 100) for _ in range(100))
    assert len(given_out) > 10_000 - MAX_SPACE - 100


@pytest.mark.parametrize("asked", [False, True])
def test_a_fence_goes_only_where_json_was_asked_for(asked: bool) -> None:
    reading = OutputParserConfig(call_format=HERMES, expects_json=asked)
    text = f"```json\n{INNER}\n```"
    whole = reading.parse(f"<think>Hm.</think>{text}")
    assert whole.text == (INNER if asked else text)
    assert whole.warnings == (("a Markdown fence around the JSON was removed",) if asked else ())


def test_a_call_in_a_fence_is_a_call_where_json_was_asked_for() -> None:
    reader = OutputParser(OutputParserConfig(call_format=HERMES, tools={"now"}, expects_json=True))
    parts = [*reader.push('```json\n{"name": "now", "arguments": {}}\n```'), *reader.finish()]
    assert parts == [ParsedToolCall("now", {})]
    reader = OutputParser(OutputParserConfig(call_format=HERMES, tools={"now"}, expects_json=True))
    parts = [*reader.push("```json\n{}"), *reader.finish()]
    assert PlainText("{}") in parts


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
    reading = OutputParserConfig(call_format=HERMES, expects_json=True, prefix=before)
    check = build_answer_validator(reading, text_check=build_check(SCHEMA), tools=())
    assert check is not None
    found = check(text)
    assert not isinstance(found, str)
    assert found.passed is passed


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("before", "text", "left"),
    [
        ("[", '{"a": 1}, {"b": 2}] and so on', '{"a": 1}, {"b": 2}]'),
        ('{"items": [', '{"a": 1}, {"b": 2}]}\n```', '{"a": 1}, {"b": 2}]}'),
        ('{"a": ', '{"b": 1}, "c": 2}', '{"b": 1}, "c": 2}'),
        ('{"a": "\\', '"}", "b": [1]} done', '"}", "b": [1]}'),
        ("```json\n", '{"a": 1}\n```\nDone.', '{"a": 1}'),
        ("```json", '\n{"a": 1}\n```', '{"a": 1}'),
        ("```json\n{", '"a": 1}\n```', '"a": 1}'),
        ("```json\n", "no JSON", "no JSON"),
        ("Here it is:\n", '```json\n{"a": 1}\n```', '{"a": 1}'),
        ("Here it is: [", '{"a": 1}, 2]', '{"a": 1}, 2]'),
    ],
)
def test_json_that_the_request_has_begun_is_followed_to_its_own_end(
    before: str, text: str, left: str, size: int
) -> None:
    fence = JsonExtractor(prefix=before)
    pieces = [fence.push(text[i : i + size]) for i in range(0, len(text), size)]
    assert "".join([*pieces, fence.finish()]) == left


def test_a_fence_that_the_request_wrote_is_not_reported_as_removed() -> None:
    reading = OutputParserConfig(call_format=HERMES, expects_json=True, prefix="```json\n")
    assert reading.parse(f"{INNER}\n```").warnings == ()


def test_long_white_space_in_a_block_is_read_in_linear_time() -> None:
    """A search with two runs of white space took seconds for a thousand spaces and a letter."""
    fence = JsonExtractor(drop_rest=False)
    assert fence.push("```\n{") == "{"
    spaces = " " * (MAX_SPACE - 1)
    given_out = "".join(fence.push(spaces + "1,") for _ in range(200))
    assert given_out + fence.finish() == (spaces + "1,") * 200
