"""The reference of the command line names the options of every command and all exit codes."""

import re
from pathlib import Path

from expertctl import errors
from expertctl.cli.help import build_options
from expertctl.cli.process import INTERRUPTED, OK, get_exit_code

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"


def test_the_options_are_those_of_every_command() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`-.*?`) \|", text, re.MULTILINE)
    shown = [" ".join(re.findall(r"--?\w+", row)) for row in rows]
    assert shown == ["-h --help", *(" ".join(option.opts) for option in build_options())]


def test_every_exit_code_has_a_row_and_every_row_a_code() -> None:
    rows = re.findall(r"^\| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {
        get_exit_code(kind.__new__(kind)) for kind in kinds if issubclass(kind, errors.ExpertError)
    }
    assert [int(row) for row in rows] == sorted({OK, INTERRUPTED} | codes)
