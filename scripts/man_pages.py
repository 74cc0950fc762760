"""Write one manual page per command, from the definitions of the command line.

Run ``python -m scripts.man_pages DIR`` in the root of the checkout. A page contains what ``--help``
prints: `ManFormatter` takes the place of the formatter that `expertctl.cli.help` writes to. The
page of ``expertctl`` itself also has the exit codes and the environment variables, which are read
from the reference pages. The date is that of ``SOURCE_DATE_EPOCH``; without it there is none, so
the pages are the same on every machine.

See man(7) of groff for the macros. All text is ASCII; other characters are escaped.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.main import get_command

from expertctl import __version__
from expertctl.cli.app import app
from expertctl.cli.help import extract_summary
from expertctl.package.build import choose_build_date

ROOT = Path(__file__).parent.parent
PROGRAM = "expertctl"
EXIT_CODES = ROOT / "docs" / "reference" / "exit-codes.md"
SETTINGS = ROOT / "docs" / "reference" / "settings.md"
_ROW = re.compile(r"^\| (.+?) \| (.+?) \|", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`([^`]+)`")
_ESCAPES = {"\\": r"\e", "-": r"\-", "`": r"\(ga", "'": r"\(aq", "^": r"\(ha", "~": r"\(ti"}


@dataclass(frozen=True, slots=True)
class Command:
    """One command with its context; ``words`` are what a user types."""

    words: tuple[str, ...]
    definition: Any
    context: Any

    @property
    def name(self) -> str:
        """The name of its page, such as ``expertctl-base-add``."""
        return "-".join(self.words)

    def list_subcommands(self) -> Iterator["Command"]:
        """Yield the visible commands of a group."""
        if not hasattr(self.definition, "list_commands"):
            return
        for name in self.definition.list_commands(self.context):
            found = self.definition.get_command(self.context, name)
            if found is not None and not found.hidden:
                context = found.make_context(name, [], parent=self.context, resilient_parsing=True)
                yield Command((*self.words, name), found, context)


@dataclass(slots=True)
class ManFormatter:
    """Collects as roff what a command writes as its help.

    It has the methods of click's ``HelpFormatter`` that `expertctl.cli.help` calls.
    """

    command: Command
    description: list[str] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)
    _title: str = ""

    def write_paragraph(self) -> None:
        """Begin a paragraph; the first one follows its heading."""
        if self.description:
            self.description.append(".PP")

    @contextmanager
    def indentation(self) -> Iterator[None]:
        """Indent nothing: man(7) indents."""
        yield

    def write_text(self, text: str) -> None:
        """Write the text of a paragraph."""
        self.description.append(format_text(text))

    def write(self, text: str) -> None:
        """Write the examples, a heading with one indented line for each."""
        lines = [line.strip() for line in text.strip().splitlines()[1:]]
        self.examples += [escape(line) for line in lines]

    @contextmanager
    def section(self, title: str) -> Iterator[None]:
        """Begin a section of options or commands."""
        self._title = title
        self.sections.append(f'.SH "{escape(title.upper())}"')
        yield

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None:
        """Write the rows of a section."""
        commands = {each.words[-1] for each in self.command.list_subcommands()}
        for names, text in rows:
            if names in commands and not names.startswith("-"):
                head = f".BR {escape(f'{self.command.name}-{names}')} (1)"
            else:
                head = _format_names(names)
            self.sections += [".TP", head, format_text(text)]


def escape(text: str) -> str:
    """Return a text as roff that prints exactly its characters, and never begins a request."""
    shown = "".join(
        _ESCAPES.get(c) or (c if c.isascii() else f"\\[u{ord(c):04X}]")
        for c in " ".join(text.split())
    )
    return f"\\&{shown}" if shown.startswith(".") else shown


def format_text(markdown: str) -> str:
    """Return a sentence of a help text or a page: links become their text, code becomes bold."""
    parts = _CODE.split(_LINK.sub(r"\1", markdown).replace("\\|", "|"))
    bold = (rf"\fB{escape_part(part)}\fR" for part in parts[1::2])
    plain = [escape_part(part) for part in parts[::2]]
    text = plain[0] + "".join(f"{b}{p}" for b, p in zip(bold, plain[1:], strict=True))
    return f"\\&{text}" if text.startswith(".") else text


def escape_part(text: str) -> str:
    """Escape a part of a line, whose spaces at both ends stay."""
    before = " " if text[:1].isspace() else ""
    after = " " if text[-1:].isspace() and text.strip() else ""
    return before + escape(text).removeprefix("\\&") + after


def _format_names(names: str) -> str:
    """Return ``-s, --system TEXT`` with bold names and an italic value."""
    words = []
    for word in names.split(" "):
        name, comma = (word[:-1], ",") if word.endswith(",") else (word, "")
        font = "B" if name.startswith("-") else "R" if name == "/" else "I"
        words.append(rf"\f{font}{escape(name)}\fR{comma}")
    return " ".join(words)


def list_commands() -> list[Command]:
    """Return every command, the program itself first."""
    program = get_command(app)
    context = program.make_context(PROGRAM, [], resilient_parsing=True)
    found = [Command((PROGRAM,), program, context)]
    for command in found:  # grows during the iteration
        found += command.list_subcommands()
    return found


def build_page(command: Command, *, date: str) -> str:
    """Return the page of one command as roff."""
    formatter = ManFormatter(command)
    command.definition.format_help_text(command.context, formatter)
    command.definition.format_options(command.context, formatter)
    title = escape(command.name.upper())
    lines = [
        f'.TH "{title}" 1 "{date}" "expertctl {__version__}" "expertctl manual"',
        ".SH NAME",
        rf"{escape(command.name)} \- {_decapitalise(format_text(_get_summary(command)))}",
        ".SH SYNOPSIS",
        *_build_synopsis(command),
        ".SH DESCRIPTION",
        *formatter.description,
        *formatter.sections,
        *_build_examples(formatter.examples),
        *(_build_reference() if command.words == (PROGRAM,) else _build_exit_status()),
        ".SH SEE ALSO",
        *_build_see_also(command),
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _get_summary(command: Command) -> str:
    return extract_summary(command.definition.help)


def _decapitalise(text: str) -> str:
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _build_synopsis(command: Command) -> list[str]:
    words = " ".join(command.words)
    pieces = command.definition.collect_usage_pieces(command.context)
    shown = " ".join(rf"\fI{escape(piece)}\fR" for piece in pieces)
    return [rf"\fB{escape(words)}\fR {shown}"]


def _build_examples(lines: Iterable[str]) -> list[str]:
    shown = list(lines)
    return [".SH EXAMPLES", ".nf", *shown, ".fi"] if shown else []


def _build_exit_status() -> list[str]:
    text = "0 on success. The other codes are in"
    return [".SH EXIT STATUS", text, rf".BR {PROGRAM} (1)."]


def _build_reference() -> list[str]:
    """Return what all commands share: exit codes, variables and files."""
    pages = _read_rows(EXIT_CODES.read_text(encoding="utf-8"))
    codes = [(code, meaning) for code, meaning in pages if code.isdigit()]
    settings, _, others = SETTINGS.read_text(encoding="utf-8").partition("## Other variables")
    keys = re.findall(r"^\| `(\w+)` \| `(\w+)` \| .+? \| (.+?) \|$", settings, re.MULTILINE)
    variables = [*_read_rows(others), *((f"`{name}`", meaning) for _, name, meaning in keys)]
    return [
        ".SH EXIT STATUS",
        *_build_list(codes),
        ".SH ENVIRONMENT",
        *_build_list(variables),
        ".SH FILES",
        *_build_list(
            [
                ("`~/.expert`", "the home, or the folder that EXPERT_HOME names"),
                ("`experts.toml`, `expert.lock`", "the experts of a project"),
            ]
        ),
    ]


def _read_rows(page: str) -> list[tuple[str, str]]:
    """Return the first two cells of all rows of tables, without headings."""
    rows = _ROW.findall(page)
    return [(first, second) for first, second in rows if first.isdigit() or first[0] == "`"]


def _build_list(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [line for term, text in rows for line in (".TP", format_text(term), format_text(text))]


def _build_see_also(command: Command) -> list[str]:
    """Return the pages above and below a command; the program's own page lists all others."""
    above = ["-".join(command.words[:count]) for count in range(1, len(command.words))]
    below = [each.name for each in command.list_subcommands()]
    pages = [*above, *below]
    return [rf".BR {escape(page)} (1){'' if page == pages[-1] else ','}" for page in pages]


def write_pages(folder: Path) -> list[Path]:
    """Write all pages; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    date = choose_build_date() if "SOURCE_DATE_EPOCH" in os.environ else ""
    paths = []
    for command in list_commands():
        paths.append(folder / f"{command.name}.1")
        paths[-1].write_text(build_page(command, date=date), encoding="ascii")
    return paths


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m scripts.man_pages DIR")
    print(f"{len(write_pages(Path(sys.argv[1])))} pages in {sys.argv[1]}")
