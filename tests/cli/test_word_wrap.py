"""Answers on a terminal: no word is broken at the margin, however the pieces come.

`textwrap` is the oracle for prose in Latin letters.
"""

import io
import os
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.cli.output import WordWrap, count_columns, open_answer_stream

PERSIAN = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
FAMILY = "👨‍👩‍👧‍👦"


def wrapped(text: str, width: int, size: int = 1) -> str:
    wrap = WordWrap(lambda: width)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return "".join(map(wrap.feed, pieces)) + wrap.finish()


WORDS = st.lists(st.text("abcdefgh.,", min_size=1, max_size=19), min_size=1, max_size=30)


@given(words=WORDS, width=st.integers(20, 60), size=st.integers(1, 7))
def test_prose_is_broken_where_textwrap_breaks_it(words: list[str], width: int, size: int) -> None:
    text = " ".join(words)
    wanted = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    assert wrapped(text, width, size).split("\n") == wanted


@given(text=st.text("ab \n\t字é‌‍", max_size=200), width=st.integers(20, 40))
def test_nothing_but_line_breaks_and_the_spaces_at_them_changes(text: str, width: int) -> None:
    def letters(shown: str) -> str:
        return "".join(shown.split())

    assert letters(wrapped(text, width)) == letters(text)


@given(text=st.text("ab字 \n", max_size=200), width=st.integers(20, 40), size=st.integers(1, 9))
def test_how_a_model_cuts_its_pieces_makes_no_difference(text: str, width: int, size: int) -> None:
    assert wrapped(text, width, size) == wrapped(text, width, len(text) or 1)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three four five six", "one two three four\nfive six"),
        ("short\nlines\n\nstay", "short\nlines\n\nstay"),
        ("    an indented line of words", "    an indented line\nof words"),
        ("x" * 50, "x" * 50),
        (f"look: {'x' * 30} end", f"look:\n{'x' * 30} end"),
        ("字" * 15, f"{'字' * 10}\n{'字' * 5}"),
        ("```\n" + "a b " * 10 + "\n```\n" + "a b " * 6, None),
        ("ends with spaces   \nnext", "ends with spaces   \nnext"),
    ],
    ids=["prose", "own line ends", "indented", "one long word", "a long word behind a short one",
         "Chinese", "a fenced block", "spaces at an end"],
)  # fmt: skip
def test_a_line_is_broken_between_words(text: str, shown: str | None) -> None:
    if shown is None:
        block, rest = "```\n" + "a b " * 10 + "\n```\n", "a b " * 5
        shown = f"{block}{rest.rstrip()}\na b"
    assert wrapped(text, 20).rstrip(" ") == shown


def test_a_family_of_emoji_is_never_broken() -> None:
    shown = wrapped(f"{'x' * 12} {FAMILY}{FAMILY}", 20)
    assert FAMILY in shown
    assert shown.replace("\n", "").count(FAMILY) == 2


@pytest.mark.parametrize(
    ("text", "width"),
    [("abc", 3), ("字", 2), ("é", 1), ("e\u0301", 1), (PERSIAN, 7), ("a\tb", 9)],
)
def test_a_text_takes_the_columns_that_terminals_give_it(text: str, width: int) -> None:
    assert count_columns(text) == width


class WrapTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1


def test_a_terminal_gets_whole_words_and_a_pipe_gets_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((20, 10)))
    for stream, expected in [
        (WrapTerminal(), "one two three four\nfive six\n"),
        (io.StringIO(), "one two three four five six\n"),
    ]:
        monkeypatch.setattr(sys, "stdout", stream)
        with open_answer_stream() as shown:
            for piece in ("one two th", "ree four fi", "ve six"):
                shown.write(piece)
        assert stream.getvalue() == expected


def _interrupted_answer() -> None:
    with open_answer_stream() as shown:
        shown.write("one tw")
        raise KeyboardInterrupt


def test_an_answer_that_breaks_off_keeps_its_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((20, 10)))
    stream = WrapTerminal()
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(KeyboardInterrupt):
        _interrupted_answer()
    assert stream.getvalue() == "one tw\n"
