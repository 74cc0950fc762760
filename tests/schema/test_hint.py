from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError
from expertctl.schema.manifest import (
    MAX_HINT_DEPTH,
    AllOf,
    AnyOf,
    Comparison,
    Hint,
    Keyword,
    Not,
    parse_hint,
)

SQL = Comparison("format", "=", "sql")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("format=sql", SQL),
        ("  FORMAT = SQL ", SQL),
        ('format="sql"', SQL),
        ("format=sql OR keyword(sql)", AnyOf((SQL, Keyword(("sql",))))),
        ("keyword(c++, c#, node.js)", Keyword(("c++", "c#", "node.js"))),
        ('keyword("window function")', Keyword(("window function",))),
        ('keyword("or", and)', Keyword(("or", "and"))),
        ("has_json=true and not has_code=false", AllOf((
            Comparison("has_json", "=", True), Not(Comparison("has_code", "=", False)))))
        ,
        ("length>=100", Comparison("length", ">=", 100)),
        ("language!=en", Comparison("language", "!=", "en")),
        ("format=a OR format=b AND format=c", AnyOf((
            Comparison("format", "=", "a"),
            AllOf((Comparison("format", "=", "b"), Comparison("format", "=", "c")))))),
        ("(format=a OR format=b) AND format=c", AllOf((
            AnyOf((Comparison("format", "=", "a"), Comparison("format", "=", "b"))),
            Comparison("format", "=", "c")))),
        ("NOT NOT format=sql", Not(Not(SQL))),
        ("((format=sql))", SQL),
        ("task=code_generation", Comparison("task", "=", "code_generation")),
    ],
)  # fmt: skip
def test_a_hint_is_read(text: str, hint: Hint) -> None:
    assert parse_hint(text) == hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "was expected, not the end"),
        ("   ", "not the end"),
        ("sql", "keyword(…) or one of format"),
        ("format", "an operator such as = was expected after format"),
        ("format=", "a value for format was expected"),
        ("format==sql", "a value for format"),
        ("format<sql", "format can only be compared with = and !="),
        ("has_json=maybe", "true or false, not 'maybe'"),
        ("length=ten", "a whole number, not 'ten'"),
        ("length=9999999999", "a whole number"),
        ("keyword", "'(' was expected"),
        ("keyword()", "a word was expected"),
        ("keyword(sql", "')' was expected"),
        ("keyword(sql,)", "a word was expected"),
        ("format=sql format=json", "AND or OR was expected"),
        ("format=sql OR", "not the end"),
        ("(format=sql", "')' was expected"),
        ("format=sql)", "AND or OR was expected, not ')'"),
        ('keyword("")', "the quotes hold no text"),
        ('keyword("sql)', "cannot read"),
        ("__import__('os')", "cannot read"),
        ("format=sql; rm", "cannot read"),
        ("price=3", "one of format"),
        ("x" * 501, "501 characters, at most 500"),
        ("(" * (MAX_HINT_DEPTH + 1) + "format=sql", "nested deeper"),
        ("NOT " * (MAX_HINT_DEPTH + 1) + "format=sql", "nested deeper"),
    ],
)
def test_what_is_no_hint_is_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(InvalidPackageError) as caught:
        parse_hint(text)
    assert message in caught.value.message


def test_a_refusal_says_where_and_shows_a_hint() -> None:
    with pytest.raises(InvalidPackageError) as caught:
        parse_hint("format=sql OR colour=red")
    assert "(at character 15)" in caught.value.message
    assert "format=sql OR keyword(sql, query)" in caught.value.hint


words = st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True)
comparisons = st.one_of(
    st.builds(
        Comparison, st.sampled_from(["format", "language", "task"]), st.sampled_from("="), words
    ),
    st.builds(
        Comparison,
        st.just("length"),
        st.sampled_from(["=", "!=", "<", "<=", ">", ">="]),
        st.integers(0, 10**8),
    ),
    st.builds(Comparison, st.sampled_from(["has_json", "has_code"]), st.just("!="), st.booleans()),
)
leaves: st.SearchStrategy[Hint] = comparisons | st.builds(
    Keyword, st.lists(words, min_size=1, max_size=3).map(tuple)
)
hints: st.SearchStrategy[Hint] = st.recursive(
    leaves,
    lambda inner: (
        st.builds(Not, inner)
        | st.builds(AllOf, st.lists(inner, min_size=2, max_size=3).map(tuple))
        | st.builds(AnyOf, st.lists(inner, min_size=2, max_size=3).map(tuple))
    ),
    max_leaves=6,
)


def spelled(hint: Hint) -> str:
    match hint:
        case Comparison(feature, operator, value):
            return f"{feature} {operator} {str(value).lower()}"
        case Keyword(listed):
            return f"keyword({', '.join(listed)})"
        case Not(inner):
            return f"NOT ({spelled(inner)})"
        case AllOf(inner):
            return " AND ".join(f"({spelled(each)})" for each in inner)
        case AnyOf(inner):
            return " OR ".join(f"({spelled(each)})" for each in inner)


@settings(deadline=None, max_examples=100)
@given(hints)
def test_what_is_spelled_is_read_back(hint: Hint) -> None:
    text = spelled(hint)
    if len(text) <= 500:
        assert parse_hint(text) == hint


pieces = st.sampled_from(
    [
        "format",
        "=",
        "sql",
        "(",
        ")",
        "AND",
        "OR",
        "NOT",
        "keyword",
        ",",
        '"',
        "length",
        "3",
        "<",
        "é",
    ]
)


@settings(deadline=None, max_examples=200)
@given(st.lists(pieces, max_size=40).map(" ".join) | st.text(max_size=600))
def test_no_text_makes_the_parser_fail_otherwise(text: str) -> None:
    with suppress(InvalidPackageError):
        parse_hint(text)
