"""Answers parted into what is said, thought and called."""

import pytest

from expertctl.server.answer_reader import AnswerReader, Read, Reading
from expertctl.server.thinking import Thought
from expertctl.server.tool_calls.call import Call
from expertctl.server.tool_calls.call_format import HERMES
from expertctl.server.tool_calls.scanner import Text

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ANSWER = f"<think>So.</think>\n\nLook:{CALL}{CALL}"


def read(reading: Reading, *pieces: str) -> list[Read]:
    reader = AnswerReader(reading)
    return [part for piece in pieces for part in reader.push(piece)] + reader.finish()


def joined(parts: list[Read]) -> list[Read]:
    """Neighbours of one kind as one."""
    whole: list[Read] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(last, Text) and isinstance(part, Text):
            whole[-1] = Text(last.text + part.text)
        elif isinstance(last, Thought) and isinstance(part, Thought):
            whole[-1] = Thought(last.text + part.text)
        else:
            whole.append(part)
    return whole


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_how_an_answer_is_cut_into_pieces_does_not_matter(size: int) -> None:
    pieces = [ANSWER[i : i + size] for i in range(0, len(ANSWER), size)]
    call = Call("f", {"a": 1})
    parts = joined(read(Reading(form=HERMES, tools={"f"}), *pieces))
    assert parts == [Thought("So."), Text("Look:"), call, call]


def test_a_call_in_a_thought_is_a_thought() -> None:
    parts = read(Reading(form=HERMES, tools={"f"}), f"<think>{CALL}</think>No.")
    assert joined(parts) == [Thought(CALL), Text("No.")]


def test_a_prompt_can_begin_the_thought() -> None:
    parts = read(Reading(form=HERMES, opened=True), "So.</think>Yes.")
    assert joined(parts) == [Thought("So."), Text("Yes.")]


def test_calls_beyond_the_one_that_is_wanted_are_counted_and_told_of() -> None:
    reader = AnswerReader(Reading(form=HERMES, tools={"f"}, one_call=True))
    parts = [*reader.push(CALL * 3), *reader.finish()]
    assert parts == [Call("f", {"a": 1})]
    assert reader.calls == 1
    assert reader.warnings == ("calls of tools left out, since one was asked for: 2",)


def test_what_is_said_leaves_out_thoughts_and_calls() -> None:
    whole = Reading(form=HERMES, tools={"f"}).whole(ANSWER)
    assert (whole.said, len(whole.calls), whole.warnings) == ("Look:", 2, ())
    plain = Reading(form=HERMES).whole("Hi")
    assert (plain.said, plain.calls) == ("Hi", ())
