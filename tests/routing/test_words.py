import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.routing.features import (
    contains_phrase,
    has_content_word,
    is_number,
    read_words,
    split_words,
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Write SQL, please!", ["write", "sql", "please"]),
        ("C++ and C# and node.js", ["c++", "and", "c#", "and", "node.js"]),
        ("3.5 km, year-month-day", ["3.5", "km", "year-month-day"]),
        ("don't_stop", ["don't", "stop"]),
        ("\uff33\uff31\uff2c Straße", ["sql", "strasse"]),
        ("日本語", ["日本語"]),
        ("…!?", []),
    ],
)
def test_words_are_read_in_one_spelling(text: str, words: list[str]) -> None:
    assert split_words(text) == words
    assert [word.text for word in read_words(text)] == words


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("Sort 3, 1, 2 now", {"3", "1", "2"}),
        ("Write as JSON: name Ada. Then stop", {"name", "ada"}),
        ("set id = 7 here", {"id", "7"}),
        ("a poem about rain", set()),
    ],
)
def test_lists_pairs_and_what_follows_a_colon_are_data(text: str, data: set[str]) -> None:
    assert {word.text for word in read_words(text) if word.is_data} == data


@pytest.mark.parametrize(
    ("phrase", "found"),
    [
        ("sql", True),
        ("SQL query", True),
        ("query sql", False),
        ("ql", False),
        ("sql query for", True),
        ("", False),
        ("!!", False),
        ("for me now", False),
    ],
)
def test_a_phrase_is_found_as_whole_words(phrase: str, found: bool) -> None:
    assert contains_phrase(split_words("An SQL query for me"), phrase) is found


def test_numbers_and_empty_phrases_are_told_apart() -> None:
    assert is_number("12km")
    assert not is_number("km")
    assert has_content_word("the plural")
    assert not has_content_word("what is the")


@given(st.text(max_size=300))
def test_every_word_of_a_text_is_in_it(text: str) -> None:
    words = split_words(text)
    assert all(contains_phrase(words, word) for word in words)
