"""The reference of the command line names the options of every command and all exit codes."""

import re
from pathlib import Path

from expertctl import errors
from expertctl.cli.help import build_options
from expertctl.cli.process import INTERRUPTED, OK, get_exit_code

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGE, EXIT_CODES = REFERENCE / "command-line.md", REFERENCE / "exit-codes.md"


def test_the_options_are_those_of_every_command() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`-.*?`) \|", text, re.MULTILINE)
    shown = [" ".join(re.findall(r"--?\w+", row)) for row in rows]
    assert shown == ["-h --help", *(" ".join(option.opts) for option in build_options())]


def test_the_exit_codes_are_those_of_the_errors() -> None:
    """A row has the code, its meaning, and the ``code`` of each error that ends with it."""
    rows = re.findall(
        r"^\| (\d+) \| .+? \| (.*?) ?\|$", EXIT_CODES.read_text("utf-8"), re.MULTILINE
    )
    shown = {int(code): re.findall(r"`(\w+)`", cell) for code, cell in rows}
    wanted: dict[int, list[str]] = {OK: [], INTERRUPTED: []}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.ExpertError):
            code = get_exit_code(kind.__new__(kind))
            wanted.setdefault(code, []).append(kind.code)
    assert list(shown) == sorted(wanted)
    assert {code: sorted(each) for code, each in shown.items()} == {
        code: sorted(each) for code, each in wanted.items()
    }
