"""Answers that continue a text of the client which ends inside a mark: of a call, or of a thought.

The oracle is the same answer without a beginning in the request: what is read of the two texts
together, less the text that the client sent.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.server.output_parser import OutputParser, OutputParserConfig, OutputPart
from expertctl.server.reasoning_parser import ReasoningText, find_partial_tag, split_reasoning
from expertctl.server.tool_parser import (
    HERMES,
    LLAMA,
    MISTRAL,
    ParsedToolCall,
    PlainText,
    ToolCallFormat,
)

NOW = '{"name": "now", "arguments": {"zone": "CET"}}'
CALLED = ParsedToolCall("now", {"zone": "CET"})
WRITTEN = [
    (HERMES, f"<tool_call>{NOW}</tool_call>"),
    (HERMES, f"<tool_call>\n{NOW}\n</tool_call>"),
    (HERMES, NOW),
    (LLAMA, f"<|python_tag|>{NOW}"),
    (LLAMA, NOW),
    (MISTRAL, f"[TOOL_CALLS][{NOW}]"),
    (MISTRAL, '[TOOL_CALLS]now[ARGS]{"zone": "CET"}'),
]


def reading_of(form: ToolCallFormat, begun: str, **more: Any) -> OutputParserConfig:
    return OutputParserConfig(
        call_format=form,
        tools={"now"},
        may_think=True,
        starts_in_reasoning=begun.rfind("<think>") > begun.rfind("</think>"),
        prefix=split_reasoning(begun)[0],
        partial_tag=find_partial_tag(begun),
        **more,
    )


def read(reading: OutputParserConfig, text: str, *, size: int = 1000) -> list[OutputPart]:
    """Read a text in pieces, and join parts of one kind that stand side by side."""
    reader, parts = OutputParser(reading), list[OutputPart]()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for part in [*(one for piece in pieces for one in reader.push(piece)), *reader.finish()]:
        last = parts[-1] if parts else None
        if isinstance(part, PlainText | ReasoningText) and type(last) is type(part):
            parts[-1] = type(part)(last.text + part.text)
        else:
            parts.append(part)
    return parts


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(("form", "written"), WRITTEN, ids=str)
def test_a_call_is_read_wherever_the_clients_text_ends_in_it(
    form: ToolCallFormat, written: str, size: int
) -> None:
    for cut in range(1, len(written) - 1):
        begun, rest = written[:cut], written[cut:]
        if begun.rstrip().endswith(NOW):  # the client sent the call itself
            continue
        assert read(reading_of(form, begun), rest, size=size) == [CALLED], begun


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_behind_words_of_the_client_is_read(size: int) -> None:
    begun = "Let me look. <tool_"
    assert read(reading_of(HERMES, begun), f"call>{NOW}</tool_call>", size=size) == [CALLED]
    said = read(reading_of(HERMES, begun), f"call>{NOW}</tool_call> Done.", size=size)
    assert said == [CALLED, PlainText("Done.")]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("begun", "rest"),
    [
        ("<tool_", "box> is a word"),
        ("a <", " b, and more"),
        ("<tool_call>", " is the mark"),
        ('<tool_call>{"name": "x', '", "arguments": {}}</tool_call> and so on'),
        ('{"a', '": 1} is an object'),
        ("<thi", "rd> is no tag"),
        ("<t", "r> is a row"),
        ("So <tool_call>", '{"name": "other", "arguments": {}}</tool_call>'),
    ],
)
def test_what_turns_out_to_be_no_mark_is_given_out_once_and_only_from_the_model(
    begun: str, rest: str, size: int
) -> None:
    assert read(reading_of(HERMES, begun), rest, size=size) == [PlainText(rest)]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("begun", "rest", "parts"),
    [
        ("<thi", "nk>Hm.</think>Yes", [ReasoningText("Hm."), PlainText("Yes")]),
        ("<think>Hm.</th", "ink>Yes", [PlainText("Yes")]),
        ("<think>Hm.</th", "e> what</think>Yes", [ReasoningText("e> what"), PlainText("Yes")]),
        ("<think>Hm.</think><tool_", f"call>{NOW}</tool_call>", [CALLED]),
    ],
)
def test_a_thought_is_read_where_the_clients_text_ends_in_its_tag(
    begun: str, rest: str, parts: list[OutputPart], size: int
) -> None:
    assert read(reading_of(HERMES, begun), rest, size=size) == parts


def test_json_that_was_asked_for_is_still_followed_from_its_beginning() -> None:
    reading = reading_of(HERMES, "```json\n{", expects_json=True)
    assert read(reading, '"a": 1}\n```') == [PlainText('"a": 1}')]
    reading = reading_of(HERMES, '```json\n{"name": ', expects_json=True)
    assert read(reading, '"now", "arguments": {"zone": "CET"}}\n```') == [CALLED]


@given(
    words=st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", NOW, " ", "a", "<", "{", "<think>"]),
        max_size=6,
    ),
    cut=st.integers(0, 40),
    size=st.integers(1, 9),
)
def test_how_the_models_part_is_cut_does_not_matter(words: list[str], cut: int, size: int) -> None:
    text = "".join(words)
    reading = reading_of(HERMES, text[:cut] or "x")
    assert read(reading, text[cut:], size=size) == read(reading, text[cut:])
