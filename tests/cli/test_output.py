"""Output: control characters never reach a terminal, tables line up, sizes read well."""

import io
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.cli.output import (
    count_columns,
    emit,
    fail,
    fold,
    format_table,
    make_printable,
    note,
    terminal_width,
    truncate,
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
        ("KEY ID:  sha256:" + "0" * 64, "KEY ID:\n  sha256:" + "0" * 64),
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


HEADER = ["NAME", "BASE", "ABOUT"]
ROWS = [["a/b", "SmolLM2-135M-Instruct", "sorts numbers of any kind"], ["字" * 6, "x", ""]]


def show_table(width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("expertctl.cli.output.terminal_width", lambda _: width)
    return format_table(HEADER, ROWS, shorten=("BASE", "ABOUT")).splitlines()


def test_a_narrow_terminal_gets_names_cut_in_the_middle_and_words_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = show_table(0, monkeypatch)
    assert whole == show_table(62, monkeypatch)
    assert whole[1] == "a/b           SmolLM2-135M-Instruct  sorts numbers of any kind"
    assert whole[2] == f"{'字' * 6}  x"
    cut = show_table(50, monkeypatch)
    assert cut[1] == "a/b           SmolLM2-…Instruct  sorts numbers of…"
    assert max(map(count_columns, cut)) <= 50
    assert cut[2] == whole[2]


def test_rows_become_records_where_cutting_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show_table(35, monkeypatch) == [
        "NAME:   a/b",
        "BASE:   SmolLM2-135M-Instruct",
        "ABOUT:  sorts numbers of any kind",
        "",
        f"NAME:   {'字' * 6}",
        "BASE:   x",
    ]


def test_a_narrow_terminal_gets_no_empty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    header, rows = ["NAME", "FLAGS", "BASE"], [["a", "", "long"]]
    monkeypatch.setattr("expertctl.cli.output.terminal_width", lambda _: 17)
    assert format_table(header, rows) == "NAME  FLAGS  BASE\na            long"
    monkeypatch.setattr("expertctl.cli.output.terminal_width", lambda _: 16)
    assert format_table(header, rows) == "NAME  BASE\na     long"


def test_columns_that_are_copied_are_whole_at_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertctl.cli.output.terminal_width", lambda _: 60)
    digest = f"sha256:{'0' * 64}"
    assert format_table(["A", "KEY ID"], [["b", digest]]) == f"A:       b\nKEY ID:  {digest}"


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C"])), st.integers(1, 30))
def test_a_text_is_cut_to_the_columns_that_it_may_take(text: str, width: int) -> None:
    assert count_columns(truncate(text, width)) <= max(width, 0)
    assert truncate(text, count_columns(text)) == text


@pytest.mark.parametrize(
    "line",
    [
        "hint: trust it with `expertctl trust add alice alice.pub --namespace acme`, then retry",
        "hint: expertctl registry add https://registry.example --fingerprint sha256:00112233",
        "install  expertctl install registry.example.com/acme/a-long-name@1.0.0 --save",
        "  /home/me/.venv/bin/python -m pip install 'expertctl[engine] @ file:///home/me/src'",
    ],
)
def test_a_command_is_never_folded(line: str) -> None:
    command = re.search(r"`[^`]+`|expertctl .*|/home.*", line)
    assert command is not None
    assert command[0] in fold(line, 40)


def test_the_environment_may_say_how_wide_a_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.get_terminal_size", lambda _: os.terminal_size((40, 10)))
    for chosen, width in [("100", 100), ("0", 40), ("wide", 40), ("", 40)]:
        monkeypatch.setenv("COLUMNS", chosen)
        assert terminal_width(OutputTerminal()) == width
        assert terminal_width(io.StringIO()) == 0


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
