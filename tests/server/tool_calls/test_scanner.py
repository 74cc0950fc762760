"""Which part of an answer is a call."""

import json
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.server.reasoning_parser import MAX_SPACE
from expertctl.server.tool_parser import (
    HERMES,
    LLAMA,
    MAX_CALL_CHARACTERS,
    MISTRAL,
    ParsedToolCall,
    PlainText,
    ToolCallFormat,
    ToolCallParser,
    ToolCallPart,
)

TOOLS = ("get_weather", "get", "now")
PARIS = ParsedToolCall("get_weather", {"city": "Paris"})
NOW = ParsedToolCall("now", {})


def hermes(name: str, arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def pushed(text: str, form: ToolCallFormat, places: list[int]) -> list[ToolCallPart]:
    return split_tool_calls(text, form, TOOLS, places)


def split_tool_calls(
    text: str, form: ToolCallFormat, tools: Collection[str], places: Sequence[int] = ()
) -> list[ToolCallPart]:
    """Parse a text in pieces cut at ``places``; adjacent texts are joined."""
    scanner, parts = ToolCallParser(form, tools), list[ToolCallPart]()
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    for begin, end in zip([0, *ends], ends, strict=False):
        parts += scanner.push(text[begin:end])
    merged = list[ToolCallPart]()
    for part in (*parts, *scanner.finish()):
        if isinstance(part, PlainText) and merged and isinstance(merged[-1], PlainText):
            merged[-1] = PlainText(merged[-1].text + part.text)
        else:
            merged.append(part)
    return merged


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (hermes("get_weather", {"city": "Paris"}), [PARIS]),
        ("\n\n" + hermes("now", {}) + "\n", [NOW]),
        (
            "Let me see.\n" + hermes("get_weather", {"city": "Paris"}),
            [PlainText("Let me see."), PARIS],
        ),
        (
            f"{hermes('get_weather', {'city': 'Paris'})}\n{hermes('now', {})}\n{hermes('now', {})}",
            [PARIS, NOW, NOW],
        ),
        (f"{hermes('now', {})}\nDone. \n", [NOW, PlainText("Done. \n")]),
        ('<tool_call>{"arguments":{},"name":"now"}</tool_call>', [NOW]),
        ('<tool_call>{"name":"now","parameters":{},"id":"1"}</tool_call>', [NOW]),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool', [NOW]),
        ('<tool_call>\n{"name": "now", "arguments": {}}', [NOW]),
        ("<tool_call><tool_call>" + hermes("now", {}), [PlainText("<tool_call><tool_call>"), NOW]),
    ],
)
def test_calls_between_tags_are_found(text: str, parts: list[ToolCallPart]) -> None:
    assert split_tool_calls(text, HERMES, TOOLS) == parts


WHOLE = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA])
@pytest.mark.parametrize("text", [WHOLE, f"\n {WHOLE}\n\n", '{"name":"now","parameters":{}}'])
def test_an_answer_that_is_the_json_of_a_call_is_that_call(text: str, form: ToolCallFormat) -> None:
    call = NOW if "now" in text else PARIS
    assert split_tool_calls(text, form, TOOLS) == [call]
    assert pushed(text, form, list(range(len(text)))) == [call]


def test_a_call_of_which_only_the_first_mark_is_missing_is_a_call() -> None:
    assert split_tool_calls(f"{WHOLE}\n</tool_call>", HERMES, TOOLS) == [PARIS]


@pytest.mark.parametrize(
    "text",
    [
        f"{WHOLE} is what I would call.",
        f"I would call {WHOLE}",
        f"{WHOLE}\n{WHOLE}",
        f"[{WHOLE}]",
        WHOLE[:-1],
        '{"name": "unknown", "arguments": {}}',
        '{"name": "now", "arguments": {}, "why": "I can"}',
        '{"name": "now"}',
        '{"name": "Ann", "age": 7}',
        '{"city": "Paris", "name": "now", "arguments": {}}',
        f"```json\n{WHOLE}\n```",
    ],
)
def test_json_that_is_not_exactly_one_call_stays_text(text: str) -> None:
    assert split_tool_calls(text, HERMES, TOOLS) == [PlainText(text)]
    assert pushed(text, HERMES, list(range(len(text)))) == [PlainText(text)]


