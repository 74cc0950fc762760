"""The entry point: finds the command, imports its module only then, and reports errors.

``expertctl --version`` and ``list`` must start without the libraries of other commands, so
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
from typer.exceptions import Abort, TyperException
from typer.main import get_command

from expertctl import __version__
from expertctl.cli.help import (
    CONTEXT_SETTINGS,
    HelpGroup,
    build_single_command,
    limit_verbosity,
    print_help_page,
    write_sections,
)
from expertctl.cli.output import fail, print_message, quote, warn
from expertctl.cli.process import (
    FAILURE,
    INTERRUPTED,
    OK,
    USAGE,
    disable_collections,
    get_exit_code,
    install_signal_handlers,
    reduce_collections,
    report_stopped,
)
from expertctl.errors import BudgetError, DiskFullError, ExpertError, StoreError, UsageError
from expertctl.files import NO_SPACE_ERRORS
from expertctl.settings import find_home, find_unknown_settings

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Use": {
        "run": ("run:run", "Answer a prompt with the experts that suit it, or with named ones"),
        "chat": ("chat:chat", "Chat with experts; /? lists the commands"),
        "serve": ("serve:app", "Run an OpenAI- and Anthropic-compatible server"),
        "route": ("run:route", "Show which experts would answer a prompt, and why"),
        "logs": ("logs:logs", "Show prompts and answers that were kept, if the setting logs is on"),
    },
    "Get": {
        "install": ("install:install", "Install experts and what they require"),
        "search": ("search:search", "Search the packages of a registry"),
        "info": ("search:info", "Show what a registry says about a package"),
        "update": ("dependencies:update", "Install the newest versions that your list allows"),
        "outdated": ("dependencies:outdated", "Show which experts are behind, yanked or revoked"),
        "pull": ("bases:pull", "Download a base model from a hub and register it"),
        "list": ("installed:list_experts", "List the installed experts"),
        "remove": ("install:remove", "Remove an installed expert"),
        "why": ("dependencies:why", "Show why an expert is installed"),
        "lock": ("dependencies:lock", "Write expert.lock for the experts.toml in this folder"),
    },
    "Make": {
        "train": ("train:train", "Train an adapter on examples, measure it, and package it"),
        "init": ("packages:init", "Write a draft of expert.json beside an adapter"),
        "build": ("packages:build", "Check an adapter directory and package it"),
        "eval": ("evaluation:evaluate", "Measure an expert against its base, or routing"),
        "sign": ("packages:sign", "Sign a package, or replace its signature"),
        "verify": ("packages:verify", "Check every digest and the signature of a package"),
        "inspect": ("packages:inspect", "Show the manifest of a package"),
        "diff": ("package_view:diff", "Show what changed between two packages"),
        "unpack": ("packages:unpack", "Write the files of a package to a new directory"),
        "export": ("exports:export", "Write experts to a file"),
        "import": ("install:import_", "Install experts that were exported together"),
    },
    "Share": {
        "publish": ("publish:publish", "Publish packages to a registry"),
        "yank": ("publish:yank", "Withdraw a version from new installs"),
        "login": ("connection:login", "Check a registry's token and save it"),
        "logout": ("connection:logout", "Delete the saved token of a registry"),
        "token": ("connection:token_app", "Manage your access tokens of a registry"),
        "registry": ("registry:app", "Run and administer your own registry"),
    },
    "Trust": {
        "keys": ("trust:keys_app", "Manage your own signing keys"),
        "trust": ("trust:app", "Manage whose signatures are accepted, and for what"),
    },
    "Maintain": {
        "base": ("bases:app", "Manage the base models that experts adapt"),
        "doctor": ("doctor:doctor", "Check everything that is installed, byte by byte"),
        "gc": ("doctor:gc", "Delete files that nothing needs"),
        "reindex": ("install:reindex", "Rebuild the catalogue and the routing vectors"),
        "config": ("config:app", "Show and change settings"),
        "stats": ("stats:stats", "Show how often experts were used and how well they did"),
        "feedback": ("stats:feedback", "Rate an answer as good or bad"),
        "bench": ("bench:app", "Measure how fast this machine runs a base"),
    },
}
"""Commands by section, in the order of the help, which imports none of them.

