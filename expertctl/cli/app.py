"""The entry point: finds the command, imports its module only then, and reports errors.

``expertctl --version`` and ``list`` must start without the libraries that other commands need, so
commands are named here and imported when they are called.
"""

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import Abort, TyperException
from typer.main import get_command

from expertctl import __version__
from expertctl.cli.exit_codes import FAILURE, INTERRUPTED, OK, USAGE, exit_code
from expertctl.cli.garbage import search_no_more, search_seldom
from expertctl.cli.interruption import heed_signals, tell_stopped
from expertctl.cli.output import fail, note
from expertctl.durable import NO_SPACE
from expertctl.errors import BudgetError, DiskFullError, ExpertError, StoreError, UsageError
from expertctl.settings import find_home

COMMANDS: dict[str, str] = {
    "init": "packages:init",
    "build": "packages:build",
    "sign": "packages:sign",
    "verify": "packages:verify",
    "inspect": "packages:inspect",
    "eval": "evaluating:evaluate",
    "unpack": "packages:unpack",
    "diff": "diffing:diff",
    "export": "exporting:export",
    "import": "installing:import_",
    "keys": "keys:app",
    "trust": "trust:app",
    "publish": "publishing:publish",
    "search": "searching:search",
    "info": "searching:info",
    "yank": "publishing:yank",
    "token": "tokens:app",
    "install": "installing:install",
    "lock": "updating:lock",
    "outdated": "updating:outdated",
    "update": "updating:update",
    "remove": "installing:remove",
    "list": "local:list_",
    "why": "why:why",
    "gc": "collecting:gc",
    "doctor": "doctor:doctor",
    "reindex": "installing:reindex",
    "config": "config:app",
    "login": "login:login",
    "logout": "login:logout",
    "base": "bases:app",
    "route": "run:route",
    "run": "run:run",
    "chat": "chat:chat",
    "serve": "serve:app",
    "feedback": "feedback:feedback",
    "stats": "stats:stats",
    "bench": "bench:app",
    "registry": "registry:app",
}
"""Command → ``module:attribute`` below ``expertctl.cli``: a function, or a `typer.Typer`."""


class LazyGroup(TyperGroup):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # typer.Context is the public name
        """Return the names, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]  # typer.Context is the public name
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name].split(":")
        target = getattr(import_module(f"expertctl.cli.{module}"), attribute)
        return _command(cmd_name, target)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]  # typer.Context is the public name
        """Find a command; the error for a misspelt name suggests similar ones."""
        names: Any = dict.fromkeys(COMMANDS)
        self.commands = names  # typer suggests its keys; commands come from `get_command`
        return super().resolve_command(ctx, args)


def _command(name: str, target: typer.Typer | Callable[..., None]) -> Any:
    if isinstance(target, typer.Typer):
        group = get_command(target)
        group.name = name
        return group
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name)(target)
    return get_command(single)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"expertctl {__version__}")
        raise typer.Exit


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=True, rich_markup_mode=None)


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Build, sign, install, route and run LLM experts.

    Example: expertctl run "Sort these numbers: 41, 17, 23"
    """


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its code."""
    words = sys.argv[1:] if arguments is None else arguments
    _replace_closed_streams()
    search_seldom()
    heed_signals()
    code = run(words)
    if code == INTERRUPTED:
        tell_stopped()
    _let_go_of_stdout()
    search_no_more()
    sys.exit(code)


def run(words: list[str]) -> int:
    """Run one command; return its exit code. Nothing a user can cause is a traceback."""
    as_json = "--json" in words
    try:
        result = get_command(app).main(words, prog_name="expertctl", standalone_mode=False)
        sys.stdout.flush()
    except ExpertError as error:
        fail(_explained(error), as_json=as_json)
        return exit_code(error)
    except (KeyboardInterrupt, Abort):
        return INTERRUPTED
    except TyperException as error:
        return _refuse_usage(error, words, as_json=as_json)
    except OSError as error:
        return _refuse_disk(error, as_json=as_json)
    except MemoryError:
        short = BudgetError("there is not enough memory", hint="end other programs, or add memory")
        fail(short, as_json=as_json)
        return exit_code(short)
    return result if isinstance(result, int) else OK


def _explained(error: ExpertError) -> ExpertError:
    """Say which expert may be meant if a name is wrong; only then the store is read."""
    if isinstance(error, StoreError) and not error.hint:
        return StoreError(error.message, hint=_home_hint(error.message.partition(": ")[0]))
    if not isinstance(error, UsageError) or not error.misnamed:
        return error
    from expertctl.cli.misnamed import explained

    return explained(error)


def _replace_closed_streams() -> None:
    """Open closed streams (``<&-``, ``>&-``) on the null device, else a file gets their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # until the end


def _let_go_of_stdout() -> None:
    """Drop output that cannot be written, else Python tries again at exit and exits with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _refuse_usage(error: TyperException, words: list[str], *, as_json: bool) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # private in typer; its message is the help
        note(error.format_message())
        return USAGE
    from expertctl.cli.call_error import explain_call

    usage = explain_call(error, words, list(COMMANDS))
    fail(usage, as_json=as_json)
    return exit_code(usage)


def _refuse_disk(error: OSError, *, as_json: bool) -> int:
    if error.errno == errno.EPIPE:
        sys.stderr.close()
        return FAILURE
    name = error.filename or "the disk"
    if error.errno in NO_SPACE:
        full = DiskFullError(f"{name}: no space left", hint="free some space, or `expertctl gc`")
        fail(full, as_json=as_json)
        return exit_code(full)
    hint = _home_hint(str(name))
    fail(StoreError(f"{name}: {error.strerror or error}", hint=hint), as_json=as_json)
    return FAILURE


def _home_hint(name: str) -> str:
    """Return the way out when a path below ``EXPERT_HOME`` cannot be used; else nothing."""
    with suppress(ExpertError):
        root = find_home().root
        if Path(name).is_relative_to(root):
            return f"EXPERT_HOME is {root}: set it to a folder that you may write"
    return ""
