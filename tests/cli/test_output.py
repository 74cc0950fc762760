"""Output: control characters never reach a terminal, tables line up, sizes read well."""

import io
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.cli.output import (
    emit,
    fail,
    fold,
    format_table,
    make_printable,
    note,
)
from expertctl.errors import UsageError
from expertctl.settings import format_size


class OutputTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text\n\tindented é 漢", "plain text\n\tindented é 漢"),
        ("\x1b[31mred", "�[31mred"),
        ("a\rb", "a�b"),
        ("file\u202egnp.exe", "file�gnp.exe"),
        ("\x00\x07\x9b", "���"),
        ("\udcff", "�"),
    ],
)
def test_control_characters_are_replaced(text: str, shown: str) -> None:
    assert make_printable(text) == shown


@given(st.text())
def test_printable_text_has_no_escape_and_keeps_its_length(text: str) -> None:
    shown = make_printable(text)
    assert len(shown) == len(text)
    assert not set(shown) & {"\x1b", "\x9b", "\r", "\x07", "\u202e"}


def test_with_json_only_the_document_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"name": "é\x1b"}, "text", as_json=True)
    note("aside")
    out, err = capsys.readouterr()
    assert json.loads(out) == {"name": "é\x1b"}
    assert "\x1b" not in out
    assert err == "aside\n"


def test_an_error_shows_the_fact_then_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    fail(UsageError("this is wrong", hint="do that"), as_json=False)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: this is wrong\n\nhint: do that\n")


@pytest.mark.parametrize(
    ("line", "folded"),
    [
        ("short", "short"),
        ("a plain line of many words", "a plain line of many\n  words"),
        ("  an indented line of words", "  an indented line of\n    words"),
        ("NAME  the last column is long", "NAME  the last column is\n      long"),
        ("base  float32  8.1 MB  2 MB", "base  float32  8.1 MB\n      2 MB"),
        ("base  float32  12345678.9 MB", "base  float32\n      12345678.9 MB"),
        ("signed by sha256:" + "0" * 64, "signed by\n  sha256:" + "0" * 64),
        ("read in 12 ms, written in 2522 ms", "read in 12 ms, written\n  in 2522 ms"),
        ("missed of them were 22.2 % in all", "missed of them were\n  22.2 % in all"),
        ("all twelve take 225.5 MB there", "all twelve take\n  225.5 MB there"),
        ("", ""),
    ],
)
def test_a_long_line_is_folded_between_words(line: str, folded: str) -> None:
    assert fold(line, 24) == folded


def test_a_column_that_begins_behind_the_middle_stays_where_it_is() -> None:
    before = f"NAME{' ' * 30}"
    folded = f"{before}one two three four five\n{' ' * 34}six seven"
    assert fold(f"{before}one two three four five six seven", 60) == folded


@given(st.text(st.characters(codec="ascii", categories=["L", "Zs"])), st.integers(1, 200))
def test_folding_loses_no_word(line: str, width: int) -> None:
    assert fold(line, width).split() == line.split()


def test_a_terminal_gets_folded_text_and_a_file_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((40, 10)))
    text = "the base answers alone: no expert scored 0.60 or more"
    for stream, lines in [(OutputTerminal(), 2), (io.StringIO(), 1)]:
        monkeypatch.setattr(sys, "stdout", stream)
        emit({}, text, as_json=False)
        assert stream.getvalue().count("\n") == lines
        emit({"text": text}, "", as_json=True)
        assert stream.getvalue().count("\n") == lines + 1


def test_a_table_lines_up_without_trailing_spaces() -> None:
    text = format_table(["name", "size"], [["a", "1 B"], ["longer", "2 B"]])
    assert text == "name    size\na       1 B\nlonger  2 B"


def test_a_narrow_terminal_gets_the_same_columns_of_each_row_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("expertctl.cli.output.terminal_width", lambda _: 12)
    rows = [["a", "1.0.0", "me", ""], ["abc", "2.0.0", "", ""]]
    shown = format_table(["NAME", "VERSION", "SIGNER", "FLAGS"], rows)
    assert shown == "NAME\n    VERSION  SIGNER  FLAGS\na\n    1.0.0    me\nabc\n    2.0.0"
    monkeypatch.setattr("expertctl.cli.output.terminal_width", lambda _: 20)
    shown = format_table(["NAME", "VERSION", "SIGNER", "FLAGS"], rows)
    assert shown == "NAME  VERSION\n    SIGNER  FLAGS\na     1.0.0\n    me\nabc   2.0.0"
    monkeypatch.setattr("expertctl.cli.output.terminal_width", lambda _: 23)
    assert format_table(["NAME", "VERSION", "SIGNER", "FLAGS"], rows).startswith(
        "NAME  VERSION  SIGNER  FLA"
    )


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12_345_678, "12.3 MB"), (10**13, "10.0 TB"),
        (999_949, "999.9 kB"), (999_999, "1.0 MB"), (999_999_999, "1.0 GB"),
    ],
)  # fmt: skip
def test_sizes_are_shown_in_powers_of_a_thousand(size: int, text: str) -> None:
    assert format_size(size) == text


def test_lines_of_several_threads_are_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads side by side report that they try again; a progress bar keeps half lines back."""
    pieces: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    monkeypatch.setattr("sys.stderr", Stream())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(note, (f"{n}: trying again" for n in range(40))))
    assert sorted(pieces) == sorted(f"{n}: trying again\n" for n in range(40))
