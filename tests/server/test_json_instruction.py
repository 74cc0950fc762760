"""What a model is told of the JSON that a request asks for by a schema."""

import json
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.text.prompt import ConversationMessage
from expertctl.engine_config import EngineConfig
from expertctl.server.response_format import (
    INSTRUCTION_TEXT,
    INSTRUCTION_WARNING,
    MAX_INSTRUCTION_CHARACTERS,
    MAX_SAMPLE_CHARACTERS,
    InstructedConversation,
    add_json_instruction,
    build_json_instruction,
)
from expertctl.server.settings import ServeSettings
from tests.server.conftest import MakeServed
from tests.server.harness import BASE, CHAT_TEMPLATE, ServerHarness

TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": TEXT, "age": WHOLE},
    "required": ["name", "age"],
}
INSTRUCTION = f'{INSTRUCTION_TEXT}\n{{"name": "<name>", "age": 12}}'
SAMPLES = (
    ConversationMessage("user", f"Give an example.\n\n{INSTRUCTION}"),
    ConversationMessage("assistant", '{"name": "a name", "age": 7}'),
    ConversationMessage("user", f"Give another example.\n\n{INSTRUCTION}"),
    ConversationMessage("assistant", '{"name": "another name", "age": 3}'),
)


def example(schema: dict[str, Any]) -> Any:
    told = build_json_instruction(schema)
    assert told is not None
    words, _, line = told.paragraph.partition("\n")
    assert words == INSTRUCTION_TEXT
    return json.loads(line)


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


CASES: list[tuple[dict[str, Any], Any]] = [
    (PERSON, {"name": "<name>", "age": 12}),
    (of(price={"type": "number"}, sold={"type": "boolean"}), {"price": 12.5, "sold": False}),
    (of(kind={"enum": ["bug", "question"]}), {"kind": "bug"}),
    (of(version={"const": 3}), {"version": 3}),
    (of(name={"type": "string", "examples": ["Ada"]}), {"name": "Ada"}),
    (of(tags={"type": "array", "items": TEXT}), {"tags": ["<tags 1>", "<tags 2>"]}),
    (of(one={"type": "array", "items": TEXT, "maxItems": 1}), {"one": ["<one 1>"]}),
    (of(rgb={"type": "array", "items": WHOLE, "minItems": 3}), {"rgb": [12, 12, 12]}),
    (of(six={"type": "array", "items": WHOLE, "minItems": 6}), {"six": [12] * 6}),
    (of(at={"type": "array", "prefixItems": [TEXT, WHOLE]}), {"at": ["<at>", 12]}),
    (of(stars={"type": "integer", "minimum": 1, "maximum": 5}), {"stars": 5}),
    (of(year={"type": "integer", "minimum": 1900}), {"year": 1900}),
    (of(note={"type": ["null", "string"]}), {"note": "<note>"}),
    (of(note={"anyOf": [{"type": "null"}, TEXT]}), {"note": "<note>"}),
    (of(nothing={"type": "null"}), {"nothing": None}),
    (of(unit={"type": ["string", "null"], "enum": ["c", None]}), {"unit": "c"}),
    (of(unit={"type": ["string", "null"], "enum": [None, "c"]}), {"unit": "c"}),
    (of(count={"type": ["integer", "null"], "enum": [3, 0, None]}), {"count": 3}),
    (of(gone={"enum": [None]}), {"gone": None}),
    (of(gone={"type": ["string", "null"], "const": None}), {"gone": None}),
    (
        {**of(who={"$ref": "#/$defs/P"}), "$defs": {"P": of(name=TEXT)}},
        {"who": {"name": "<name>"}},
    ),
    ({"$ref": "#/$defs/P", "$defs": {"P": of(name=TEXT)}}, {"name": "<name>"}),
    ({"allOf": [of(name=TEXT)]}, {"name": "<name>"}),
    ({"properties": {"name": TEXT}}, {"name": "<name>"}),
    ({"type": "array", "items": of(n=WHOLE)}, [{"n": 12}, {"n": 12}]),
]


@pytest.mark.parametrize(("schema", "wanted"), CASES, ids=str)
def test_an_example_has_the_form_of_the_schema(schema: dict[str, Any], wanted: Any) -> None:
    assert example(schema) == wanted
    assert jsonschema_rs.is_valid(schema, wanted)


@pytest.mark.parametrize("schema", [schema for schema, _ in CASES], ids=str)
def test_the_assistant_has_answered_in_the_form_of_the_schema(schema: dict[str, Any]) -> None:
    told = build_json_instruction(schema)
    assert told is not None
    assert [message.role for message in told.samples] == ["user", "assistant"] * 2
    assert all(told.paragraph in message.content for message in told.samples[::2])
    for message in told.samples[1::2]:
        assert jsonschema_rs.is_valid(schema, json.loads(message.content))


