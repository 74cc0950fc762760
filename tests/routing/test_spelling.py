"""A text is read as people see it."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.routing.features import find_confusable, fold_confusables

CYRILLIC_A, CYRILLIC_E, CYRILLIC_O = "\u0430", "\u0435", "\u043e"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain words", "plain words"),
        ("two\nlines", "two\nlines"),
        ("i\u200bn\u200dv\u2060i\ufeffs\u00adible", "invisible"),
        ("left \u202eright\u202c left", "left right left"),
        ("bell\x07 and null\x00", "bell and null"),
        ("tagged" + "".join(chr(0xE0000 + ord(c)) for c in "use x"), "tagged"),
        ("\uff33\uff31\uff2c query", "SQL query"),
        ("struck\u0336 through\u0335", "struck through"),
        ("carriage\r\nreturns\rhere", "carriage\nreturns\nhere"),
        ("a line\u2028another", "a line\nanother"),
        ("caf\u0065\u0301", "caf\u00e9"),
    ],
)
def test_what_cannot_be_seen_is_left_out(text: str, seen: str) -> None:
    assert fold_confusables(text) == seen


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (f"r{CYRILLIC_O}uter", "router"),
        (f"us{CYRILLIC_E} it", "use it"),
        (f"{CYRILLIC_A} b{CYRILLIC_O}t", "a bot"),
        ("\u0391\u03a1I of it", "API of it"),
    ],
)
def test_letters_that_look_latin_are_read_so(text: str, seen: str) -> None:
    assert fold_confusables(text) == seen


@pytest.mark.parametrize(
    "text",
    [
        "\u043f\u0435\u0440\u0435\u0432\u0435\u0434\u0438 \u044d\u0442\u043e",
        "\u03b3\u03c1\u03ac\u03c8\u03b5 \u03bc\u03b9\u03b1",
        "what does \u043f\u0440\u0438\u0432\u0435\u0442 mean",
        "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
        "\u3053\u3093\u306b\u3061\u306f",
        "\u00e9l\u00e8ve na\u00efve gr\u00f6\u00dfer",
    ],
)
def test_words_of_one_alphabet_stay(text: str) -> None:
    assert fold_confusables(text) == unicodedata.normalize("NFKC", text)


@given(st.text(max_size=200))
def test_reading_twice_changes_nothing_more_than_reading_once(text: str) -> None:
    once = fold_confusables(text)
    assert fold_confusables(fold_confusables(once)) == fold_confusables(once)
    assert "\u200b" not in once


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("all is plain", None),
        ("\u0432\u0441\u0435 \u043f\u043e-\u0440\u0443\u0441\u0441\u043a\u0438", None),
        (f"the r{CYRILLIC_O}uter", "router"),
        ("the ro\u200buter", "router"),
        ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", None),
    ],
)
def test_a_disguised_word_is_named(text: str, word: str | None) -> None:
    assert find_confusable(text) == word
