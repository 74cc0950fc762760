"""Answers are checked for what was asked of them: of what is said, and of what is called."""

from typing import Any

import pytest

from expertctl.engine.text.answer_format import FormatCheck
from expertctl.http.operation import FieldError
from expertctl.server.json_schema import MAX_PATTERNS, check_json_object
from expertctl.server.output_parser import OutputParserConfig, StrictTool, build_answer_validator
from expertctl.server.tool_parser import HERMES

READING = OutputParserConfig(call_format=HERMES, tools=frozenset({"f", "g"}))
NUMBER: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GOOD = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
BAD = '<tool_call>{"name": "f", "arguments": {"a": "one"}}</tool_call>'
LOOSE = '<tool_call>{"name": "g", "arguments": {"a": "one"}}</tool_call>'


def tool(schema: Any = NUMBER, *, name: str = "f", number: int = 0) -> StrictTool:
    return StrictTool(name, schema, f"tools[{number}].schema")


PLAIN = OutputParserConfig(call_format=HERMES)


def checked(text: str, *, form: Any = None, tools: Any = None) -> FormatCheck:
    check = build_answer_validator(
        READING, text_check=form, tools=(tool(),) if tools is None else tools
    )
    assert check is not None
    found = check(text)
    assert isinstance(found, FormatCheck)
    return found


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        (GOOD, True),
        (BAD, False),
        (GOOD + BAD, False),
        (f"<think>{BAD}</think>{GOOD}", True),
        (f"Look: {GOOD}", True),
        (GOOD + LOOSE, True),
        (LOOSE, None),
    ],
)
def test_every_call_of_a_strict_tool_must_fit_its_schema(text: str, passed: bool | None) -> None:
    assert checked(text).passed is passed


def test_what_does_not_fit_is_said_with_the_tool_and_the_place() -> None:
    assert checked(BAD).problem == (
        'the input of f does not fit its schema: a: "one" is not of type "integer"'
    )


def test_a_form_is_asked_of_what_is_said_only() -> None:
    assert checked("<think>So?</think>{}", form=check_json_object, tools=()).passed is True
    assert checked("So? {}", form=check_json_object, tools=()).passed is False
    assert checked(LOOSE, form=check_json_object, tools=()).passed is None


@pytest.mark.parametrize("text", ["<think>[1]</think>\n\n{}", "{}", f"<think>{BAD}</think>{{}}"])
def test_where_nothing_was_asked_what_is_said_is_returned_for_the_usual_check(text: str) -> None:
    check = build_answer_validator(READING, text_check=None, tools=(tool(),))
    assert check is not None
    assert check(text) == "{}"


def test_an_answer_that_is_said_as_it_is_written_needs_no_check_of_its_own() -> None:
    assert build_answer_validator(PLAIN, text_check=None, tools=()) is None
    assert build_answer_validator(PLAIN, text_check=check_json_object, tools=()) is not None
    thinks = OutputParserConfig(call_format=HERMES, may_think=True)
    assert build_answer_validator(thinks, text_check=None, tools=()) is not None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"$ref": "https://example.com/schema.json"},
        {"type": "object", "patternProperties": {"(?=a)": {}}},
        {"unevaluatedProperties": False},
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_by_its_place(schema: Any) -> None:
    with pytest.raises(FieldError) as refused:
        build_answer_validator(
            READING, text_check=None, tools=(tool(), tool(schema, name="g", number=1))
        )
    assert refused.value.field == "tools[1].schema"


def test_the_schemas_of_all_tools_together_are_bounded_as_one_is() -> None:
    half = {"patternProperties": {f"^{n}$": {} for n in range(MAX_PATTERNS // 2 + 1)}}
    build_answer_validator(READING, text_check=None, tools=(tool(half),))
    with pytest.raises(FieldError, match="patterns") as refused:
        build_answer_validator(
            READING, text_check=None, tools=(tool(half), tool(half, name="g", number=1))
        )
    assert refused.value.field == "tools"