def test_json_that_cannot_be_a_call_is_not_held_back() -> None:
    scanner = ToolCallParser(HERMES, TOOLS)
    assert scanner.push('{"cit') == []
    assert scanner.push('ies": ["Par') == [PlainText('{"cities": ["Par')]


@pytest.mark.parametrize(
    "text",
    [
        "No call at all.",
        "  <tool_call> is a tag \n",
        hermes("unknown", {}),
        hermes("now", [1]),
        hermes("now", "{}"),
        hermes("now", None),
        '<tool_call>{"name": "now"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}, "parameters": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}, "why": "not"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": 1, "a": 2}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": "\n"}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {"a": 1,}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {]}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {}} and more</tool_call>',
        '<tool_call>{"name": "now", "argum',
        '<tool_call>{"name": "now", "arguments": {"a": "\\',
        "<tool_call>[]</tool_call>",
        '<tool_call>"now"</tool_call>',
        "<tool_call",
        f"<tool_call>{' ' * (MAX_SPACE + 1)}" + '{"name": "now", "arguments": {}}</tool_call>',
    ],
)
def test_what_is_no_call_stays_as_it_was_written(text: str) -> None:
    assert split_tool_calls(text, HERMES, TOOLS) == [PlainText(text)]


def test_an_end_tag_inside_an_argument_ends_nothing() -> None:
    inside = {"city": 'a </tool_call> "quoted" \\ <tool_call> {b'}
    assert split_tool_calls(hermes("get", inside), HERMES, TOOLS) == [ParsedToolCall("get", inside)]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS]),
        ('\n{"type": "function", "name": "now", "parameters": {}}\n', [NOW]),
        ('<|python_tag|>{"name": "now", "parameters": {}}', [NOW]),
        (
            '{"name": "get_weather", "parameters": {"city": "Paris"}}; '
            '{"name": "now", "parameters": {}}',
            [PARIS, NOW],
        ),
        ('{"name": "now", "parameters": {}}\nDone.', [NOW, PlainText("Done.")]),
        ('{"name": "now", "parameters": {}}; done', [NOW, PlainText("; done")]),
        ('{"name": "now", "parameters": {', [PlainText('{"name": "now", "parameters": {')]),
        ('{"answer": 4}', [PlainText('{"answer": 4}')]),
        (
            'See {"name": "now", "parameters": {}}',
            [PlainText('See {"name": "now", "parameters": {}}')],
        ),
        ("{braces} first", [PlainText("{braces} first")]),
    ],
)
def test_an_answer_of_llama_is_a_call_from_its_beginning(
    text: str, parts: list[ToolCallPart]
) -> None:
    assert split_tool_calls(text, LLAMA, TOOLS) == parts


@pytest.mark.parametrize("mark", ["[TOOL_CALLS]", "[TOOL_CALLS] ", ""])
def test_a_list_of_mistral_is_calls_with_and_without_its_mark(mark: str) -> None:
    calls = [
        {"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"},
        {"name": "now", "arguments": {}},
    ]
    assert split_tool_calls(mark + json.dumps(calls), MISTRAL, TOOLS) == [PARIS, NOW]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', [PARIS]),
        ('[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}', [PARIS, NOW]),
        ('get_weather{"city": "Paris"}now{}', [PARIS, NOW]),
        (
            'One moment. [TOOL_CALLS]get[ARGS]{"a": 1}',
            [PlainText("One moment."), ParsedToolCall("get", {"a": 1})],
        ),
        ("[TOOL_CALLS]unknown[ARGS]{}", [PlainText("[TOOL_CALLS]unknown[ARGS]{}")]),
        ("[TOOL_CALLS]now[ARGS][]", [PlainText("[TOOL_CALLS]now[ARGS][]")]),
        ('[TOOL_CALLS][{"name": "now"}]', [PlainText('[TOOL_CALLS][{"name": "now"}]')]),
        ("[TOOL_CALLS][]", [PlainText("[TOOL_CALLS][]")]),
        ("get well soon", [PlainText("get well soon")]),
        ("[1] is a reference", [PlainText("[1] is a reference")]),
        ("say now{}", [PlainText("say now{}")]),
        (
            '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "unknown", "arguments": {}}]',
            [
                PlainText(
                    '[TOOL_CALLS][{"name": "now", "arguments": {}}, '
                    '{"name": "unknown", "arguments": {}}]'
                )
            ],
        ),
    ],
)
def test_calls_of_mistral_are_found_by_mark_or_name(text: str, parts: list[ToolCallPart]) -> None:
    assert split_tool_calls(text, MISTRAL, TOOLS) == parts


