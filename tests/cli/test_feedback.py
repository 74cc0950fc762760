"""``feedback`` as a person types it."""

import socket
from pathlib import Path

import pytest

from expertctl.cli.stats import parse_verdict, record_verdict
from expertctl.errors import UsageError
from expertctl.schema.validation import find_problems
from expertctl.store.catalogue import Catalogue
from tests.cli.command_runner import CommandRunner, ReplacedStdin, expertctl, stdin
from tests.store.fixtures import EXPERT_X, EXPERT_Y, make_run

__all__ = ["expertctl", "stdin"]


@pytest.fixture
def catalogue(home: Path) -> Catalogue:
    return Catalogue(home / "index.db")


def test_it_has_an_example(expertctl: CommandRunner) -> None:
    text = expertctl("feedback", "--help").out
    assert "expertctl feedback last good" in text.split("Example")[1]
    assert "--json" in text


def test_a_person_says_what_an_answer_was(expertctl: CommandRunner, catalogue: Catalogue) -> None:
    catalogue.history.record_run(make_run(1, EXPERT_X, EXPERT_Y))
    job_id = make_run(1).job_id
    said = expertctl("feedback", job_id[:6], "good")
    assert said.out.splitlines() == [
        f"job {job_id[:8]} was rated good",
        "  acme/x@1.0.0: smoothed success rate at default 0.56, before unknown",
        "  acme/y@1.0.0: smoothed success rate at default 0.56, before unknown",
    ]
    said = expertctl("feedback", "last", "bad", "--json")
    assert said.err == ""
    assert find_problems(said.document, "feedback") == []
    assert said.document["verdict"] == "bad"
    assert [expert["success"] for expert in said.document["experts"]] == [0.4444, 0.4444]
    assert [expert["success_before"] for expert in said.document["experts"]] == [0.5556, 0.5556]


def test_the_base_alone_can_be_judged(expertctl: CommandRunner, catalogue: Catalogue) -> None:
    catalogue.history.record_run(make_run(1, alone=True))
    said = expertctl("feedback", "last", "bad")
    assert said.out == f"job {make_run(1).job_id[:8]} was rated bad; the base answered alone\n"


def test_a_run_that_is_not_remembered_is_not_found(
    expertctl: CommandRunner, catalogue: Catalogue
) -> None:
    said = expertctl("feedback", "last", "good", exit_code=3)
    assert "error: no run is remembered\n\nhint: `expertctl run PROMPT` makes one" in said.err
    assert not catalogue.path.exists()
    catalogue.history.record_run(make_run(1))
    said = expertctl("feedback", "\x1b[31mzz", "good", "--json", exit_code=3)
    assert said.document["error"]["code"] == "not_found"
    assert "\x1b" not in said.err


def test_an_ambiguous_beginning_or_another_word_is_refused(
    expertctl: CommandRunner, catalogue: Catalogue
) -> None:
    for number in "01":
        catalogue.history.record_run(make_run(int(number), job_id=f"a{number}" * 16))
    assert "several runs begin with 'a'" in expertctl("feedback", "a", "good", exit_code=2).err
    assert (
        "'fine' is neither good nor bad" in expertctl("feedback", "last", "fine", exit_code=2).err
    )
    assert catalogue.read_success_rates().find_rate(EXPERT_X.content_digest) is None


def test_nothing_leaves_the_machine(
    expertctl: CommandRunner, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a socket was opened")

    catalogue.history.record_run(make_run(1))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert "acme/x@1.0.0" in expertctl("feedback", "last", "good").out
    assert "acme/x@1.0.0" in expertctl("stats").out


@pytest.mark.parametrize("words", [[], ["fine"], ["good", "bad"], ["GOOD"]])
def test_in_a_chat_an_answer_is_good_or_bad(words: list[str]) -> None:
    with pytest.raises(UsageError, match="an answer is good or bad"):
        parse_verdict(words)
    assert (parse_verdict(["good"]), parse_verdict(["bad"])) == ("good", "bad")


def test_what_a_chat_says_of_a_judgement_is_what_the_command_says(
    expertctl: CommandRunner, catalogue: Catalogue
) -> None:
    catalogue.history.record_run(make_run(1))
    text = record_verdict(catalogue, "last", "good")
    assert (
        text.splitlines()[1]
        == "  acme/x@1.0.0: smoothed success rate at default 0.60, before unknown"
    )
    again = expertctl("feedback", "last", "good").out
    assert (
        again.splitlines()[1]
        == "  acme/x@1.0.0: smoothed success rate at default 0.60, before 0.60"
    )


def test_a_history_that_cannot_be_read_is_told(
    expertctl: CommandRunner, catalogue: Catalogue
) -> None:
    catalogue.path.mkdir(parents=True)
    for words in (("feedback", "last", "good"), ("stats",), ("stats", "--clear")):
        said = expertctl(*words, "--json", exit_code=1)
        assert said.document["error"]["code"] == "store"
        assert "is not a regular file\n\nhint: move it away" in said.err


@pytest.mark.parametrize("words", [["good"], ["-", "good"]])
@pytest.mark.parametrize("form", ["{}\n", '{{"job_id": "{}", "text": "hi"}}\n'])
def test_a_run_is_piped_as_an_id_or_as_what_run_prints(
    words: list[str],
    form: str,
    expertctl: CommandRunner,
    catalogue: Catalogue,
    stdin: ReplacedStdin,
) -> None:
    catalogue.history.record_run(make_run(1))
    stdin.pipe(form.format(make_run(1).job_id).encode())
    assert expertctl("feedback", *words).out.startswith(
        f"job {make_run(1).job_id[:8]} was rated good"
    )


@pytest.mark.parametrize(
    "data", [b"", b" \n", b"[]", b'{"text": "hi"}', b"\xff", b"zz", b"[" * 100_000]
)
def test_what_names_no_run_is_refused(
    data: bytes, expertctl: CommandRunner, catalogue: Catalogue, stdin: ReplacedStdin
) -> None:
    catalogue.history.record_run(make_run(1))
    stdin.pipe(data)
    code = {b"": 2, b" \n": 2, b"\xff": 8}.get(data, 3)
    assert "error: " in expertctl("feedback", "good", exit_code=code).err


def test_without_a_run_and_without_a_pipe_the_way_out_is_named(
    expertctl: CommandRunner, catalogue: Catalogue, stdin: ReplacedStdin
) -> None:
    for given in (stdin.terminal, stdin.closed):
        given()
        told = expertctl("feedback", "good", exit_code=2).err
        assert "no run is named\n\nhint: `expertctl feedback last good`" in told
    assert "not 3 words" in expertctl("feedback", "last", "very", "good", exit_code=2).err