Each has its place, ``module:attribute`` below ``expertctl.cli`` (a function or a `CommandGroup`),
and its line in the help.
"""
COMMANDS: dict[str, str] = {
    name: target for section in SECTIONS.values() for name, (target, _) in section.items()
}
HELP_COMMAND = "help"
_COMPLETE = "_EXPERTCTL_COMPLETE"
"""The variable in which a shell asks for completions."""


class LazyGroup(HelpGroup):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # typer.Context is the public name
        """Return the names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]  # typer.Context is the public name
        """Import one command."""
        if cmd_name == HELP_COMMAND:
            return build_single_command(HELP_COMMAND, _show_help)
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name].split(":")
        target = getattr(import_module(f"expertctl.cli.{module}"), attribute)
        return _build_command(cmd_name, target)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]  # typer.Context is the public name
        """Find a command; the error for a misspelt name suggests similar ones."""
        names: Any = dict.fromkeys(COMMANDS)
        self.commands = names  # typer suggests its keys; commands come from `get_command`
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: typer.Context, incomplete: str) -> list[Any]:  # type: ignore[override]  # typer.Context is the public name
        """Complete commands without importing any, and options."""
        from typer._click.shell_completion import CompletionItem  # typer exports it nowhere

        lines = {name: line for section in SECTIONS.values() for name, (_, line) in section.items()}
        found = [
            CompletionItem(name, help=line)
            for name, line in lines.items()
            if name.startswith(incomplete)
        ]
        return found or super().shell_complete(ctx, incomplete)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by section, without importing any."""
        titled = {
            title: [(name, summary) for name, (_, summary) in section.items()]
            for title, section in SECTIONS.items()
        }
        write_sections(titled, formatter)


def _build_command(name: str, target: typer.Typer | Callable[..., None]) -> Any:
    if isinstance(target, typer.Typer):
        group = get_command(target)
        group.name = name
        return group
    return build_single_command(name, target)


def _show_help(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="A command, such as run.")
    ] = None,
) -> None:
    """Show the help of a command.

    Example: expertctl help registry init
    """
    words = [*(command or ()), "--help"]
    if print_help_page(words):
        return
    context.find_root().command.main(words, prog_name="expertctl", standalone_mode=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"expertctl {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    context_settings=CONTEXT_SETTINGS,
)


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "-V", "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Build, sign, install, route and run LLM experts.

    Example: expertctl run "Sort these numbers: 41, 17, 23"
    """
    _warn_of_unknown_settings()


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its code."""
    words = sys.argv[1:] if arguments is None else arguments
    _replace_closed_streams()
    reduce_collections()
    install_signal_handlers()
    code = run(words)
    if code == INTERRUPTED:
        report_stopped()
    _discard_unwritable_output()
    disable_collections()
    sys.exit(code)


def run(words: list[str]) -> int:
    """Run one command and return its exit code. No user error is a traceback."""
    with limit_verbosity():
        as_json = "--json" in words
        try:
            if print_help_page(words):
                return OK
            command = get_command(app)
            if _COMPLETE in os.environ:
                from expertctl.cli.completion import prepare_completion

                prepare_completion()
            result = command.main(words, prog_name="expertctl", standalone_mode=False)
            sys.stdout.flush()
        except ExpertError as error:
            fail(_explain_error(error), as_json=as_json)
            return get_exit_code(error)
        except (KeyboardInterrupt, Abort):
            return INTERRUPTED
        except TyperException as error:
            return _report_usage_error(error, words, as_json=as_json)
        except OSError as error:
            return _report_os_error(error, as_json=as_json)
        except MemoryError:
            hint = "end other programs, or add memory"
            short = BudgetError("there is not enough memory", hint=hint)
            fail(short, as_json=as_json)
            return get_exit_code(short)
        return result if isinstance(result, int) else OK


def _warn_of_unknown_settings() -> None:
    """Tell which settings are ignored; a file that cannot be read is reported where it is used."""
    with suppress(ExpertError, OSError):
        path = find_home().config
        for key in find_unknown_settings(path):
            warn([f"{path}: {quote(key)} is not a setting of this version, and is ignored"])


def _explain_error(error: ExpertError) -> ExpertError:
    """Add a hint to an error about the home or a name; only a wrong name reads the store."""
    if isinstance(error, StoreError) and not error.hint:
        return StoreError(error.message, hint=_build_home_hint(error.message.partition(": ")[0]))
    if not isinstance(error, UsageError) or not error.unknown_name:
        return error
    from expertctl.cli.suggestions import add_name_suggestions

    return add_name_suggestions(error)


def _replace_closed_streams() -> None:
    """Open closed streams (``<&-``, ``>&-``) on the null device, else a file gets their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # until the end


def _discard_unwritable_output() -> None:
    """Drop output that cannot be written; Python would retry at exit and exit with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _report_usage_error(error: TyperException, words: list[str], *, as_json: bool) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # private in typer; its message is the help
        print_message(error.format_message())
        return USAGE
    from expertctl.cli.suggestions import convert_parser_error

    usage = convert_parser_error(error, words, list(COMMANDS))
    fail(usage, as_json=as_json)
    return get_exit_code(usage)


def _report_os_error(error: OSError, *, as_json: bool) -> int:
    if error.errno == errno.EPIPE:
        sys.stderr.close()
        return FAILURE
    name = error.filename or "the disk"
    if error.errno in NO_SPACE_ERRORS:
        full = DiskFullError(f"{name}: no space left", hint="free some space, or `expertctl gc`")
        fail(full, as_json=as_json)
        return get_exit_code(full)
    hint = _build_home_hint(str(name))
    fail(StoreError(f"{name}: {error.strerror or error}", hint=hint), as_json=as_json)
    return FAILURE


def _build_home_hint(name: str) -> str:
    """Return the hint for a path below ``EXPERT_HOME`` that cannot be used; else nothing."""
    with suppress(ExpertError):
        root = find_home().root
        if Path(name).is_relative_to(root):
            return f"EXPERT_HOME is {root}: set it to a writable folder"
    return ""