FRAGMENTS = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "get_weather",
    "now",
    '{"name": "now", "arguments": {}}',
    '[{"name": "now", "parameters": {"a": "\\"}"}}]',
    '{"a": "<tool_call>"}',
    "{}",
    "{",
    "}",
    '"',
    "\\",
    ";",
    " ",
    "\n",
    "text",
    "<",
    "[",
)


@settings(deadline=None, max_examples=1500)
@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=9).map("".join),
    form=st.sampled_from([HERMES, LLAMA, MISTRAL]),
    places=st.lists(st.integers(0, 120), max_size=8),
)
def test_where_the_text_is_cut_does_not_matter(
    text: str, form: ToolCallFormat, places: list[int]
) -> None:
    whole = split_tool_calls(text, form, TOOLS)
    assert pushed(text, form, places) == whole
    assert pushed(text, form, list(range(len(text)))) == whole
    if not any(isinstance(part, ParsedToolCall) for part in whole):
        assert whole == ([PlainText(text)] if text else [])


@settings(deadline=None, max_examples=200)
@given(
    arguments=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
            ),
            max_leaves=6,
        ),
        max_size=4,
    ),
    form=st.sampled_from([HERMES, LLAMA, MISTRAL]),
    ascii_only=st.booleans(),
)
def test_whatever_arguments_are_written_are_read(
    arguments: dict[str, object], form: ToolCallFormat, ascii_only: bool
) -> None:
    call = json.dumps({"name": "now", "arguments": arguments}, ensure_ascii=ascii_only)
    text = f"{form.start_marker}{call}{form.end_marker}"
    assert split_tool_calls(text, form, TOOLS) == [ParsedToolCall("now", arguments)]  # type: ignore[arg-type]  # JSON


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    scanner = ToolCallParser(HERMES, TOOLS)
    assert scanner.push("Let me") == [PlainText("Let me")]
    assert scanner.push(" see. <") == [PlainText(" see.")]
    assert scanner.push("3\n") == [PlainText(" <3")]
    assert scanner.push("<tool_call>\n{") == []
    assert scanner.push("not") == [PlainText("\n<tool_call>"), PlainText("\n{not")]


def test_a_call_is_given_out_when_it_is_whole() -> None:
    scanner = ToolCallParser(HERMES, TOOLS)
    assert scanner.push(hermes("now", {})[:-1]) == []
    assert scanner.push(">") == [NOW]
    assert scanner.finish() == []


def test_without_tools_nothing_is_held_back() -> None:
    scanner = ToolCallParser(HERMES, ())
    assert [scanner.push(piece) for piece in ("<tool", "")] == [[PlainText("<tool")], []]
    assert scanner.finish() == []


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("size", [MAX_CALL_CHARACTERS, 1000])
def test_a_call_beyond_the_bound_is_text(extra: int, size: int) -> None:
    empty = '{"name": "now", "arguments": {"a": ""}}'
    call = json.dumps(
        {"name": "now", "arguments": {"a": "x" * (MAX_CALL_CHARACTERS - len(empty) + extra)}}
    )
    text = f"<tool_call>{call}</tool_call>"
    scanner, parts = ToolCallParser(HERMES, TOOLS), list[ToolCallPart]()
    for begin in range(0, len(text), size):
        parts += scanner.push(text[begin : begin + size])
    parts += scanner.finish()
    assert [isinstance(part, ParsedToolCall) for part in parts].count(True) == 1 - extra
    assert extra == 0 or "".join(part.text for part in parts if isinstance(part, PlainText)) == text


def test_marks_within_marks_take_no_time() -> None:
    text = '<tool_call>{"' * 20_000
    assert split_tool_calls(text, HERMES, TOOLS) == [PlainText(text)]


def test_white_space_without_end_is_not_hoarded() -> None:
    for form in (HERMES, LLAMA, MISTRAL):
        scanner = ToolCallParser(form, TOOLS)
        parts = [part for _ in range(3) for part in scanner.push(" " * MAX_SPACE)]
        assert sum(len(part.text) for part in parts if isinstance(part, PlainText)) >= MAX_SPACE
