"""Values of command line parameters: the same as typer's, and without pydantic where possible."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer._click.exceptions import ClickException
from typer.main import get_command

from expertctl.cli.help import CommandGroup

WORDS = [
    *("7", "-3", "007", "1_000", "1.0", "+5", "", " ", "٣", "12345678901234567890", "NaN", "0.25"),
    *("red", "Red", "RED", "blue", ".", "no/such/", "true", "off", "x" * 300, "a\x00b", "é"),
]


def _declare(
    name: str = "a",
    number: int = 3,
    ranged: Annotated[int, typer.Option(min=1, max=9)] = 2,
    clamped: Annotated[int, typer.Option(min=1, max=9, clamp=True)] = 2,
    ratio: float = 0.5,
    part: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    colour: Literal["red", "blue"] = "red",
    any_case: Annotated[Literal["red", "blue"], typer.Option(case_sensitive=False)] = "red",
    flag: bool = False,
    choice: Annotated[bool | None, typer.Option("--yes/--no")] = None,
    folder: Path = Path(),
    there: Annotated[Path | None, typer.Option(exists=True)] = None,
    names: Annotated[list[str] | None, typer.Option("--names")] = None,
    counts: Annotated[list[int] | None, typer.Option("--counts")] = None,
    pair: tuple[int, str] = (1, "a"),
    parsed: Annotated[Any, typer.Option(parser=str.upper)] = "a",
) -> None:
    RESULTS.append(locals())


RESULTS: list[dict[str, Any]] = []
NAMES = ["name", "number", "ranged", "clamped", "ratio", "part", "colour", "any-case", "folder"]
SEVERAL = ["there", "names", "counts", "parsed"]


def _run(command: Any, words: list[str]) -> object:
    """Return the values of the parameters, or the error."""
    RESULTS.clear()
    try:
        command.main(words, standalone_mode=False)
    except (ClickException, ValueError) as error:
        return type(error).__name__, str(error)
    return repr(RESULTS)  # NaN differs from itself


def _build(group: typer.Typer) -> Any:
    group.command()(_declare)
    return get_command(group)


@pytest.mark.parametrize("word", WORDS)
def test_values_and_errors_are_those_of_typer(word: str) -> None:
    ours, theirs = _build(CommandGroup()), _build(typer.Typer(add_completion=False))
    for name in [*NAMES, *SEVERAL]:
        words = [f"--{name}", word]
        assert _run(ours, words) == _run(theirs, words), name
    for words in (["--names", word, "--names", "b"], ["--counts", "1", "--counts", word]):
        assert _run(ours, words) == _run(theirs, words)
    words = ["--pair", word, word]
    assert _run(ours, words) == _run(theirs, words)


def test_defaults_and_flags_are_those_of_typer() -> None:
    ours, theirs = _build(CommandGroup()), _build(typer.Typer(add_completion=False))
    for words in ([], ["--flag"], ["--no-flag", "--yes"], ["--no"], ["--number"], ["word"]):
        got = _run(ours, list(words))
        assert got == _run(theirs, list(words))
    assert RESULTS == []  # the last of them is an error


def test_common_options_do_without_pydantic() -> None:
    code = (
        "import sys; from expertctl.cli import app\n"
        "assert app.run(['list', '--json', '-q']) == 0\n"
        "assert app.run(['config', 'list', '--color', 'never']) == 0\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'pydantic'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
