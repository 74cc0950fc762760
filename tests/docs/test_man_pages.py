"""A manual page exists for every command, says what the help says, and is valid roff."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from expertctl.cli.app import COMMANDS
from expertctl.cli.help import build_help_row
from scripts.man_pages import Command, build_page, escape, format_text, list_commands, write_pages

SECTIONS = ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "SEE ALSO")


@pytest.fixture(scope="module")
def commands() -> dict[str, Command]:
    """Every command by the name of its page; this imports all of them."""
    return {command.name: command for command in list_commands()}


def read_plainly(page: str) -> str:
    """The text of a page without fonts and escapes."""
    text = re.sub(r"\\f[BIR]|\\&", "", page)
    escapes = {r"\-": "-", r"\(aq": "'", r"\(ga": "`", r"\(ha": "^", r"\(ti": "~", r"\e": "\\"}
    for written, shown in escapes.items():
        text = text.replace(written, shown)
    return re.sub(r"\\\[u([0-9A-F]{4,6})\]", lambda found: chr(int(found[1], 16)), text)


def test_every_command_has_a_page(commands: dict[str, Command]) -> None:
    assert {f"expertctl-{name}" for name in COMMANDS} < set(commands)
    assert {"expertctl", "expertctl-registry-keys-add", "expertctl-bench-moe"} < set(commands)


def test_a_page_has_its_sections_and_every_option_of_the_help(
    commands: dict[str, Command],
) -> None:
    assert len(commands) > 90
    problems = []
    for name, command in commands.items():
        page = build_page(command, date="")
        found = re.findall(r'^\.SH "?(.*?)"?$', page, re.MULTILINE)
        problems += [f"{name}: {section}" for section in SECTIONS if section not in found]
        text = read_plainly(page)
        rows = [
            build_help_row(parameter, command.context)
            for parameter in command.definition.get_params(command.context)
        ]
        shown = (" ".join(words.replace("`", "").split()) for row in rows if row for words in row)
        problems += [f"{name}: {words}" for words in shown if words not in text]
    assert problems == []


def test_the_page_of_the_program_has_exit_codes_variables_and_all_commands(
    commands: dict[str, Command],
) -> None:
    page = build_page(commands["expertctl"], date="")
    text = read_plainly(page)
    for line in ("130\n", "EXPERT_HOME\n", "EXPERT_SERVE_PORT\n", "NO_COLOR, FORCE_COLOR, TERM\n"):
        assert f"\n.TP\n{line}" in text, line
    below = {name for name in commands if name.count("-") == 1}
    assert below == set(re.findall(r"\.BR (expertctl-\w+) ", text.partition(".SH SEE ALSO")[2]))


@pytest.mark.all
def test_pages_are_the_same_each_time_and_dated_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    one, two = write_pages(tmp_path / "one"), write_pages(tmp_path / "two")
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    dated = write_pages(tmp_path / "dated")[0].read_text(encoding="ascii")
    assert dated.startswith('.TH "EXPERTCTL" 1 "1970-01-02" "expertctl ')


def test_text_is_never_a_request_of_roff() -> None:
    assert escape(".so /etc/passwd") == r"\&.so /etc/passwd"
    assert escape("'tis a\\b…") == r"\(aqtis a\eb\[u2026]"
    assert format_text("`.de` and [a page](x.md), no\n.so") == r"\fB.de\fR and a page, no .so"


@pytest.mark.all
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["groff", "-man", "-ww", "-Tutf8", "-z"], id="groff"),
        pytest.param(["mandoc", "-Tlint", "-Wwarning"], id="mandoc"),
    ],
)
def test_tools_read_every_page_without_a_warning(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    paths = write_pages(tmp_path)
    result = subprocess.run([*command, *paths], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
