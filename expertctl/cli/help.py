"""Formats ``--help``, and ``-q``, ``-v`` and ``--color``, which every command and group has.

`CommandGroup` replaces `typer.Typer` for every group; `HelpCommand` and `HelpGroup` write the
pages: commands and options by section, short metavars, up to 100 columns. An option names its
section with ``rich_help_panel``. A docstring paragraph that begins with ``Example:`` is a command
line and is never folded.

These three work before and after the name of a command, as in ``expertctl -q run`` and
``expertctl run -q``. A command that has an option of the same name keeps its own. ``-v`` prints
the records that modules of expertctl log, whatever their level, and the settings; secrets are
removed from all of them.
"""

import inspect
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from typer._click.formatting import HelpFormatter  # typer exports it nowhere
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.models import Default

from expertctl.cli.output import VERBOSITY, Colour, debug
from expertctl.cli.parameter_values import convert_lazily
from expertctl.errors import ExpertError, UsageError, hide_secrets
from expertctl.settings import CONFIG_KEYS, find_home, read_config

if TYPE_CHECKING:
    from logging import Handler, LogRecord


_LOGGER = "expertctl"
_USER_INFO = re.compile(r"(?<=://)[^/\s]*@")
_ADDRESS_SECRETS = re.compile(r"\S*@|(?<=\?)\S+")
"""In the value of a setting: all before the last ``@``, which may be a password, and queries."""
_TEXT_ARGUMENTS = {"PROMPT", "TEXT"}


def _set_quiet(context: typer.Context, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        VERBOSITY.is_quiet = True
        _refuse_both()


def _set_verbose(context: typer.Context, wanted: bool) -> None:
    if wanted and not (context.resilient_parsing or VERBOSITY.is_verbose):
        VERBOSITY.is_verbose = True
        _refuse_both()
        _add_handler()
        _print_settings()


def _set_colour(context: typer.Context, wanted: Colour) -> None:
    if wanted != "auto" and not context.resilient_parsing:
        VERBOSITY.colour = wanted


def _refuse_both() -> None:
    if VERBOSITY.is_quiet and VERBOSITY.is_verbose:
        raise UsageError("-q and -v exclude each other")


def _declare_options(
    quiet: Annotated[
        bool,
        typer.Option(
            "-q",
            "--quiet",
            callback=_set_quiet,
            expose_value=False,
            help="Print no notes and no progress.",
            show_default=False,
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "-v",
            "--verbose",
            callback=_set_verbose,
            expose_value=False,
            help="Print settings, requests, cache use and times.",
            show_default=False,
        ),
    ] = False,
    color: Annotated[
        Colour,
        typer.Option(
            callback=_set_colour,
            expose_value=False,
            help="Colour errors, warnings and hints; auto does on a terminal.",
            show_default=False,
        ),
    ] = "auto",
) -> None:
    """Declare the options; never called."""


@cache
def build_options() -> tuple[Any, ...]:
    """Return these options; the parser compares them by identity, so they are built once."""
    app = typer.Typer(add_completion=False)
    app.command()(_declare_options)
    parameters = tuple(get_command(app).params)
    convert_lazily(parameters)
    return parameters


def add_options(parameters: Sequence[Any]) -> list[Any]:
    """Return the parameters of a command with those of these options that it does not have."""
    convert_lazily(parameters)
    taken = {name for parameter in parameters for name in parameter.opts}
    return [*parameters, *(each for each in build_options() if taken.isdisjoint(each.opts))]


def check_text_options(parameters: Sequence[Any], words: Sequence[str]) -> None:
    """Check that none of these stands between the words of a prompt, which may mean it.

    Raises:
        UsageError: when one does.
    """
    if not any(each.nargs == -1 and each.metavar in _TEXT_ARGUMENTS for each in parameters):
        return
    ours = {name for each in build_options() if each in parameters for name in each.opts}
    with_value = {
        name
        for each in parameters
        if each.param_type_name == "option" and not each.is_flag
        for name in each.opts
    }
    has_text, last, rest = False, "", iter(words)
    for word in rest:
        if word == "--":
            return
        if word in with_value:
            next(rest, None)
        if word.partition("=")[0] in ours:
            last = word if has_text else ""
        elif word in with_value:
            continue
        elif word == "-" or not word.startswith("-"):
            if last:
                raise UsageError(
                    f"{last} stands between words of the text",
                    hint=f"put the text in quotes, or {last} before it",
                )
            has_text = True


@contextmanager
def limit_verbosity() -> Iterator[None]:
    """End the effect of the options after a command, and print with ``-v`` how long it took."""
    started = time.perf_counter()
    try:
        yield
    finally:
        debug(f"finished after {(time.perf_counter() - started) * 1e3:.0f} ms")
        if VERBOSITY.is_verbose:
            _remove_handler()
        VERBOSITY.is_quiet = VERBOSITY.is_verbose = False
        VERBOSITY.colour = "auto"


@cache
def _build_handler() -> "Handler":
    """Return a handler that prints records; `logging` is imported only for ``--verbose``."""
    import logging

    class DebugHandler(logging.Handler):
        def emit(self, record: "LogRecord") -> None:
            debug(_remove_secrets(f"{record.name}: {record.getMessage()}"))

    return DebugHandler()


def _add_handler() -> None:
    import logging

    logger = logging.getLogger(_LOGGER)
    logger.setLevel(logging.DEBUG)
    logger.addHandler(_build_handler())


def _remove_handler() -> None:
    import logging

    logger = logging.getLogger(_LOGGER)
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(_build_handler())


def _print_settings() -> None:
    """Print the home and each setting that is not a default, with its source."""
    with suppress(ExpertError):  # the command itself reports settings that cannot be read
        home = find_home()
        debug(f"home: {home.root}")
        stored = read_config(home.config)
        for key, variable in CONFIG_KEYS.items():
            value, source = os.environ.get(variable), variable
            if not value:
                value, source = stored.get(key), home.config.name
            if value is not None:
                shown = _ADDRESS_SECRETS.sub(_mask_address, hide_secrets(value))
                debug(f"setting: {key} = {shown} ({source})")


def _mask_address(found: re.Match[str]) -> str:
    return "***@" if found[0].endswith("@") else "***"


def _remove_secrets(text: str) -> str:
    return _USER_INFO.sub("***@", hide_secrets(text))


MAX_WIDTH = 100
"""Help is as wide as the terminal, up to this many columns."""
CONTEXT_SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": MAX_WIDTH,
}
EXAMPLE_PREFIX = "Example: "
_Function = TypeVar("_Function", bound=Callable[..., Any])
_NUMBERS = {int: "N", float: "NUMBER"}
_Rows = list[tuple[str, str]]


