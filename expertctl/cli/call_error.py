"""Turns the errors of the command-line parser into ours: what is wrong, in which option, and why.

Imported only once a call was refused. Typer raises its own exceptions, and validates values with
pydantic; both are told apart by name, because their classes are private.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from typer.exceptions import TyperException

from expertctl.errors import UsageError

OTHER_NAMES: Mapping[str, str] = {
    "uninstall": "remove",
    "rm": "remove",
    "delete": "remove",
    "version": "--version",
    "help": "--help",
    "upgrade": "update",
    "ls": "list",
    "add": "install",
    "download": "install",
    "get": "install",
    "show": "info",
    "push": "publish",
    "upload": "publish",
    "pull": "base add",
    "models": "base list",
    "ask": "run",
    "generate": "run",
    "evaluate": "eval",
    "new": "init",
    "create": "init",
    "key": "keys",
    "settings": "config",
    "whoami": "login",
}
"""What other tools call a command → what it is called here."""

_NO_COMMAND = re.compile(r"No such command '(.*?)'", re.S)
_EXTRA = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", re.S)
_CHOICES = re.compile(r"'(.*)' is not one of (.*)", re.S)
_MOST = 80
_FACTS = {
    "int_parsing": "is not a whole number",
    "int_from_float": "is not a whole number",
    "int_type": "is not a whole number",
    "int_parsing_size": "is too large a number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "finite_number": "is not a finite number",
    "bool_parsing": "is neither true nor false",
}
"""Types of pydantic's errors → what is wrong with the value."""
_BOUNDS = {
    "greater_than_equal": ("ge", "is less than {}, the least that is allowed"),
    "greater_than": ("gt", "is not more than {}"),
    "less_than_equal": ("le", "is more than {}, the most that is allowed"),
    "less_than": ("lt", "is not less than {}"),
}


def explain_call(error: TyperException, words: Iterable[str], commands: list[str]) -> UsageError:
    """Return a refused call as an error of ours; ``words`` are those of the call."""
    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context is not None else _path(words, commands)
    unknown = _NO_COMMAND.match(error.format_message())
    if unknown is not None:
        known = commands if path == "expertctl" else list(getattr(context.command, "commands", ()))
        return unknown_command(unknown[1], known, path=path)
    near = sorted(getattr(error, "possibilities", None) or ())
    hint = f"see `{path} --help`"
    if near:
        hint = f"did you mean {' or '.join(near)}? {hint}"
    return UsageError(_message(error), hint=hint)


def unknown_command(name: str, known: list[str], *, path: str = "expertctl") -> UsageError:
    """Return the error for a command that does not exist, with the one that may be meant."""
    meant = OTHER_NAMES.get(name.lower(), "")
    if path != "expertctl":
        meant = next((each for each in known if each == meant.split(" ")[-1]), "")
    near = [meant] if meant else get_close_matches(name.lower(), known, n=3, cutoff=0.6)
    hint = f"see `{path} --help`"
    if near:
        hint = f"did you mean {' or '.join(f'`{path} {each}`' for each in near)}?"
    return UsageError(f"{path} has no command {_shortened(name)}", hint=hint)


def _path(words: Iterable[str], commands: list[str]) -> str:
    command = next((word for word in words if word in commands), None)
    return f"expertctl {command}" if command else "expertctl"


def _message(error: TyperException) -> str:
    text, cause = error.format_message(), error.__cause__
    extra = _EXTRA.match(text)
    match type(error).__name__:
        case "BadParameter" if hasattr(cause, "errors"):
            return f"{_name(error)}: {_fault(cause)}"
        case "BadParameter":
            return f"{_name(error)}: {_plain(error.message)}"
        case "MissingParameter":
            return f"{_name(error)} is missing"
        case "NoSuchOption":
            return f"there is no option {_shortened(str(getattr(error, 'option_name', '')))}"
        case "BadOptionUsage" if "requires an argument" in text:
            return f"{getattr(error, 'option_name', 'the option')} needs a value"
        case "BadOptionUsage" if "does not take a value" in text:
            return f"{getattr(error, 'option_name', 'the option')} takes no value"
        case _ if extra is not None:
            return f"{_shortened(extra[1])}: nothing more is expected here"
        case _:
            return text


def _name(error: TyperException) -> str:
    """Return the option or argument at fault: ``--max-tokens``, ``PROMPT``."""
    parameter: Any = getattr(error, "param", None)
    if parameter is None:
        return "a value"
    options = [each for each in parameter.opts if each.startswith("--")]
    return options[0] if options else str(parameter.get_error_hint()).strip("'")


def _fault(cause: Any) -> str:
    """Return what pydantic's first error says, with the value."""
    first = cause.errors()[0]
    kind, value, limits = first["type"], first.get("input"), first.get("ctx", {})
    if str(value).strip("+-").lower() == "nan":
        return f"{_quoted(value)} is not a number"
    if kind in _FACTS:
        return f"{_quoted(value)} {_FACTS[kind]}"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"{_shortened(str(value))} {words.format(f'{limits.get(key, 0):g}')}"
    return _plain(str(first["msg"]).removeprefix("Value error, "))


def _plain(text: str) -> str:
    """Return the parser's own message without quotes around choices."""
    choices = _CHOICES.match(text)
    if choices is None:
        return text
    return f"{_quoted(choices[1])} is not one of {choices[2].replace(chr(39), '').rstrip('.')}"


def _quoted(value: object) -> str:
    return repr(_shortened(str(value)))


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[:_MOST]}…"