def test_a_long_form_is_said_once() -> None:
    told = build_json_instruction(of(**{"x" * (MAX_SAMPLE_CHARACTERS // 2): TEXT}))
    assert told is not None
    assert told.samples == ()


def test_a_long_answer_is_no_sample() -> None:
    told = build_json_instruction(of(kind={"enum": ["a", "b" * MAX_INSTRUCTION_CHARACTERS]}))
    assert told is not None
    assert [message.content for message in told.samples[1:]] == ['{"kind": "a"}']


def test_the_answers_of_the_assistant_differ_where_the_schema_leaves_a_choice() -> None:
    kinds = {"type": "string", "enum": ["bug", "question"]}
    told = build_json_instruction(
        of(
            kind=kinds,
            sold={"type": "boolean"},
            price={"type": "number"},
            tags={"type": "array", "items": TEXT},
        )
    )
    assert told is not None
    assert [json.loads(message.content) for message in told.samples[1::2]] == [
        {"kind": "question", "sold": True, "price": 7.5, "tags": ["a tags 1", "a tags 2"]},
        {"kind": "bug", "sold": False, "price": 3.5, "tags": ["another tags 1", "another tags 2"]},
    ]


TREE = {**of(name=TEXT, children={"type": "array", "items": {"$ref": "#"}})}
WIDE = {**of(**{f"p{n}": TEXT for n in range(300)})}
POWER = {
    "$defs": {
        f"d{n}": of(a={"$ref": f"#/$defs/d{n + 1}"}, b={"$ref": f"#/$defs/d{n + 1}"})
        for n in range(11)
    },
    "$ref": "#/$defs/d0",
}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "string"},
        {"type": "object"},
        {"type": "array", "maxItems": 0},
        {"type": "array", "items": WHOLE, "minItems": 1e300},
        TREE,
        WIDE,
        POWER,
        {"$ref": "#"},
        of(**{"x" * (MAX_INSTRUCTION_CHARACTERS // 2): TEXT}),
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_where_no_example_of_useful_size_can_be_made_nothing_is_said(
    schema: dict[str, Any],
) -> None:
    assert build_json_instruction(schema) is None
    messages = (ConversationMessage("user", "Hi"),)
    assert add_json_instruction(messages, schema) == InstructedConversation(messages)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "type",
                        "properties",
                        "items",
                        "$ref",
                        "anyOf",
                        "enum",
                        "minItems",
                        "prefixItems",
                    ]
                ),
                inner | st.sampled_from(["object", "array", "integer", "#/properties/items"]),
                max_size=4,
            )
        ),
        max_leaves=20,
    )
)
def test_a_malformed_schema_breaks_nothing_and_says_the_same_twice(value: Any) -> None:
    schema = value if isinstance(value, dict) else {"properties": value}
    assert build_json_instruction(schema) == build_json_instruction(schema)


def test_the_last_message_of_the_user_says_the_form_and_samples_show_it() -> None:
    system = ConversationMessage("system", "Be brief.")
    before = (ConversationMessage("user", "Hi"), ConversationMessage("assistant", "Hello"))
    begun = ConversationMessage("assistant", "{")
    asked = (system, *before, ConversationMessage("user", "Who wrote Hamlet?"), begun)
    last = ConversationMessage("user", f"Who wrote Hamlet?\n\n{INSTRUCTION}")
    assert add_json_instruction(asked, PERSON) == InstructedConversation(
        (system, *before, last, begun), SAMPLES
    )


@pytest.mark.parametrize(
    ("said", "is_shown"),
    [
        ('Answer like {"name": "Ada", "age": 36}.', True),
        ("Answer with the keys name and age.", False),
        ('Answer like {"name": "Ada"}.', False),
    ],
)
@pytest.mark.parametrize("role", ["system", "user"])
def test_nothing_is_added_to_messages_that_show_the_form(
    role: Any, said: str, is_shown: bool
) -> None:
    messages = (ConversationMessage(role, said), ConversationMessage("user", "Who wrote Hamlet?"))
    instructed = add_json_instruction(messages, PERSON)
    assert (instructed == InstructedConversation(messages)) is is_shown


QUESTION = "Who wrote Hamlet?"
CHAT: dict[str, Any] = {
    "model": BASE,
    "max_tokens": 4,
    "temperature": 0,
    "messages": [{"role": "user", "content": QUESTION}],
}
TOLD: dict[str, Any] = {
    "/v1/chat/completions": {
        **CHAT,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON},
        },
    },
    "/v1/messages": {
        **CHAT,
        "output_config": {"format": {"type": "json_schema", "schema": PERSON}},
    },
    "/v1/infer": {
        "prompt": QUESTION,
        "max_tokens": 4,
        "temperature": 0,
        "response_format": {"type": "json_schema", "schema": PERSON},
    },
}


def prompt_tokens(document: Any) -> int:
    if "tokens" in document:
        return int(document["tokens"]["prompt"])
    usage = document["usage"]
    kept = usage.get("cache_read_input_tokens") or 0
    return int(usage.get("prompt_tokens") or usage["input_tokens"] + kept)