def get_metavar(parameter: Any) -> str:
    """Return the placeholder of an option or argument, such as ``FILE`` or ``a|b``."""
    if parameter.metavar is not None:
        return str(parameter.metavar)
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper().replace("_", "-")
    kind = parameter.type_descriptor
    if kind.is_choice:
        return "|".join(str(choice) for choice in kind.choices or ())
    if kind.is_path:
        return "FILE"
    return _NUMBERS.get(kind.annotation, "TEXT")


def format_argument_usage(argument: Any) -> str:
    """Return an argument as the usage line shows it, such as ``DIR`` or ``[REF...]``."""
    name = get_metavar(argument) + ("..." if argument.nargs != 1 else "")
    return name if argument.required else f"[{name}]"


def build_help_row(parameter: Any, context: Any) -> tuple[str, str] | None:
    """Return the names and the help of an option or argument; None for a hidden one."""
    record = parameter.get_help_record(context)
    if record is None:
        return None
    if parameter.param_type_name == "argument":
        return get_metavar(parameter) + ("..." if parameter.nargs != 1 else ""), _clean_defaults(
            record[1]
        )
    names = ", ".join(sorted(parameter.opts, key=lambda name: name.startswith("--")))
    if parameter.secondary_opts:
        names += " / " + ", ".join(parameter.secondary_opts)
    if not parameter.is_flag and not parameter.count:
        names += " " + get_metavar(parameter)
    return names, _clean_defaults(record[1])


def _clean_defaults(text: str) -> str:
    """Write defaults without a second pair of brackets, and leave out what the usage line shows."""
    text = re.sub(r"\[default: \(([^\]]*)\)([;\]])", r"[default: \1\2", text)
    return text.replace("  [required]", "").replace("; required]", "]")


def write_parameters(command: Any, context: Any, formatter: Any) -> None:
    """Write the sections of arguments and options; a section is named by ``rich_help_panel``."""
    sections: dict[str, _Rows] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(context):
        row = build_help_row(parameter, context)
        if row is None:
            continue
        default = "Arguments" if parameter.param_type_name == "argument" else "Options"
        panel = getattr(parameter, "rich_help_panel", None) or default
        sections.setdefault(panel, []).append(row)
    write_sections(sections, formatter)


def write_sections(sections: dict[str, _Rows], formatter: Any) -> None:
    """Write titled tables; those without rows are left out."""
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


def write_description(command: Any, formatter: Any) -> None:
    """Write the paragraphs of a docstring; examples come last, each on a line of its own."""
    text = inspect.cleandoc(command.help or "").partition("\f")[0]
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    examples = [
        part.removeprefix(EXAMPLE_PREFIX) for part in paragraphs if part.startswith(EXAMPLE_PREFIX)
    ]
    for part in paragraphs:
        if part and not part.startswith(EXAMPLE_PREFIX):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(part)
    if examples:
        formatter.write("\nExample:\n" + "".join(f"  {line}\n" for line in examples))


