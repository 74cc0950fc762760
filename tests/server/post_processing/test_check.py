"""From a ``response_format`` to a check: our own words, and those of the OpenAI API."""

import pytest
from openai.types.shared_params import ResponseFormatJSONObject, ResponseFormatJSONSchema

from expertctl.engine.text.answer_format import MAX_CHARACTERS
from expertctl.errors import UsageError
from expertctl.schema.validation import convert_document
from expertctl.server.response_format import (
    NamedSchema,
    ResponseFormat,
    build_check,
)

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def passes(given: ResponseFormat, text: str) -> bool | None:
    check = build_check(given)
    assert check is not None
    return check(text).passed


@pytest.mark.parametrize("given", [None, ResponseFormat("text")])
def test_text_is_no_form(given: ResponseFormat | None) -> None:
    assert build_check(given) is None


@pytest.mark.parametrize(
    ("text", "value", "an_object"),
    [
        ('{"a": [1, 2.5e400, null]}', True, True),
        (' [1, "ü"]\n', True, False),
        ("7", True, False),
        ("1" * 6000, True, False),
        ("[NaN]", False, False),
        ("{'a': 1}", False, False),
        ('Sure! {"a": 1}', False, False),
        ('```json\n{"a": 1}\n```', False, False),
        ('{"a": 1} {"a": 2}', False, False),
        ("[" * 100_000, False, False),
        ("", False, False),
        (" \n", False, False),
        ("[" * (MAX_CHARACTERS + 1), None, None),
    ],
)
def test_json_is_the_whole_answer(text: str, value: bool | None, an_object: bool | None) -> None:
    assert passes(ResponseFormat("json"), text) is value
    assert passes(ResponseFormat("json_object"), text) is an_object


@pytest.mark.parametrize(
    "given",
    [
        ResponseFormat("json_schema", schema=OBJECT),
        ResponseFormat("json_schema", json_schema=NamedSchema("thing", OBJECT, strict=True)),
    ],
)
def test_a_schema_is_given_in_our_form_or_in_that_of_openai(given: ResponseFormat) -> None:
    assert passes(given, '{"a": 1}') is True
    assert passes(given, '{"a": "1"}') is False
    assert passes(given, "[]") is False
    assert passes(given, "a: 1") is False


def test_what_the_openai_client_sends_is_read() -> None:
    plain: ResponseFormatJSONObject = {"type": "json_object"}
    named: ResponseFormatJSONSchema = {
        "type": "json_schema",
        "json_schema": {"name": "thing", "schema": dict(OBJECT), "strict": True},
    }
    assert passes(convert_document(plain, ResponseFormat), "{}") is True
    assert passes(convert_document(named, ResponseFormat), '{"a": 1}') is True


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("def add(a, b):\n    return a + b\n", True),
        ("Here:\n```python\nprint(1)\n```", True),
        ("raise SystemExit(3)", True),
        ("def add(a, b)\n    return a + b\n", False),
        ("x = " + "(" * 5000, False),
        ("", False),
    ],
)
def test_python_is_parsed_and_not_run(text: str, passed: bool) -> None:
    assert passes(ResponseFormat("python"), text) is passed


@pytest.mark.parametrize(
    ("given", "place"),
    [
        (ResponseFormat("json_schema"), "0 schemas are given"),
        (ResponseFormat("json_schema", json_schema=NamedSchema("x")), "0 schemas are given"),
        (
            ResponseFormat("json_schema", schema={}, json_schema=NamedSchema("x", {})),
            "2 schemas are given",
        ),
        (ResponseFormat("json", schema={}), "response_format.schema does not belong"),
        (ResponseFormat("sql", name="x"), "response_format.name does not belong"),
        (ResponseFormat("custom"), "response_format.name is missing"),
        (ResponseFormat("custom", name="iban"), "there is no validator 'iban'"),
        (
            ResponseFormat("json_schema", schema={"type": "strin"}),
            "response_format.schema/type: ",
        ),
        (
            ResponseFormat("json_schema", json_schema=NamedSchema("x", {"type": "strin"})),
            "response_format.json_schema.schema/type: ",
        ),
    ],
)
def test_a_format_that_says_too_little_or_too_much_is_refused(
    given: ResponseFormat, place: str
) -> None:
    with pytest.raises(UsageError) as refused:
        build_check(given)
    assert refused.value.message.startswith(("response_format", place))
    assert place in refused.value.message
    assert refused.value.hint