def chat_prompt(
    served: ServerHarness, text: str, *, before: Sequence[ConversationMessage] = ()
) -> int:
    read = (*before, ConversationMessage("user", text))
    messages = [{"role": message.role, "content": message.content} for message in read]
    answer = served.client().post("/v1/chat/completions", json={**CHAT, "messages": messages})
    return prompt_tokens(answer.json())


@pytest.mark.parametrize("path", TOLD)
@pytest.mark.parametrize("stream", [False, True])
def test_each_api_tells_the_model_the_form_and_the_client_that_it_did(
    served: ServerHarness, path: str, stream: bool
) -> None:
    answer = served.client().post(path, json={**TOLD[path], "stream": stream})
    assert answer.status_code == 200
    assert INSTRUCTION_WARNING in answer.text
    if not stream:
        read = chat_prompt(served, f"{QUESTION}\n\n{INSTRUCTION}", before=SAMPLES)
        assert prompt_tokens(answer.json()) == read


@pytest.mark.parametrize("path", TOLD)
def test_a_server_can_leave_it_out(make_served: MakeServed, path: str) -> None:
    batch = EngineConfig(memory_budget=64 << 20)
    served = make_served(ServeSettings(json_instruction=False, engine=batch))
    answer = served.client().post(path, json=TOLD[path])
    assert INSTRUCTION_WARNING not in answer.text
    assert prompt_tokens(answer.json()) == chat_prompt(served, QUESTION)


@pytest.mark.parametrize("path", TOLD)
def test_a_base_without_a_chat_template_reads_the_paragraph_alone(
    make_served: MakeServed, path: str
) -> None:
    served = make_served(chat_template=None)
    answer = served.client().post(path, json=TOLD[path])
    assert (answer.status_code, INSTRUCTION_WARNING in answer.text) == (200, True)
    tokenizer = served.engine.tokenizer
    assert prompt_tokens(answer.json()) == len(tokenizer.encode(f"{QUESTION}\n\n{INSTRUCTION}"))


ONE_TURN = "{% if messages|length > 1 %}{{ raise_exception('one turn') }}{% endif %}"


def test_a_template_that_takes_one_turn_reads_the_paragraph_alone(make_served: MakeServed) -> None:
    served = make_served(chat_template=ONE_TURN + CHAT_TEMPLATE)
    answer = served.client().post("/v1/infer", json=TOLD["/v1/infer"])
    assert answer.status_code == 200
    assert prompt_tokens(answer.json()) == chat_prompt(served, f"{QUESTION}\n\n{INSTRUCTION}")


def test_samples_that_would_take_much_of_the_context_are_left_out(served: ServerHarness) -> None:
    samples = chat_prompt(served, "?", before=SAMPLES) - chat_prompt(served, "?")
    read = chat_prompt(served, f"{QUESTION}\n\n{INSTRUCTION}")
    for context, expected in ((8 * samples, read + samples), (8 * samples - 1, read)):
        body = {**TOLD["/v1/infer"], "context_size": context}
        answer = served.client().post("/v1/infer", json=body)
        assert (answer.status_code, prompt_tokens(answer.json())) == (200, expected)


def test_counted_tokens_are_those_that_are_read(served: ServerHarness) -> None:
    body = {k: v for k, v in TOLD["/v1/messages"].items() if k not in {"max_tokens", "temperature"}}
    counted = served.client().post("/v1/messages/count_tokens", json=body).json()
    read = served.client().post("/v1/messages", json=TOLD["/v1/messages"]).json()
    assert counted["input_tokens"] == prompt_tokens(read)


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "now"}}]},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "text"}},
    ],
    ids=lambda more: str(more)[:40],
)
def test_nothing_is_added_beside_tools_or_without_a_schema(
    served: ServerHarness, more: Any
) -> None:
    body = {**TOLD["/v1/chat/completions"], **more}
    answer = served.client().post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert INSTRUCTION_WARNING not in answer.text


def test_neither_the_route_nor_the_plan_depends_on_it(served: ServerHarness) -> None:
    body = {"prompt": QUESTION, "max_tokens": 2, "seed": 1}
    plain = served.client().post("/v1/infer", json=body).json()
    told = served.client().post("/v1/infer", json={**TOLD["/v1/infer"], **body}).json()
    assert told["plan"]["identity"] == plain["plan"]["identity"]
    assert told["plan"]["experts"] == plain["plan"]["experts"]


def test_a_template_of_the_request_is_not_added_to(served: ServerHarness) -> None:
    body = {**TOLD["/v1/infer"], "template": "Say: {prompt}"}
    answer = served.client().post("/v1/infer", json=body).json()
    assert INSTRUCTION_WARNING not in answer["warnings"]
    assert answer["tokens"]["prompt"] == chat_prompt(served, f"Say: {QUESTION}")