HELP_PAGES = Path(__file__).with_name("help_pages.json")
"""What ``--help`` of each command writes, so that it imports no command.

``python -m scripts.help_pages`` writes it.
"""


def print_help_page(words: Sequence[str]) -> bool:
    """Print the page of a command if that is all that is asked for, and return whether it was."""
    *names, last = words or [""]
    if last not in CONTEXT_SETTINGS["help_option_names"]:
        return False
    page = json.loads(HELP_PAGES.read_text(encoding="utf-8")).get(" ".join(names))
    if page is None or any(" " in name for name in names):
        return False
    formatter = HelpFormatter(max_width=MAX_WIDTH)
    replay_page(page, formatter)
    typer.echo(formatter.getvalue().rstrip("\n"))
    return True


def replay_page(page: Iterable[Sequence[Any]], formatter: HelpFormatter) -> None:
    """Write a page."""
    for kind, *values in page:
        if kind == "usage":
            formatter.write_usage(*values)
        elif kind == "text":
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(*values)
        elif kind == "table":
            title, rows = values
            write_sections({title: [(name, text) for name, text in rows]}, formatter)
        else:
            formatter.write(*values)


class HelpCommand(TyperCommand):
    """A command whose help this module formats; it has the options of `expertctl.cli.help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command."""
        if not ctx.resilient_parsing:
            check_text_options(self.get_params(ctx), args)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return options and arguments."""
        return add_options(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what follows the name in the usage line."""
        return ["[OPTIONS]", *_format_usages(self.get_params(ctx))]

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write description and examples."""
        write_description(self, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        write_parameters(self, ctx, formatter)


class HelpGroup(TyperGroup):
    """A group of commands whose help this module formats; it has the same options."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return options."""
        return add_options(super().get_params(ctx))

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write description and examples."""
        write_description(self, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options, then the commands."""
        write_parameters(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with the first sentence of each."""
        rows = [(name, extract_summary(command.help)) for name, command in self._list_visible(ctx)]
        write_sections({"Commands": rows}, formatter)

    def _list_visible(self, ctx: Any) -> Iterator[tuple[str, Any]]:
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                yield name, command


class CommandGroup(typer.Typer):
    """A `typer.Typer` whose commands and help are those of this module."""

    def __init__(self, text: str | None = None, *, no_args_is_help: bool = True) -> None:
        """Create an empty group; ``text`` is its help."""
        super().__init__(
            cls=HelpGroup,
            help=text or Default(None),
            no_args_is_help=no_args_is_help,
            add_completion=False,
            rich_markup_mode=None,
        )

    def command(self, name: str | None = None, **options: Any) -> Callable[[_Function], _Function]:
        """Register a command."""
        return super().command(name, **({"cls": HelpCommand} | options))


def expand_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter whose type is a dataclass by its fields, which become options.

    A field may be a dataclass in turn. The function is called with instances of the dataclasses.
    """
    given = inspect.signature(function).parameters.values()
    groups: dict[str, Any] = {p.name: p.annotation for p in given if is_dataclass(p.annotation)}

    @wraps(function)
    def command(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = _collect_group(group, values)
        function(**values)

    keyword, parameters = inspect.Parameter.KEYWORD_ONLY, list[inspect.Parameter]()
    for parameter in given:
        if (group := groups.get(parameter.name)) is None:
            parameters.append(parameter.replace(kind=keyword))
            continue
        parameters += _list_group_parameters(group)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
    return command


def _collect_group(group: Any, values: dict[str, Any]) -> Any:
    """Take the options of a group out of ``values``, and return the group."""
    return group(
        **{
            f.name: _collect_group(f.type, values) if is_dataclass(f.type) else values.pop(f.name)
            for f in fields(group)
        }
    )


def _list_group_parameters(group: Any) -> Iterator[inspect.Parameter]:
    """Yield the options of a group, those of its groups in their place."""
    hints = get_type_hints(group, include_extras=True)
    for f in fields(group):
        if is_dataclass(f.type):
            yield from _list_group_parameters(f.type)
        else:
            yield inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name]
            )


def build_single_command(name: str, function: Callable[..., None]) -> Any:
    """Create the command of one function."""
    app = CommandGroup(no_args_is_help=False)
    app.command(name)(function)
    return typer.main.get_command(app)


def extract_summary(text: str | None) -> str:
    """Return the first sentence of a docstring, without its full stop."""
    first = " ".join(inspect.cleandoc(text or "").partition("\n\n")[0].split())
    return first.partition(". ")[0].removesuffix(".")


def _format_usages(parameters: Iterable[Any]) -> Sequence[str]:
    return [format_argument_usage(p) for p in parameters if p.param_type_name == "argument"]
