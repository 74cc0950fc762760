"""Prompt and body from words and stdin, as ``llm`` and ``ollama`` read them; stdin is real."""

import os
import sys
from pathlib import Path

import pytest

from expertctl.cli import prompt_input
from expertctl.cli.prompt_input import PromptInput, read_input, read_piped_text, read_prompt
from expertctl.errors import ExpertError, InvalidPackageError, UsageError
from tests.cli.command_runner import ReplacedStdin, stdin

__all__ = ["stdin"]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="descriptors of POSIX")
DATA = b"41, 17, 23\n"


@pytest.mark.parametrize(
    ("words", "body", "data", "expected"),
    [
        (["Sort:"], None, DATA, PromptInput("Sort:", "41, 17, 23")),
        (["Sort", "these:"], None, DATA, PromptInput("Sort these:", "41, 17, 23")),
        (None, None, DATA, PromptInput("41, 17, 23", None)),
        ([], None, DATA, PromptInput("41, 17, 23", None)),
        (["-"], None, DATA, PromptInput("41, 17, 23", None)),
        (["Sort:"], "-", DATA, PromptInput("Sort:", "41, 17, 23")),
        (["Sort:", "-"], None, DATA, PromptInput("Sort: -", "41, 17, 23")),
        (["Sort:"], None, b"", PromptInput("Sort:", None)),
        (["Sort:"], None, b" \n\n", PromptInput("Sort:", None)),
        (["Sort:"], None, b"a\r\nb\r\n", PromptInput("Sort:", "a\r\nb")),
        (["Sort:"], None, "Grüße 👨‍👩‍👧".encode(), PromptInput("Sort:", "Grüße 👨‍👩‍👧")),
        ([""], None, DATA, PromptInput("", "41, 17, 23")),
    ],
    ids=["a prompt and data", "words without quotes", "data alone", "no words", "a dash",
         "a body by its name", "a dash among words", "an empty pipe", "blank lines",
         "lines of Windows", "not only ASCII", "an empty prompt"],
)  # fmt: skip
def test_a_person_pipes_text_into_a_prompt(
    words: list[str] | None,
    body: str | None,
    data: bytes,
    expected: PromptInput,
    stdin: ReplacedStdin,
) -> None:
    stdin.pipe(data)
    assert read_input(words, body) == expected


@pytest.mark.parametrize("words", [["x"], ["-"], None])
def test_what_is_piped_comes_whole_however_long_it_is(
    words: list[str], stdin: ReplacedStdin
) -> None:
    stdin.pipe(b"0123456789" * 40_000)
    got = read_input(words, None)
    assert (got.body or got.prompt) == "0123456789" * 40_000


def test_a_pipe_that_another_program_left_non_blocking_is_read_to_its_end(
    stdin: ReplacedStdin,
) -> None:
    stdin.pipe(b"0123456789" * 40_000)
    os.set_blocking(sys.stdin.fileno(), False)
    assert read_input(["x"], None).body == "0123456789" * 40_000


@pytest.mark.parametrize("words", [["x"], ["-"], None])
@pytest.mark.parametrize(
    ("data", "kind", "said"),
    [
        (b"\xff\xfea\x00", InvalidPackageError, "not UTF-8 at byte 0"),
        (b"caf\xc3", InvalidPackageError, "not UTF-8 at byte 3"),
        (b"x" * 3_000_000, UsageError, "more than 2000000 bytes"),
        ("é" * 1_500_000, UsageError, "more than 2000000 bytes"),
    ],
    ids=["UTF-16", "half a character", "3 MB", "3 MB of letters of two bytes"],
)
def test_a_pipe_that_holds_no_prompt_is_refused_and_never_dropped(
    words: list[str] | None,
    data: bytes | str,
    kind: type[ExpertError],
    said: str,
    stdin: ReplacedStdin,
) -> None:
    stdin.pipe(data.encode() if isinstance(data, str) else data)
    with pytest.raises(kind, match=said):
        read_input(words, None)


