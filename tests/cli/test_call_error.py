"""Calls that the parser refuses: the option, the value, the fact and the way out are told."""

import pytest

from expertctl.cli.app import COMMANDS
from expertctl.cli.suggestions import COMMAND_SYNONYMS, build_unknown_command_error
from tests.cli.command_runner import CommandRunner, expertctl

__all__ = ["expertctl"]


@pytest.mark.parametrize(
    ("call", "message", "hint"),
    [
        ("run x --max-tokens abc", "--max-tokens: 'abc' is not a whole number", "expertctl run"),
        ("run x --seed 1.5", "--seed: '1.5' is not a whole number", "expertctl run"),
        ("run x --temperature warm", "--temperature: 'warm' is not a number", "expertctl run"),
        ("run x --dtype int7", "--dtype: 'int7' is not one of float32, bf16, int8, int4, gguf", ""),
        ("search x --limit 0", "--limit: 0 is less than 1, the minimum", ""),
        ("search x --limit 999", "--limit: 999 is more than 100, the maximum", ""),
        ("eval x --min-gain nan", "--min-gain: 'nan' is not a number", "expertctl eval"),
        ("eval x --min-gain 1.5", "--min-gain: 1.5 is more than 1, the maximum", ""),
        ("search", "TEXT is missing", "expertctl search"),
        ("build", "DIR|FILE|ORG/NAME is missing", "expertctl build"),
        ("keys export", "NAME is missing", "expertctl keys export"),
        ("run x --stats=3", "--stats takes no value", "expertctl run"),
        ("run x --tempreature 1", "there is no option --tempreature", "did you mean --temperature"),
        ("list extra", "extra: unexpected argument", "expertctl list"),
        ("uninstall acme/sql", "expertctl has no command uninstall", "`expertctl remove`"),
        ("version", "expertctl has no command version", "`expertctl --version`"),
        ("keys neww a", "expertctl keys has no command neww", "`expertctl keys new`"),
        ("base rm x", "expertctl base has no command rm", "`expertctl base remove`"),
        ("instal x", "expertctl has no command instal", "`expertctl install`"),
        (f"run x --seed {'9' * 500}x", f"--seed: '{'9' * 80}…' is not a whole number", ""),
    ],
)
def test_a_slip_is_told_in_our_words_and_as_json(
    call: str, message: str, hint: str, expertctl: CommandRunner
) -> None:
    said = expertctl(*call.split(" "), "--json", exit_code=2)
    error = said.document["error"]
    assert (error["code"], error["message"]) == ("usage", message)
    assert hint in error["hint"]
    assert said.err == f"error: {message}\n\nhint: {error['hint']}\n"


def test_an_option_without_its_value_is_named_with_the_command(expertctl: CommandRunner) -> None:
    said = expertctl("run", "x", "--expert", exit_code=2).err
    assert said == "error: --expert needs a value\n\nhint: see `expertctl run --help`\n"


def test_what_other_tools_call_a_command_leads_to_one_that_exists() -> None:
    for name, meant in COMMAND_SYNONYMS.items():
        assert name not in COMMANDS
        assert meant.split(" ")[0] in {*COMMANDS, "--version", "--help"}
        assert f"`expertctl {meant}`" in build_unknown_command_error(name, list(COMMANDS)).hint
