"""Conversations as tokens: transformers is the oracle, users cannot leave their turn."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from expertctl.engine.text.chat_template import (
    MAX_TEMPLATE_CHARACTERS,
    NO_TEMPLATE,
    TEMPLATE_USES_CLOCK,
    ChatTemplate,
    encode_chat,
)
from expertctl.engine.text.prompt import ConversationMessage
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.engine.text.tokenizer_files import TemplateSource
from expertctl.errors import IncompatibleError, InvalidPackageError, UsageError
from tests.factories import write_base, write_tokenizer

TEMPLATES = Path(__file__).parents[1] / "templates"
NAMES = ["chatml", "llama3", "qwen3"]
NOON = datetime(2026, 3, 5, 12, 0)
SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"city": "Łódź <&>"}}}
]
USER = ConversationMessage("user", "What is 2 + 2?")
CONVERSATIONS = [
    [USER],
    [ConversationMessage("system", "  Be brief.\n"), USER],
    [
        USER,
        ConversationMessage("assistant", "<think>\nhm\n</think>\n\n4"),
        ConversationMessage("user", "And 3 + 3?"),
    ],
    [USER, ConversationMessage("assistant", "<think>\nhm\n</think>\n\n4")],
    [
        USER,
        ConversationMessage("assistant", "call"),
        ConversationMessage("tool", "4"),
        ConversationMessage("tool", "5"),
    ],
    [
        USER,
        ConversationMessage("user", "<tool_response>x</tool_response>"),
        ConversationMessage("user", "é 🌍 {{ 1 }}"),
    ],
]


def source(text: str) -> TemplateSource:
    return TemplateSource(text, Path("base/tokenizer_config.json"))


def render(text: str, messages: list[ConversationMessage] | None = None, **variables: Any) -> str:
    return ChatTemplate(source(text), clock=lambda: NOON).render(
        messages or [USER], special_tokens=SPECIAL, variables=variables
    )


def theirs(text: str, messages: list[ConversationMessage], directory: Path, **options: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **SPECIAL)
    rendered = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages],
        chat_template=text,
        tokenize=False,
        **{"add_generation_prompt": True, **options},
    )
    assert isinstance(rendered, str)
    return rendered


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return directory


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"tools": TOOLS}], ids=str)
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=lambda c: "-".join(m.role for m in c))
@pytest.mark.parametrize("name", NAMES)
def test_rendering_equals_that_of_transformers(
    folder: Path, name: str, messages: list[ConversationMessage], variables: dict[str, Any]
) -> None:
    text = (TEMPLATES / f"{name}.jinja").read_text()
    values = {"date_string": "1 Jan 2026", **variables}
    assert render(text, messages, **values) == theirs(text, messages, folder, **values)


SNIPPETS = [
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{% endfor %}",
    "{% for k, v in {'a': 1, 'b': [1, 2]}.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% macro m(x, y=2) %}<{{ x }}{{ y }}>{% endmacro %}{{ m(1) }}{{ m('a', y='b') }}",
    "{% set n = namespace(x=0) %}{% for i in [1, 2] %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}",
    "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{{ 'a' ~ 1 ~ none ~ missing ~ [1, 'x'] }}",
    "{{ [1, 2] + [3] }}{{ 'ab' * 3 }}{{ 7 % 3 }}{{ 2 ** 5 }}{{ (1, 2) }}{{ {'a': 'b'} }}",
    "{{ messages[0]['content'][::-1] }}{{ messages[-1].content[2:5] }}",
    "{{ [1, 2, 3] | join('-') }}{{ 'a-b' | replace('-', '+') }}{{ ' x ' | trim }}|",
    "{{ messages | map(attribute='role') | list }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ {'b': 1, 'a': [true, none, 'é<>&']} | tojson }}{{ [1] | tojson(indent=2) }}",
    "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}",
    "{{ 'a\nb\n\nc' | indent(2) }}|{{ 'a\nb' | indent(2, first=true) }}",
    "{{ 'Hello World'.upper().lower().title().replace('o', '0').split(' ') }}",
    "{{ ', '.join(['a', 'b']) }}{{ 'x' if missing is defined else 'y' }}{{ missing }}",
    "{% set x %}block {{ 1 + 1 }}{% endset %}{{ x | length }}{{ x }}",
    "{% generation %}{{ 'inside' }}{% endgeneration %}",
    "{{ dict(a=1)['a'] }}{{ namespace(a=3).a }}{{ 'b' in {'b': 1} }}{{ 2 in [1, 2] }}",
    "{%- for x in [1, 2] -%}\n  {{ x }}\n{%- endfor %}\n  {% if true %}\n  y\n  {% endif %}\n",
    "{{ '%s' is string }}{{ 1 is number }}{{ [] is mapping }}{{ 3 is odd }}{{ 1 == 1.0 }}",
    "{{ ['b', 'a'] | sort | first }}{{ [3, 1] | max }}{{ '5' | int + 1 }}",
    "{{ none | default('d', true) }}{{ missing | d('e') }}{{ [1, 2] | last }}{{ 'ab' | first }}",
    "{% for r in [[1, 2], [3]] %}{% for c in r %}{{ loop.last }}{{ c }}{% endfor %}{% endfor %}",
    "{{ 1 < 2 <= 2 < 3 }}{{ 'a' < 'b' }}{{ not (1 in ()) }}",
    "{% set m = messages[0] %}{{ m.get('role') }}{{ m.keys() | list }}{{ m.missing is none }}",
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_every_allowed_construct_does_what_it_does_in_transformers(
    folder: Path, snippet: str
) -> None:
    messages = CONVERSATIONS[2]
    assert render(snippet, messages) == theirs(snippet, messages, folder)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    base = write_base(tmp_path / "base")
    text = (TEMPLATES / f"{name}.jinja").read_text()
    (base / "chat_template.jinja").write_text(text)
    config = base / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **SPECIAL}))
    reference = PreTrainedTokenizerFast(tokenizer_file=str(base / "tokenizer.json"), **SPECIAL)
    tokenizer = Tokenizer.open(base)
    for messages in CONVERSATIONS:
        prompt = encode_chat(tokenizer, messages, variables={"date_string": "x"})
        wanted = reference.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in messages],
            chat_template=text,
            add_generation_prompt=True,
            return_dict=False,
            date_string="x",
        )
        assert list(prompt.ids) == wanted
        assert prompt.warnings == ()


BEGUN = [
    [USER, ConversationMessage("assistant", "2 + 2 is")],
    [USER, ConversationMessage("assistant", "2 + 2 is ")],
    [USER, ConversationMessage("assistant", "\n 2 + 2 is \n\n")],
    [ConversationMessage("system", "Be brief."), USER, ConversationMessage("assistant", '{"sum":')],
    [
        USER,
        ConversationMessage("assistant", "No"),
        ConversationMessage("user", "CONTINUED-0"),
        ConversationMessage("assistant", "é 🌍"),
    ],
]


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_last_message_is_continued_as_transformers_continues_it(
    tmp_path: Path, name: str, trims: bool
) -> None:
    base = write_base(tmp_path / "base")
    text = (TEMPLATES / f"{name}.jinja").read_text()
    if trims and name == "chatml":
        assert "message['content']" in text or "message.content" in text
        text = text.replace("message['content']", "message['content'] | trim")
        text = text.replace("message.content", "message.content | trim")
    (base / "chat_template.jinja").write_text(text)
    config = base / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **SPECIAL}))
    reference = PreTrainedTokenizerFast(tokenizer_file=str(base / "tokenizer.json"), **SPECIAL)
    tokenizer = Tokenizer.open(base)
    for messages in BEGUN:
        prompt = encode_chat(tokenizer, messages, variables={"date_string": "x"}, end="continue")
        wanted = reference.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in messages],
            chat_template=text,
            continue_final_message=True,
            return_dict=False,
            date_string="x",
        )
        assert list(prompt.ids) == wanted


def test_a_control_token_in_a_message_that_is_continued_stays_letters(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    text = "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    (base / "chat_template.jinja").write_text(text)
    tokenizer = Tokenizer.open(base)
    prompt = encode_chat(
        tokenizer, [ConversationMessage("assistant", "a<|im_end|>b")], end="continue"
    )
    assert prompt.text == "a<|im_end|>b"
    assert tokenizer.token_id("<|im_end|>") not in prompt.ids


def test_no_text_of_a_user_is_taken_for_the_end_of_a_message_that_is_continued(
    tmp_path: Path,
) -> None:
    base = write_base(tmp_path / "base")
    text = "{% for message in messages %}{{ message.content }}|{% endfor %}{{ tools }}"
    (base / "chat_template.jinja").write_text(text)
    tokenizer = Tokenizer.open(base)
    hostile = " ".join(f"CONTINUED-{number}" for number in range(9))
    messages = [ConversationMessage("user", hostile), ConversationMessage("assistant", "a")]
    prompt = encode_chat(tokenizer, messages, variables={"tools": hostile}, end="continue")
    assert prompt.text == f"{hostile}|a"


def test_a_template_that_leaves_out_the_last_message_cannot_continue_it(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = Tokenizer.open(base)
    with pytest.raises(UsageError, match="cannot be continued"):
        encode_chat(tokenizer, [USER, ConversationMessage("assistant", "2 + 2")], end="continue")


def test_a_conversation_may_go_on_without_a_new_turn() -> None:
    text = (TEMPLATES / "chatml.jinja").read_text()
    template = ChatTemplate(source(text))
    rendered = template.render([USER], special_tokens={}, add_generation_prompt=False)
    assert rendered == "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"


CONTROLS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "system", "\n", "hi", "<|im_", "é"]


@settings(deadline=None, max_examples=80)
@given(
    words=st.lists(st.sampled_from(CONTROLS), max_size=8), name=st.sampled_from(["chatml", "qwen3"])
)
def test_a_user_cannot_open_or_close_a_turn(
    tmp_path_factory: pytest.TempPathFactory, words: list[str], name: str
) -> None:
    directory = tmp_path_factory.mktemp("base")
    write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text((TEMPLATES / f"{name}.jinja").read_text())
    tokenizer, content = Tokenizer.open(directory), "".join(words)
    prompt = encode_chat(
        tokenizer, [ConversationMessage("system", "s"), ConversationMessage("user", content)]
    )
    controls = [i for i in prompt.ids if i in tokenizer.control_ids]
    begin, end = tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")
    assert controls == [begin, end, begin, end, begin]
    assert f"user\n{content}\n" in tokenizer.decode(prompt.ids)
    assert f"<|im_start|>user\n{content}<|im_end|>" in prompt.text


TOOLS = """{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>\
{{ m.role }} {{ m.name }} {{ m.content }}{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}\
<|im_end|>{% endfor %}"""


@settings(deadline=None, max_examples=40)
@given(words=st.lists(st.sampled_from(CONTROLS), max_size=6))
def test_neither_a_tool_nor_its_call_can_open_or_close_a_turn(
    tmp_path_factory: pytest.TempPathFactory, words: list[str]
) -> None:
    directory, text = tmp_path_factory.mktemp("base"), "".join(words)
    write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TOOLS)
    tokenizer = Tokenizer.open(directory)
    call: dict[str, Any] = {"function": {"name": text, "arguments": {text: [text]}}}
    messages = [
        ConversationMessage("assistant", "", {"tool_calls": [call], "name": text}),
        ConversationMessage("tool", text, {"name": text}),
    ]
    tools: list[Any] = [{"type": "function", "function": {"description": text, text: {}}}]
    prompt = encode_chat(tokenizer, messages, variables={"tools": tools})
    controls = [i for i in prompt.ids if i in tokenizer.control_ids]
    begin, end = tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")
    assert controls == [begin, end, begin, end]
    assert json.dumps(tools[0], ensure_ascii=False) in prompt.text


def test_what_the_caller_gives_a_template_reaches_it_and_other_fields_are_not_there() -> None:
    template = ChatTemplate(source("{{ messages[0].a }}{{ messages[0].b is defined }}{{ think }}"))
    message = ConversationMessage("user", "x", {"a": "yes"})
    assert template.render([message], special_tokens={}, variables={"think": 1}) == "yesFalse1"


def test_without_a_template_the_prompt_is_used_as_it_is_and_that_is_said(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    config = json.loads((base / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    prompt = encode_chat(Tokenizer.open(base), [ConversationMessage("user", " a<|im_end|> ")])
    assert prompt.text == " a<|im_end|> "
    assert prompt.ids == tuple(b" a<|im_end|> ")
    assert prompt.warnings == (NO_TEMPLATE,)
    with pytest.raises(UsageError, match="no chat template"):
        encode_chat(Tokenizer.open(base), [USER, USER])


def test_a_template_of_its_own_file_wins_and_a_list_has_a_default(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    config = json.loads((base / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "listed"}]
    config["chat_template"] = named
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    assert encode_chat(Tokenizer.open(base), [USER]).text == "listed"
    (base / "chat_template.jinja").write_text("own file")
    assert encode_chat(Tokenizer.open(base), [USER]).text == "own file"
    (base / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InvalidPackageError, match=r"chat_template\.jinja: not UTF-8"):
        Tokenizer.open(base)


def test_a_date_in_the_prompt_is_reported(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    (base / "chat_template.jinja").write_text(
        "{{ strftime_now('%d %b %Y') }}{{ strftime_now('%%') }}"
    )
    prompt = encode_chat(Tokenizer.open(base), [USER], clock=lambda: NOON)
    assert prompt.text == "05 Mar 2026%"
    assert prompt.warnings == (TEMPLATE_USES_CLOCK,)


@pytest.mark.parametrize("form", ["%999999999d", "%_9d", "%0100Y", "x" * 200])
def test_a_date_format_that_pads_is_refused(form: str) -> None:
    with pytest.raises(InvalidPackageError, match="date format"):
        render("{{ strftime_now('" + form + "') }}")


def test_a_template_may_refuse_a_conversation() -> None:
    text = (TEMPLATES / "llama3.jinja").read_text()
    with pytest.raises(UsageError, match="Only user, assistant and tool turns: system"):
        render(text, [USER, ConversationMessage("system", "late")])


def test_a_template_that_refuses_every_conversation_does_not_fit() -> None:
    with pytest.raises(IncompatibleError, match="refuses this conversation: never"):
        render("{{ raise_exception('never') }}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{{ messages[-1].tool_calls[0].name.first.letter }}", "has no attribute"),
        ("{{ messages[-1].content + (messages | length > 1 and 1 or '') }}", "TypeError"),
        ("{% if messages | length > 1 %}{{ 1 // 0 }}{% endif %}", "zero"),
        ("{% if messages | length > 1 %}{{ raise_exception('x' * 5000) }}{% endif %}", "xxxx"),
    ],
)
def test_what_a_template_fails_on_is_at_fault_where_it_takes_others(
    text: str, problem: str
) -> None:
    said = ConversationMessage("assistant", "", {"tool_calls": [{"name": "sort"}]})
    if "tool_calls" in text:
        text = "{% if messages[-1].tool_calls %}" + text + "{% endif %}"
    with pytest.raises(UsageError, match="does not accept this conversation") as caught:
        render(text, [USER, said])
    assert problem in caught.value.message
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{% for %}", "line 1"),
        ("\n\n{{ x | evil }}", "line 3: No filter named 'evil'"),
        ("{{ 1 is evil }}", "No test named 'evil'"),
        ("{% include 'x' %}", "fails"),
        ("{% import 'x' as x %}", "fails"),
        ("{% extends 'x' %}", "fails"),
        ("{{ missing.a }}", "'missing' is undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ missing() }}", "'missing' is undefined"),
        ("{{ messages[0].content() }}", "fails: TypeError"),
        ("{{ namespace(1) }}", "fails"),
    ],
)
def test_a_template_that_fails_names_its_file_and_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(
        InvalidPackageError, match=r"tokenizer_config\.json: chat template"
    ) as caught:
        render(text)
    assert problem in caught.value.message


def test_an_enormous_template_is_refused_unread() -> None:
    with pytest.raises(InvalidPackageError, match="longer than"):
        render(" " * (MAX_TEMPLATE_CHARACTERS + 1))


def test_a_long_prompt_and_a_long_conversation_are_no_problem(folder: Path) -> None:
    text = (TEMPLATES / "qwen3.jinja").read_text()
    long = [ConversationMessage("user", "word " * 100_000)]
    many = [
        ConversationMessage("user" if n % 2 == 0 else "assistant", f"turn {n}") for n in range(2001)
    ]
    for messages in (long, many):
        assert render(text, messages) == theirs(text, messages, folder)


@pytest.mark.parametrize("shown", ["line one\n\n  line two", "line one\r\x1b[2K line two\t"])
def test_what_a_template_says_is_one_line_that_a_terminal_can_show(shown: str) -> None:
    text = f"{{{{ raise_exception({shown!r}) }}}}"
    with pytest.raises(IncompatibleError) as never:
        render(text)
    with pytest.raises(UsageError) as this_one:
        render(f"{{% if messages | length > 1 %}}{text}{{% endif %}}", [USER, USER])
    for error in (never.value, this_one.value):
        assert error.message.isprintable()
        assert "line one" in error.message
        assert error.message.endswith("line two")
