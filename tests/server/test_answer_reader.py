"""Answers parted into what is said, thought and called."""

import pytest

from expertctl.server.output_parser import OutputParser, OutputParserConfig, OutputPart
from expertctl.server.reasoning_parser import ReasoningText
from expertctl.server.tool_parser import HERMES, ParsedToolCall, PlainText

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ANSWER = f"<think>So.</think>\n\nLook:{CALL}{CALL}"


def read(reading: OutputParserConfig, *pieces: str) -> list[OutputPart]:
    reader = OutputParser(reading)
    return [part for piece in pieces for part in reader.push(piece)] + reader.finish()


def joined(parts: list[OutputPart]) -> list[OutputPart]:
    """Neighbours of one kind as one."""
    whole: list[OutputPart] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(last, PlainText) and isinstance(part, PlainText):
            whole[-1] = PlainText(last.text + part.text)
        elif isinstance(last, ReasoningText) and isinstance(part, ReasoningText):
            whole[-1] = ReasoningText(last.text + part.text)
        else:
            whole.append(part)
    return whole


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_how_an_answer_is_cut_into_pieces_does_not_matter(size: int) -> None:
    pieces = [ANSWER[i : i + size] for i in range(0, len(ANSWER), size)]
    call = ParsedToolCall("f", {"a": 1})
    parts = joined(read(OutputParserConfig(call_format=HERMES, tools={"f"}), *pieces))
    assert parts == [ReasoningText("So."), PlainText("Look:"), call, call]


def test_a_call_in_a_thought_is_a_thought() -> None:
    parts = read(OutputParserConfig(call_format=HERMES, tools={"f"}), f"<think>{CALL}</think>No.")
    assert joined(parts) == [ReasoningText(CALL), PlainText("No.")]


def test_a_prompt_can_begin_the_thought() -> None:
    parts = read(
        OutputParserConfig(call_format=HERMES, starts_in_reasoning=True), "So.</think>Yes."
    )
    assert joined(parts) == [ReasoningText("So."), PlainText("Yes.")]


def test_calls_beyond_the_one_that_is_wanted_are_counted_and_told_of() -> None:
    reader = OutputParser(OutputParserConfig(call_format=HERMES, tools={"f"}, single_call=True))
    parts = [*reader.push(CALL * 3), *reader.finish()]
    assert parts == [ParsedToolCall("f", {"a": 1})]
    assert reader.calls == 1
    assert reader.warnings == ("tool calls left out, since only one was requested: 2",)


def test_what_is_said_leaves_out_thoughts_and_calls() -> None:
    whole = OutputParserConfig(call_format=HERMES, tools={"f"}).parse(ANSWER)
    assert (whole.text, len(whole.calls), whole.warnings) == ("Look:", 2, ())
    plain = OutputParserConfig(call_format=HERMES).parse("Hi")
    assert (plain.text, plain.calls) == ("Hi", ())
