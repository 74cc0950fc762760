"""The options ``-q`` and ``-v``, which every command and group has.

Both work before and after the name of a command, as in ``expertctl -q run`` and
``expertctl run -q``. A command that has an option of the same name keeps its own. ``-v`` prints
the records that modules of expertctl log, whatever their level, and the settings; secrets are
removed from all of them.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_command

from expertctl.cli.output import VERBOSITY, debug
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
) -> None:
    """Declare the options; never called."""


@cache
def build_options() -> tuple[Any, ...]:
    """Return the two options; the parser compares them by identity, so they are built once."""
    app = typer.Typer(add_completion=False)
    app.command()(_declare_options)
    return tuple(get_command(app).params)


def add_options(parameters: Sequence[Any]) -> list[Any]:
    """Return the parameters of a command with those of the two options that it does not have."""
    taken = {name for parameter in parameters for name in parameter.opts}
    return [*parameters, *(each for each in build_options() if taken.isdisjoint(each.opts))]


def check_text_options(parameters: Sequence[Any], words: Sequence[str]) -> None:
    """Check that neither option stands between the words of a prompt, which may mean it.

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
        if word in ours:
            last = word if has_text else ""
        elif word in with_value:
            next(rest, None)
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