def test_a_file_is_read_as_a_pipe_is(stdin: ReplacedStdin, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_bytes(DATA)
    stdin.file(path)
    assert read_input(["Sort:"], None) == PromptInput("Sort:", "41, 17, 23")


def test_a_socket_is_read_as_a_pipe_is(stdin: ReplacedStdin) -> None:
    write = stdin.open_pipe(is_socket=True)
    write(DATA)
    assert read_input(["Sort:"], None) == PromptInput("Sort:", "41, 17, 23")


def test_the_empty_stdin_that_cron_gives_leaves_the_prompt_alone(stdin: ReplacedStdin) -> None:
    stdin.file(Path("/dev/null"))
    assert read_input(["x"], None) == PromptInput("x", None)


def test_the_stdin_of_nohup_which_cannot_be_read_leaves_the_prompt_alone(
    stdin: ReplacedStdin,
) -> None:
    stdin.unreadable()
    assert read_input(["x"], None) == PromptInput("x", None)
    wanted: list[tuple[list[str] | None, str | None]] = [(None, None), (["-"], None), (["x"], "-")]
    for words, body in wanted:
        with pytest.raises(UsageError, match="stdin cannot be read: Bad file descriptor"):
            read_input(words, body)


def test_an_endless_device_is_refused(stdin: ReplacedStdin) -> None:
    stdin.file(Path("/dev/zero"))
    with pytest.raises(UsageError, match="more than 2000000 bytes"):
        read_input(["x"], None)


def test_a_closed_stdin_leaves_the_prompt_alone_and_is_no_prompt(stdin: ReplacedStdin) -> None:
    stdin.closed()
    assert read_input(["x"], None) == PromptInput("x", None)
    for words in (None, ["-"]):
        with pytest.raises(UsageError, match=r"there is no prompt|stdin is closed"):
            read_input(words, None)
    with pytest.raises(UsageError, match="the body: stdin is closed"):
        read_input(["x"], "-")


def test_nothing_that_is_typed_at_a_terminal_is_taken_for_a_body(stdin: ReplacedStdin) -> None:
    stdin.terminal(b"typed\n")
    assert read_input(["x"], None) == PromptInput("x", None)
    with pytest.raises(UsageError, match="there is no prompt") as caught:
        read_input(None, None)
    assert "expertctl run" in caught.value.hint


@pytest.mark.parametrize("socketed", [False, True], ids=["a pipe", "a socket"])
def test_a_stdin_that_a_service_holds_open_and_never_writes_to_does_not_hang(
    socketed: bool, stdin: ReplacedStdin, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin.open_pipe(is_socket=socketed)
    with pytest.raises(UsageError, match=r"the body: stdin is open, but nothing came") as caught:
        read_piped_text("the body", timeout=0.01)
    assert "--body -" in caught.value.hint
    told = capsys.readouterr().err
    assert "waiting for text on stdin; if there is none, end the command with < /dev/null" in told


def test_a_program_that_takes_a_while_to_write_is_waited_for(
    stdin: ReplacedStdin, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = stdin.open_pipe()
    monkeypatch.setattr(prompt_input, "_SILENT_SECONDS", 0.01)
    monkeypatch.setattr(
        prompt_input, "note", lambda _: write(DATA)
    )  # it writes once we have waited
    assert read_piped_text("the body", timeout=600.0) == "41, 17, 23"


@pytest.mark.parametrize(
    ("words", "body", "plan", "said"),
    [
        (["-"], "-", None, "the prompt and the body cannot both come from stdin"),
        (None, "-", None, "the prompt and the body cannot both come from stdin"),
        (["x"], "-", "-", "the body and the plan cannot both come from stdin"),
        (None, None, "-", "the prompt and the plan cannot both come from stdin"),
    ],
)
def test_two_texts_never_come_from_one_stdin(
    words: list[str] | None, body: str | None, plan: str | None, said: str, stdin: ReplacedStdin
) -> None:
    stdin.pipe(DATA)
    with pytest.raises(UsageError, match=said):
        read_input(words, body, plan=None if plan is None else Path(plan))


def test_a_plan_on_stdin_is_no_body(stdin: ReplacedStdin) -> None:
    stdin.pipe(b'{"plan": {}}')
    assert read_input(["x"], None, plan=Path("-")) == PromptInput("x", None)
    assert sys.stdin.buffer.read() == b'{"plan": {}}'


def test_a_file_of_the_body_is_the_body_whatever_is_on_stdin(
    stdin: ReplacedStdin, tmp_path: Path
) -> None:
    path = tmp_path / "body.txt"
    path.write_bytes(b"of the file")
    stdin.pipe(DATA)
    assert read_input(["x"], str(path)).body == "of the file"
    path.write_bytes(b"x" * 3_000_000)
    with pytest.raises(UsageError, match=r"body\.txt has more than 2000000 bytes"):
        read_input(["x"], str(path))


def test_route_takes_its_prompt_as_run_does_and_reads_nothing_else(stdin: ReplacedStdin) -> None:
    stdin.pipe(DATA)
    assert read_prompt(["Sort", "these"]) == "Sort these"
    assert read_prompt(None) == "41, 17, 23"
