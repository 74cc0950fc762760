"""Which part of an answer is a call."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.server.tool_calls.call import MAX_CALL_CHARACTERS, Call
from expertctl.server.tool_calls.call_format import HERMES, LLAMA, MISTRAL, CallFormat
from expertctl.server.tool_calls.scanner import MAX_SPACE, Part, Text, ToolCallScanner, parted

TOOLS = ("get_weather", "get", "now")
PARIS = Call("get_weather", {"city": "Paris"})
NOW = Call("now", {})


def hermes(name: str, arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def pushed(text: str, form: CallFormat, places: list[int]) -> list[Part]:
    """What a scanner gives for a text in pieces; neighbouring texts are one."""
    scanner, parts = ToolCallScanner(form, TOOLS), list[Part]()
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    for begin, end in zip([0, *ends], ends, strict=False):
        parts += scanner.push(text[begin:end])
    merged = list[Part]()
    for part in (*parts, *scanner.finish()):
        if isinstance(part, Text) and merged and isinstance(merged[-1], Text):
            merged[-1] = Text(merged[-1].text + part.text)
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
            [Text("Let me see."), PARIS],
        ),
        (
            f"{hermes('get_weather', {'city': 'Paris'})}\n{hermes('now', {})}\n{hermes('now', {})}",
            [PARIS, NOW, NOW],
        ),
        (f"{hermes('now', {})}\nDone. \n", [NOW, Text("Done. \n")]),
        ('<tool_call>{"arguments":{},"name":"now"}</tool_call>', [NOW]),
        ('<tool_call>{"name":"now","parameters":{},"id":"1"}</tool_call>', [NOW]),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool', [NOW]),
        ('<tool_call>\n{"name": "now", "arguments": {}}', [NOW]),
        ("<tool_call><tool_call>" + hermes("now", {}), [Text("<tool_call><tool_call>"), NOW]),
    ],
)
def test_calls_between_tags_are_found(text: str, parts: list[Part]) -> None:
    assert parted(text, HERMES, TOOLS) == parts


WHOLE = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA])
@pytest.mark.parametrize("text", [WHOLE, f"\n {WHOLE}\n\n", '{"name":"now","parameters":{}}'])
def test_an_answer_that_is_the_json_of_a_call_is_that_call(text: str, form: CallFormat) -> None:
    call = NOW if "now" in text else PARIS
    assert parted(text, form, TOOLS) == [call]
    assert pushed(text, form, list(range(len(text)))) == [call]


def test_a_call_of_which_only_the_first_mark_is_missing_is_a_call() -> None:
    assert parted(f"{WHOLE}\n</tool_call>", HERMES, TOOLS) == [PARIS]


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
    assert parted(text, HERMES, TOOLS) == [Text(text)]
    assert pushed(text, HERMES, list(range(len(text)))) == [Text(text)]


def test_json_that_cannot_be_a_call_is_not_held_back() -> None:
    scanner = ToolCallScanner(HERMES, TOOLS)
    assert scanner.push('{"cit') == []
    assert scanner.push('ies": ["Par') == [Text('{"cities": ["Par')]


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
    assert parted(text, HERMES, TOOLS) == [Text(text)]


def test_an_end_tag_inside_an_argument_ends_nothing() -> None:
    inside = {"city": 'a </tool_call> "quoted" \\ <tool_call> {b'}
    assert parted(hermes("get", inside), HERMES, TOOLS) == [Call("get", inside)]


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
        ('{"name": "now", "parameters": {}}\nDone.', [NOW, Text("Done.")]),
        ('{"name": "now", "parameters": {}}; done', [NOW, Text("; done")]),
        ('{"name": "now", "parameters": {', [Text('{"name": "now", "parameters": {')]),
        ('{"answer": 4}', [Text('{"answer": 4}')]),
        ('See {"name": "now", "parameters": {}}', [Text('See {"name": "now", "parameters": {}}')]),
        ("{braces} first", [Text("{braces} first")]),
    ],
)
def test_an_answer_of_llama_is_a_call_from_its_beginning(text: str, parts: list[Part]) -> None:
    assert parted(text, LLAMA, TOOLS) == parts


@pytest.mark.parametrize("mark", ["[TOOL_CALLS]", "[TOOL_CALLS] ", ""])
def test_a_list_of_mistral_is_calls_with_and_without_its_mark(mark: str) -> None:
    calls = [
        {"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"},
        {"name": "now", "arguments": {}},
    ]
    assert parted(mark + json.dumps(calls), MISTRAL, TOOLS) == [PARIS, NOW]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', [PARIS]),
        ('[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}', [PARIS, NOW]),
        ('get_weather{"city": "Paris"}now{}', [PARIS, NOW]),
        ('One moment. [TOOL_CALLS]get[ARGS]{"a": 1}', [Text("One moment."), Call("get", {"a": 1})]),
        ("[TOOL_CALLS]unknown[ARGS]{}", [Text("[TOOL_CALLS]unknown[ARGS]{}")]),
        ("[TOOL_CALLS]now[ARGS][]", [Text("[TOOL_CALLS]now[ARGS][]")]),
        ('[TOOL_CALLS][{"name": "now"}]', [Text('[TOOL_CALLS][{"name": "now"}]')]),
        ("[TOOL_CALLS][]", [Text("[TOOL_CALLS][]")]),
        ("get well soon", [Text("get well soon")]),
        ("[1] is a reference", [Text("[1] is a reference")]),
        ("say now{}", [Text("say now{}")]),
        (
            '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "unknown", "arguments": {}}]',
            [
                Text(
                    '[TOOL_CALLS][{"name": "now", "arguments": {}}, '
                    '{"name": "unknown", "arguments": {}}]'
                )
            ],
        ),
    ],
)
def test_calls_of_mistral_are_found_by_mark_or_name(text: str, parts: list[Part]) -> None:
    assert parted(text, MISTRAL, TOOLS) == parts


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
    text: str, form: CallFormat, places: list[int]
) -> None:
    whole = parted(text, form, TOOLS)
    assert pushed(text, form, places) == whole
    assert pushed(text, form, list(range(len(text)))) == whole
    if not any(isinstance(part, Call) for part in whole):
        assert whole == ([Text(text)] if text else [])


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
    arguments: dict[str, object], form: CallFormat, ascii_only: bool
) -> None:
    call = json.dumps({"name": "now", "arguments": arguments}, ensure_ascii=ascii_only)
    text = f"{form.mark}{call}{form.end}"
    assert parted(text, form, TOOLS) == [Call("now", arguments)]  # type: ignore[arg-type]  # JSON


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    scanner = ToolCallScanner(HERMES, TOOLS)
    assert scanner.push("Let me") == [Text("Let me")]
    assert scanner.push(" see. <") == [Text(" see.")]
    assert scanner.push("3\n") == [Text(" <3")]
    assert scanner.push("<tool_call>\n{") == []
    assert scanner.push("not") == [Text("\n<tool_call>"), Text("\n{not")]


def test_a_call_is_given_out_when_it_is_whole() -> None:
    scanner = ToolCallScanner(HERMES, TOOLS)
    assert scanner.push(hermes("now", {})[:-1]) == []
    assert scanner.push(">") == [NOW]
    assert scanner.finish() == []


def test_without_tools_nothing_is_held_back() -> None:
    scanner = ToolCallScanner(HERMES, ())
    assert [scanner.push(piece) for piece in ("<tool", "")] == [[Text("<tool")], []]
    assert scanner.finish() == []


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("size", [MAX_CALL_CHARACTERS, 1000])
def test_a_call_beyond_the_bound_is_text(extra: int, size: int) -> None:
    empty = '{"name": "now", "arguments": {"a": ""}}'
    call = json.dumps(
        {"name": "now", "arguments": {"a": "x" * (MAX_CALL_CHARACTERS - len(empty) + extra)}}
    )
    text = f"<tool_call>{call}</tool_call>"
    scanner, parts = ToolCallScanner(HERMES, TOOLS), list[Part]()
    for begin in range(0, len(text), size):
        parts += scanner.push(text[begin : begin + size])
    parts += scanner.finish()
    assert [isinstance(part, Call) for part in parts].count(True) == 1 - extra
    assert extra == 0 or "".join(part.text for part in parts if isinstance(part, Text)) == text


def test_marks_within_marks_take_no_time() -> None:
    text = '<tool_call>{"' * 20_000
    assert parted(text, HERMES, TOOLS) == [Text(text)]


def test_white_space_without_end_is_not_hoarded() -> None:
    for form in (HERMES, LLAMA, MISTRAL):
        scanner = ToolCallScanner(form, TOOLS)
        parts = [part for _ in range(3) for part in scanner.push(" " * MAX_SPACE)]
        assert sum(len(part.text) for part in parts if isinstance(part, Text)) >= MAX_SPACE
