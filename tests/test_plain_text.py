"""What is replaced in foreign text, held against the Unicode names of the characters."""

import sys
import unicodedata

import pytest

from expertctl.cli.output import make_printable
from expertctl.errors import replace_unsafe, sanitise_text, to_single_line
from expertctl.errors import sanitise_error_text as printable_error

BIDI = (
    "LEFT-TO-RIGHT EMBEDDING", "RIGHT-TO-LEFT EMBEDDING", "POP DIRECTIONAL FORMATTING",
    "LEFT-TO-RIGHT OVERRIDE", "RIGHT-TO-LEFT OVERRIDE", "LEFT-TO-RIGHT ISOLATE",
    "RIGHT-TO-LEFT ISOLATE", "FIRST STRONG ISOLATE", "POP DIRECTIONAL ISOLATE",
)  # fmt: skip
WHOLE = {
    "a family of four": "👨‍👩‍👧‍👦",
    "a flag of a country's part": "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "a Persian verb": "می‌خواهم",
    "a Sinhala word": "ශ්‍රී",
    "Hebrew with a mark": "שלום\u200f!",
    "a soft hyphen": "Donau\u00addampf",
    "a Japanese space": "東京\u3000大阪",
    "a new emoji": "\U0001fae9",
}


def test_exactly_controls_bidi_controls_and_halves_of_characters_are_replaced() -> None:
    replaced = {c for c in map(chr, range(sys.maxunicode + 1)) if replace_unsafe(c) != c}
    wanted = {
        c
        for c in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(c) in {"Cc", "Cs"} and c not in "\n\t"
    }
    assert replaced == wanted | {unicodedata.lookup(name) for name in BIDI}


@pytest.mark.parametrize("text", WHOLE.values(), ids=WHOLE)
def test_words_and_emoji_stay_whole_wherever_they_are_shown(text: str) -> None:
    assert make_printable(text) == text
    assert printable_error(text) == text
    assert to_single_line(text) == text
    assert sanitise_text(text) == " ".join(text.split())


@pytest.mark.parametrize("name", BIDI)
def test_text_that_would_reorder_its_surroundings_is_never_shown(name: str) -> None:
    hidden = unicodedata.lookup(name)
    for show in (make_printable, printable_error, to_single_line, sanitise_text):
        assert hidden not in show(f"file{hidden}gnp.exe")


@pytest.mark.parametrize("end", ["\n", "\r", "\t", "\x0b", "\x0c", "\x85", "\u2028", "\u2029"])
def test_one_line_stays_one_line(end: str) -> None:
    assert to_single_line(f"a{end}b") == "a b"


def test_a_control_character_in_a_line_is_shown_as_replaced_not_as_a_space() -> None:
    assert to_single_line("red\x1b[31m\nnext") == "red\N{REPLACEMENT CHARACTER}[31m next"
    assert to_single_line("red\x1b[31m", "?") == "red?[31m"


def test_texts_of_servers_lose_the_same_characters() -> None:
    every = [chr(number) for number in range(sys.maxunicode + 1)]
    ours = {c for c in every if to_single_line(c) != c}
    assert {c for c in every if sanitise_text(f"a{c}b") != f"a{c}b"} == ours | {
        c for c in every if c.isspace() and c != " "
    }
