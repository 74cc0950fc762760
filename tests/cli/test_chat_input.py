"""Lines, blocks and commands: what belongs together is one message, whatever it holds."""

import io
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.cli.prompt_input import (
    BLOCK_QUOTES,
    CONTINUATION_PROMPT,
    PRIMARY_PROMPT,
    ChatInput,
    make_line_reader,
    read_chat_input,
)
from expertctl.errors import InvalidPackageError, UsageError


class Typing:
    """Somebody who types these lines, and the prompts that were shown."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines, self.prompts = list(lines), list[str]()

    def __call__(self, prompt: str) -> str | None:
        self.prompts.append(prompt)
        return self.lines.pop(0) if self.lines else None


def said(*lines: str) -> list[ChatInput]:
    typing, found = Typing(lines), []
    while (one := read_chat_input(typing)) is not None:
        found.append(one)
    return found


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["one", "two"], ["one", "two"]),
        (["one\\", "two"], ["one\ntwo"]),
        (["one\\", "two\\", "", "three"], ["one\ntwo\n", "three"]),
        (["one\\"], ["one"]),
        ([BLOCK_QUOTES, "one", "", "two", BLOCK_QUOTES, "three"], ["one\n\ntwo", "three"]),
        ([f"{BLOCK_QUOTES}one", f"two{BLOCK_QUOTES}"], ["one\ntwo"]),
        ([f"{BLOCK_QUOTES}one{BLOCK_QUOTES}"], ["one"]),
        ([f"  {BLOCK_QUOTES}one{BLOCK_QUOTES}  "], ["one"]),
        (
            [BLOCK_QUOTES, "  indented", "one\\", "/exit", BLOCK_QUOTES],
            ["  indented\none\\\n/exit"],
        ),
        ([BLOCK_QUOTES, BLOCK_QUOTES], [""]),
        (["a pasted\ntext"], ["a pasted\ntext"]),
        (["/etc/hosts\nis a file"], ["/etc/hosts\nis a file"]),
        ([f"{BLOCK_QUOTES}/plan{BLOCK_QUOTES}"], ["/plan"]),
        (["", "  "], ["", "  "]),
    ],
)
def test_what_is_typed_becomes_messages(lines: list[str], messages: list[str]) -> None:
    assert said(*lines) == [ChatInput(message) for message in messages]


@pytest.mark.parametrize("line", ["/plan", "  /experts a/b:0.5", "/"])
def test_a_single_line_with_a_slash_is_a_command(line: str) -> None:
    assert said(line) == [ChatInput(line, is_command=True)]


def test_further_lines_are_asked_for_with_another_prompt() -> None:
    typing = Typing(["one\\", "two", BLOCK_QUOTES, BLOCK_QUOTES])
    read_chat_input(typing)
    read_chat_input(typing)
    assert typing.prompts == [
        PRIMARY_PROMPT,
        CONTINUATION_PROMPT,
        PRIMARY_PROMPT,
        CONTINUATION_PROMPT,
    ]


def test_an_input_that_ends_within_a_block_is_refused() -> None:
    with pytest.raises(UsageError, match="ends within a block"):
        said(BLOCK_QUOTES, "one")


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=20)


@given(st.lists(TEXT, min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_a_block_holds_any_lines_but_its_end(lines: list[str]) -> None:
    if any(line.rstrip().endswith(BLOCK_QUOTES) for line in lines):
        return
    assert said(BLOCK_QUOTES, *lines, BLOCK_QUOTES) == [ChatInput("\n".join(lines).strip("\n"))]


PLAIN = TEXT.filter(
    lambda line: not line.endswith("\\") and not line.lstrip().startswith(BLOCK_QUOTES)
)


@given(st.lists(PLAIN, max_size=6))
@settings(max_examples=200, deadline=None)
def test_plain_lines_are_messages_as_they_are(lines: list[str]) -> None:
    assert [one.text for one in said(*lines)] == lines


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> list[str | None]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    read = make_line_reader()
    return [read(PRIMARY_PROMPT) for _ in range(3)]


def test_lines_of_a_pipe_end_as_on_any_system(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(monkeypatch, "Grüße\r\nzwei".encode()) == ["Grüße", "zwei", None]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"\xff\n", InvalidPackageError, "stdin: a line is not UTF-8 at byte 0"),
        (b"x" * 2_000_005, UsageError, "a line of stdin is longer than any prompt"),
    ],
)
def test_a_pipe_that_is_no_text_or_too_long_is_refused(
    data: bytes, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error, match=words):
        piped(monkeypatch, data)
