"""Validators of the operator: real programs, their time and output bounded."""

import os
import sys
from pathlib import Path

import pytest

from expertctl.engine.text.answer_format import MAX_CHARACTERS
from expertctl.errors import NotFoundError, UsageError
from expertctl.server.response_format import ResponseFormat, build_check
from expertctl.server.validator import (
    MAX_OUTPUT,
    ValidatorCommand,
    parse_validators,
)


def program(source: str, *, seconds: float = 120.0) -> ValidatorCommand:
    return ValidatorCommand((sys.executable, "-c", source), seconds)


def test_the_program_reads_the_answer_and_its_exit_code_decides() -> None:
    asks = program("import sys; sys.exit('no' if 'ü' not in sys.stdin.read() else 0)")
    assert asks.check("umlaut", "grün").passed is True
    refused = asks.check("umlaut", "green")
    assert refused.passed is False
    assert refused.problem == "the validator umlaut rejected the answer: no"


def test_a_program_that_says_nothing_refuses_by_its_code() -> None:
    found = program("raise SystemExit(3)").check("three", "x")
    assert (found.passed, found.problem) == (False, "the validator three rejected the answer: 3")


def test_what_it_says_is_bounded_and_one_printable_line() -> None:
    said = "import sys; sys.stderr.write('a\\n\\x1b[31m' * 200_000); sys.exit(1)"
    found = program(said).check("loud", "x")
    assert found.passed is False
    assert found.problem.isprintable()
    assert len(found.problem) < MAX_OUTPUT + 100


def test_a_program_that_takes_too_long_is_ended_with_what_it_started() -> None:
    source = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    script = f"import os; os.dup2(os.pipe()[0], 0); {source}"
    found = program(script, seconds=0.5).check("slow", "x")
    assert found.passed is None
    assert found.problem == "the validator slow took longer than 0.5 seconds"


def test_a_program_that_reads_nothing_and_one_that_dies_do_no_harm() -> None:
    assert program("pass").check("deaf", "x" * 200_000).passed is True
    killed = program("import os; os.kill(os.getpid(), 9)").check("dead", "x")
    assert (killed.passed, killed.problem) == (None, "the validator dead was killed by signal 9")


def test_a_program_that_is_gone_leaves_it_open(tmp_path: Path) -> None:
    found = ValidatorCommand((str(tmp_path / "gone"),)).check("gone", "x")
    assert found.passed is None
    assert "could not be started" in found.problem


def test_the_program_sees_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERT_TOKEN", "secret")
    monkeypatch.setenv("EXPERT_API_KEY", "secret")
    asks = program("import os, sys; sys.exit('secret' in os.environ.values())")
    assert asks.check("names", "x").passed is True


def test_no_shell_reads_the_words(tmp_path: Path) -> None:
    (commands,) = [parse_validators([f"echo=/bin/echo $(touch {tmp_path}/made) ; touch made"])]
    assert commands["echo"].check("echo", "`touch made`").passed is True
    assert list(tmp_path.iterdir()) == []


def test_only_validators_that_were_named_can_be_asked_for() -> None:
    commands = parse_validators([f"ok={sys.executable} -c pass"])
    check = build_check(ResponseFormat("custom", name="ok"), commands=commands)
    assert check is not None
    assert check("x").passed is True
    with pytest.raises(UsageError, match="no validator '/bin/sh'") as refused:
        build_check(ResponseFormat("custom", name="/bin/sh"), commands=commands)
    assert refused.value.hint == "available: ok"


def test_a_program_is_found_once_when_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "mine"
    found.write_text("#!/bin/sh\nexit 0\n")
    found.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    assert parse_validators(["x=mine -v 'a b'"])["x"] == ValidatorCommand((str(found), "-v", "a b"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["true"], UsageError),
        (["x="], UsageError),
        (["=true"], UsageError),
        (["x='true"], UsageError),
        (["x=true", "x=true"], UsageError),
        (["x=no-such-program-at-all"], NotFoundError),
    ],
)
def test_a_validator_that_cannot_be_is_refused_at_the_start(
    options: list[str], error: type[Exception]
) -> None:
    with pytest.raises(error):
        parse_validators(options)


def test_an_answer_that_is_too_long_is_not_shown_to_the_program() -> None:
    found = program("raise SystemExit(1)").check("any", "x" * (MAX_CHARACTERS + 1))
    assert (found.passed, found.problem[:26]) == (None, "the answer is not checked:")
