"""Every command that a message, a hint, a help text or a page of the docs names is one."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from expertctl.cli.app import app

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("expertctl", "registry_server")
    for path in (ROOT / folder).rglob("*.py")
    if any(True for _ in re.finditer(r"expertctl [a-z{-]", path.read_text()))
)
VALUE = "VALUE"
ANYWHERE = {"-q", "--quiet", "-v", "--verbose"}
"""Options of every command and group."""
QUOTED = re.compile(r"`expertctl ([^`]+)`")
BEGINNING = re.compile(r"^expertctl ((?:[a-z]+ )*[a-z]+ .*--[a-z].*)$")
"""A hint that is a command and nothing else."""


def texts(path: Path) -> Iterator[str]:
    """The strings of a module, with a word for every value that is put in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def named(text: str) -> Iterator[str]:
    """The commands in a text, without what a shell does with their output."""
    for found in [*QUOTED.finditer(text), *BEGINNING.finditer(text)]:
        yield re.split(r"[<>|;]", " ".join(found[1].split()))[0]


def fault(command: str) -> str | None:
    """Why these words are no command, or None."""
    words = [word for word in shlex.split(command) if word not in ANYWHERE]
    context, here = None, get_command(app)
    while words and hasattr(here, "get_command") and not words[0].startswith("-"):
        context = here.make_context(None, [], resilient_parsing=True)
        found = here.get_command(context, words[0])
        if found is None:
            return f"there is no {words[0]!r}"
        here, words = found, words[1:]
    return fault_of_words(here, words)


def fault_of_words(command: Any, words: list[str]) -> str | None:
    options = {name: x for x in command.params for name in (*x.opts, *x.secondary_opts)}
    arguments = [x for x in command.params if x.param_type_name == "argument"]
    room = 1_000 if any(x.nargs == -1 for x in arguments) else sum(x.nargs for x in arguments)
    rest = iter(words)
    for word in rest:
        if word in {"--help", "--version"}:
            continue
        if not word.startswith("-") or word == "-":
            room -= 1
        elif word not in options:
            return f"there is no {word}"
        elif not options[word].is_flag:
            next(rest, None)
    return "that are too many words" if room < 0 else None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_command_that_a_text_names_is_there(path: Path) -> None:
    faults = {
        command: why
        for text in texts(path)
        for command in named(text)
        if (why := fault(command)) is not None
    }
    assert faults == {}


def test_what_is_no_command_is_found() -> None:
    assert fault("regstry serve") == "there is no 'regstry'"
    assert fault("registry keys ad x") == "there is no 'ad'"
    assert fault("lock --chek") == "there is no --chek"
    assert fault("lock now") == "that are too many words"
    assert fault("registry keys add KEY --namespace acme") is None
