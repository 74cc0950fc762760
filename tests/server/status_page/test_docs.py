"""The page of the API says what the OpenAPI document says."""

import re
from html import unescape
from typing import Any

from expertctl.http.openapi import DescriptionPart, describe_answer, describe_type, split_code
from tests.server.conftest import MakeServed
from tests.server.harness import URL, ServerHarness


def read_sections(page: str) -> dict[str, str]:
    """The text of every section with an id."""
    found = re.findall(r'<section class="sheet[^"]*" id="([^"]+)"(.*?)</section>', page, re.DOTALL)
    return {name: unescape(re.sub(r"<[^>]+>", "", body)) for name, body in found}


def test_it_has_every_operation_and_every_schema_with_its_fields(served: ServerHarness) -> None:
    client = served.client()
    document: Any = client.get("/openapi.json").json()
    page = client.get("/docs").text
    sections = read_sections(page)
    for path, item in document["paths"].items():
        for method, operation in item.items():
            text = sections.pop(operation["operationId"])
            assert f"{method.upper()} {path}" in text
            assert operation["summary"].replace("`", "") in text
            assert f"curl {'-X DELETE ' if method == 'delete' else ''}{URL}" in text
            assert set(re.findall(r"^\s*(\d{3})", text, re.MULTILINE)) <= set(
                operation["responses"]
            )
    for name, schema in document["components"]["schemas"].items():
        text = sections.pop(f"schema-{name}")
        assert [key for key in schema.get("properties", {}) if key not in text] == []
    assert sections == {}
    targets = set(re.findall(r'href="#([^"]+)"', page))
    assert targets <= set(re.findall(r'\bid="([^"]+)"', page))


def test_it_says_what_needs_a_key_once_there_are_keys(make_served: MakeServed) -> None:
    served = make_served()
    before = served.client().get("/docs").text
    assert "EXPERT_API_KEY" not in before
    assert "needs no key" not in before
    served.service.keys.create("alice", now=0.0)
    sections = read_sections(served.client().get("/docs").text)
    assert "Authorization: Bearer $EXPERT_API_KEY" in sections["infer"]
    assert "needs no key" not in sections["infer"]
    assert "needs no key" in sections["isReady"]
    assert "EXPERT_API_KEY" not in sections["isReady"]


def to_text(parts: tuple[DescriptionPart, ...]) -> str:
    marks = {"text": "{}", "code": "`{}`", "schema": "[{}]"}
    return "".join(marks[part.kind].format(part.text) for part in parts)


def test_types_are_described_in_words() -> None:
    described = {
        "text of 1 to 9 characters: A name; such as `a`": {
            "type": "string",
            "minLength": 1,
            "maxLength": 9,
            "description": "A name.",
            "examples": ["a"],
        },
        '`"a"` or null': {"anyOf": [{"enum": ["a"]}, {"type": "null"}]},
        "list of [Plan]": {"type": "array", "items": {"$ref": "#/components/schemas/Plan"}},
        "list": {"type": "array"},
        "integer or null": {"type": ["integer", "null"]},
        "number at most 1: `0.5` by default": {"type": "number", "maximum": 1, "default": 0.5},
        "any": {},
        "time": {"type": "string", "format": "date-time"},
        "base64": {"type": "string", "contentEncoding": "base64"},
    }
    assert {to_text(describe_type(schema)): schema for schema in described.values()} == described


def test_an_answer_may_be_empty_or_a_stream() -> None:
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    assert to_text(describe_answer({})) == "no body"
    body = {"application/json": {"schema": {"$ref": "#/components/schemas/Plan"}}}
    assert to_text(describe_answer({**body, **stream})) == "[Plan], or events: text"


def test_what_is_between_backticks_is_code() -> None:
    assert to_text(split_code("set ``a`` to `b`,\n  not c")) == "set `a` to `b`, not c"
    assert split_code("") == ()
