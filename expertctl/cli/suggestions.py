"""Adds suggestions to errors, and translates errors of the command-line parser into ours.

Imported only after a call was refused. Typer raises its own exceptions and validates values with
pydantic; both are recognised by class name, because their classes are private.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from typer.exceptions import TyperException

from expertctl.errors import BudgetError, ExpertError, UsageError
from expertctl.settings import find_home
from expertctl.store.store import Store, find_similar_names


def add_name_suggestions(error: ExpertError) -> ExpertError:
    """Return an error about a name with the installed experts that may be meant, if any."""
    if not isinstance(error, UsageError) or not error.unknown_name:
        return error
    near = _find_similar_names(error.unknown_name.lower())
    if not near:
        return error
    return UsageError(error.message, hint=f"did you mean {' or '.join(near)}?")


def _find_similar_names(name: str) -> list[str]:
    with suppress(ExpertError, OSError):  # the original error is the one to report
        experts = Store(find_home().store).list_experts()
        return find_similar_names(name, [str(expert.package) for expert in experts])
    return []


_RESET_HINT = "/reset clears the conversation, which also takes memory"


def add_chat_hint(error: ExpertError, *, has_turns: bool) -> ExpertError:
    """Return an error with the hint that applies in a chat: the conversation takes memory, too."""
    suggested = add_name_suggestions(error)
    if type(suggested) is BudgetError and has_turns:  # not of a full disk, or a large file
        return BudgetError(
            suggested.message, hint="; ".join(filter(None, (suggested.hint, _RESET_HINT)))
        )
    return suggested


COMMAND_SYNONYMS: Mapping[str, str] = {
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
"""Names in other tools → the command here."""

_NO_COMMAND = re.compile(r"No such command '(.*?)'", re.S)
_EXTRA = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", re.S)
_CHOICES = re.compile(r"'(.*)' is not one of (.*)", re.S)
_MAX_SHOWN = 80
_TYPE_MESSAGES = {
    "int_parsing": "is not a whole number",
    "int_from_float": "is not a whole number",
    "int_type": "is not a whole number",
    "int_parsing_size": "is too large a number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "finite_number": "is not a finite number",
    "bool_parsing": "is neither true nor false",
}
"""Types of pydantic's errors → the message about the value."""
_BOUND_MESSAGES = {
    "greater_than_equal": ("ge", "is less than {}, the minimum"),
    "greater_than": ("gt", "is not more than {}"),
    "less_than_equal": ("le", "is more than {}, the maximum"),
    "less_than": ("lt", "is not less than {}"),
}


def convert_parser_error(
    error: TyperException, words: Iterable[str], commands: list[str]
) -> UsageError:
    """Return a refused call as a `UsageError`; ``words`` are its arguments."""
    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context is not None else _find_command_path(words, commands)
    unknown = _NO_COMMAND.match(error.format_message())
    if unknown is not None:
        known = commands if path == "expertctl" else list(getattr(context.command, "commands", ()))
        return build_unknown_command_error(unknown[1], known, path=path)
    near = sorted(getattr(error, "possibilities", None) or ())
    hint = f"see `{path} --help`"
    if near:
        hint = f"did you mean {' or '.join(near)}? {hint}"
    return UsageError(_format_message(error), hint=hint)


def build_unknown_command_error(
    name: str, known: list[str], *, path: str = "expertctl"
) -> UsageError:
    """Return the error for a command that does not exist, with the one that may be meant."""
    meant = COMMAND_SYNONYMS.get(name.lower(), "")
    if path != "expertctl":
        meant = next((each for each in known if each == meant.split(" ")[-1]), "")
    near = [meant] if meant else get_close_matches(name.lower(), known, n=3, cutoff=0.6)
    hint = f"see `{path} --help`"
    if near:
        hint = f"did you mean {' or '.join(f'`{path} {each}`' for each in near)}?"
    return UsageError(f"{path} has no command {_shorten(name)}", hint=hint)


def _find_command_path(words: Iterable[str], commands: list[str]) -> str:
    command = next((word for word in words if word in commands), None)
    return f"expertctl {command}" if command else "expertctl"


def _format_message(error: TyperException) -> str:
    text, cause = error.format_message(), error.__cause__
    extra = _EXTRA.match(text)
    match type(error).__name__:
        case "BadParameter" if hasattr(cause, "errors"):
            return f"{_get_parameter_name(error)}: {_format_validation_error(cause)}"
        case "BadParameter":
            return f"{_get_parameter_name(error)}: {_remove_choice_quotes(error.message)}"
        case "MissingParameter":
            return f"{_get_parameter_name(error)} is missing"
        case "NoSuchOption":
            return f"there is no option {_shorten(str(getattr(error, 'option_name', '')))}"
        case "BadOptionUsage" if "requires an argument" in text:
            return f"{getattr(error, 'option_name', 'the option')} needs a value"
        case "BadOptionUsage" if "does not take a value" in text:
            return f"{getattr(error, 'option_name', 'the option')} takes no value"
        case _ if extra is not None:
            return f"{_shorten(extra[1])}: unexpected argument"
        case _:
            return text


def _get_parameter_name(error: TyperException) -> str:
    """Return the option or argument that is wrong: ``--max-tokens``, ``PROMPT``."""
    parameter: Any = getattr(error, "param", None)
    if parameter is None:
        return "a value"
    options = [each for each in parameter.opts if each.startswith("--")]
    return options[0] if options else str(parameter.get_error_hint()).strip("'")


def _format_validation_error(cause: Any) -> str:
    """Return pydantic's first error, with the value."""
    first = cause.errors()[0]
    kind, value, limits = first["type"], first.get("input"), first.get("ctx", {})
    if str(value).strip("+-").lower() == "nan":
        return f"{_quote(value)} is not a number"
    if kind in _TYPE_MESSAGES:
        return f"{_quote(value)} {_TYPE_MESSAGES[kind]}"
    if kind in _BOUND_MESSAGES:
        key, words = _BOUND_MESSAGES[kind]
        return f"{_shorten(str(value))} {words.format(f'{limits.get(key, 0):g}')}"
    return _remove_choice_quotes(str(first["msg"]).removeprefix("Value error, "))


def _remove_choice_quotes(text: str) -> str:
    """Return the parser's own message without quotes around choices."""
    choices = _CHOICES.match(text)
    if choices is None:
        return text
    return f"{_quote(choices[1])} is not one of {choices[2].replace(chr(39), '').rstrip('.')}"


def _quote(value: object) -> str:
    return repr(_shorten(str(value)))


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
