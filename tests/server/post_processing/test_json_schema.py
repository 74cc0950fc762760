"""JSON Schemas that strangers send: what they cost, where they point, what they find."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from expertctl.errors import UsageError
from expertctl.server.json_schema import (
    MAX_DEPTH,
    MAX_PARTS,
    MAX_VALUES,
    build_schema_cost,
    compile_schema,
)


def passes(schema: dict[str, Any], value: object) -> bool | None:
    return compile_schema(schema, where="schema").check(json.dumps(value)).passed


def chain(length: int, times: int) -> dict[str, Any]:
    """Each part applies the next one so many times: times to the power of length looks."""
    parts: dict[str, Any] = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * times} for n in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{length}": {"type": "integer"}}}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=8,
)
LEAVES = st.sampled_from(
    [
        {},
        {"type": "object"},
        {"type": "array", "maxItems": 2},
        {"type": ["string", "null"]},
        {"enum": [1, "a", None]},
        {"const": {}},
        {"minimum": 0},
        {"pattern": "^a+$"},
        {"required": ["a"]},
        {"$ref": "#/$defs/other"},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda a, b: {"properties": {"a": a, "b": b}}, inner, inner),
        st.builds(lambda a: {"additionalProperties": a}, inner),
        st.builds(lambda a, b: {"prefixItems": [a], "items": b}, inner, inner),
        st.builds(lambda a, b: {"allOf": [a, b]}, inner, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(lambda a, b: {"oneOf": [a, b]}, inner, inner),
        st.builds(lambda a: {"not": a}, inner),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
    ),
    max_leaves=8,
)


@given(SCHEMAS, LEAVES.filter(lambda leaf: "$ref" not in leaf), VALUES)
@settings(max_examples=150, deadline=None)
def test_an_answer_passes_where_the_reference_implementation_says_so(
    schema: dict[str, Any], other: dict[str, Any], value: object
) -> None:
    whole = {**schema, "$defs": {"other": other}}
    assert passes(whole, value) is Draft202012Validator(whole).is_valid(value)


def test_the_problem_names_the_place_and_is_short() -> None:
    schema = compile_schema({"properties": {"a": {"items": {"maxLength": 3}}}}, where="schema")
    found = schema.check(json.dumps({"a": ["x" * 5000]}))
    assert found.passed is False
    assert found.problem.startswith("the answer does not fit its schema: a/0: ")
    assert found.problem.endswith("is longer than 3 characters")
    assert len(found.problem) <= 300


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "https://example.com/schema"}, "schema/$ref: "),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "schema/properties/a/$ref: "),
        ({"items": {"$ref": "other.json#/a"}}, "schema/items/$ref: "),
        ({"$defs": {"a": {"$ref": "http://127.0.0.1:1/x"}}}, "schema"),
        ({"$ref": "#/$defs/none"}, "schema/$ref: "),
        ({"$ref": "#/$defs", "$defs": 5}, "schema/$ref: "),
        ({"allOf": [{"$ref": "#/allOf/7"}]}, "schema/allOf/0/$ref: "),
        ({"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}, "schema/$ref: "),
        ({"allOf": [{"$id": "https://example.com/x"}]}, "schema/allOf/0/$id: "),
        ({"not": {"$dynamicRef": "#x"}}, "schema/not/$dynamicRef: "),
        ({"unevaluatedProperties": False}, "schema/unevaluatedProperties: "),
        ({"$schema": "https://example.com/meta"}, "schema/$schema"),
        ({"$schema": 5}, "schema/$schema"),
        ({"properties": {"a": {"type": "strin"}}}, "schema/properties/a/type: "),
        ({"pattern": "("}, "schema/pattern: "),
        ({"pattern": "(?=a)b"}, "schema/pattern: "),
        ({"pattern": "(a{1000}){1000}"}, "schema/pattern: "),
        ({"$ref": "#"}, "schema refers to itself"),
        ({"anyOf": [{"type": "null"}, {"not": {"$ref": "#"}}]}, "schema"),
    ],
    ids=str,
)
def test_a_schema_that_points_elsewhere_or_is_none_is_refused(
    schema: dict[str, Any], place: str
) -> None:
    with pytest.raises(UsageError) as refused:
        compile_schema(schema, where="schema")
    assert refused.value.message.startswith(place)
    assert refused.value.hint


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": list(range(MAX_VALUES))},
        {"properties": {str(n): {"type": "null"} for n in range(MAX_PARTS)}},
    ],
    ids=["values", "parts"],
)
def test_a_schema_that_is_too_large_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="has over"):
        compile_schema(schema, where="schema")


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_DEPTH):
        schema = {"items": schema}
    with pytest.raises(UsageError, match="nested deeper"):
        compile_schema({"items": schema}, where="schema")


@pytest.mark.parametrize("words", [["$ref"], ["$id", "$schema"], ["unevaluatedItems"]])
def test_properties_may_be_called_like_keywords(words: list[str]) -> None:
    schema = {"properties": {word: {"type": "string"} for word in words}}
    assert passes(schema, dict.fromkeys(words, "https://example.com")) is True
    assert passes(schema, dict.fromkeys(words, 5)) is False


@pytest.mark.parametrize(
    "schema", [chain(40, 2), chain(9, 9)], ids=["long and narrow", "short and broad"]
)
def test_a_schema_that_would_look_too_often_is_not_used(schema: dict[str, Any]) -> None:
    found = compile_schema(schema, where="schema").check("1")
    assert (found.passed, found.problem) == (
        None,
        "the answer is not checked: its schema would take too long",
    )


def test_what_a_bomb_costs_grows_with_the_depth_of_the_answer() -> None:
    twice = {"$ref": "#/$defs/a"}
    schema = {**twice, "$defs": {"a": {"properties": {"c": {"allOf": [twice, twice]}}}}}
    value: dict[str, Any] = {}
    for _ in range(8):
        value = {"c": value}
    assert passes(schema, value) is True
    for _ in range(40):
        value = {"c": value}
    assert passes(schema, value) is None


def test_a_list_of_any_json_is_cheap() -> None:
    """Many properties of one kind are not many looks: each value has one name."""
    names = [f"p{n}" for n in range(50)]
    schema = {"properties": {name: {"$ref": "#"} for name in names}, "type": "object"}
    value: dict[str, Any] = {}
    for _ in range(30):
        value = dict.fromkeys(names[:2], value) if len(json.dumps(value)) < 9000 else {"p0": value}
    assert passes(schema, value) is True


def test_an_answer_that_is_nested_too_deep_is_not_checked() -> None:
    assert compile_schema({}, where="schema").check("[" * 100 + "]" * 100).passed is None


@pytest.mark.parametrize(
    ("length", "times"), [(1, 1), (3, 2), (2, 5)], ids=lambda value: str(value)
)
def test_looks_are_counted_as_they_are_in_the_plain_walk(length: int, times: int) -> None:
    def walk(number: int) -> int:
        """Every part that is entered, the references themselves, and what each compares."""
        if number == length:
            return 2
        return 1 + times + times * (2 + walk(number + 1))

    schema = chain(length, times)
    top = 1 + 1 + len(schema["$defs"])  # itself, its reference, its definitions
    assert build_schema_cost(schema, where="schema").count_visits(1) == [top + walk(0)]


@pytest.mark.parametrize(
    "dialect",
    [
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2019-09/schema#",
        "http://json-schema.org/draft-07/schema#",
    ],
)
def test_three_dialects_are_read(dialect: str) -> None:
    schema = {"$schema": dialect, "$id": "https://example.com/mine", "type": "integer"}
    assert passes(schema, 1) is True
    assert passes(schema, "1") is False


@pytest.mark.parametrize("text", ["1e400", "[-1e999]", "1" * 5000, '"\\ud800"'])
def test_what_cannot_be_compared_is_left_open(text: str) -> None:
    found = compile_schema({"maximum": 5, "maxLength": 1}, where="schema").check(text)
    assert found.passed is None
    assert found.problem.startswith("the answer is not checked: ")


def test_a_schema_that_is_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^schema: "):
        compile_schema({"const": "\ud800"}, where="schema")


def test_references_go_through_lists_and_escapes() -> None:
    schema = {
        "anyOf": [{"$ref": "#/$defs/a~1b%20c/oneOf/0"}, {"type": "null"}],
        "$defs": {"a/b c": {"oneOf": [{"type": "integer"}]}},
        "dependentSchemas": {"x": {"required": ["y"]}},
        "patternProperties": {"^n": {"type": "number"}},
    }
    assert passes(schema, 5) is True
    assert passes(schema, None) is True
    assert passes(schema, {"x": 1}) is False


@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": {f"a{n}": True for n in range(101)}},
        {"properties": {str(n): {"pattern": f"a{n}"} for n in range(101)}},
        {"items": {"pattern": "a" * 10_001}},
    ],
    ids=["names", "values", "length"],
)
def test_a_schema_of_many_or_long_patterns_is_refused_before_any_is_compiled(
    schema: dict[str, Any],
) -> None:
    with pytest.raises(UsageError, match="over 100 patterns, or over 10000 characters"):
        compile_schema(schema, where="schema")
