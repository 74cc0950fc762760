"""From the ``response_format`` of a request to the check of its answer.

An answer is never changed, and no part of it is run. A check that cannot be decided within bounds
neither passes nor fails, and says why.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from expertctl.engine.answer_form import Checked, checked
from expertctl.engine.serving.job import Check
from expertctl.errors import UsageError
from expertctl.schema.strict_json import JsonObject
from expertctl.server.post_processing.command import Command
from expertctl.server.post_processing.json_answer import check_object, check_value
from expertctl.server.post_processing.json_schema import read_schema
from expertctl.server.post_processing.response_format import FormatType, ResponseFormat
from expertctl.server.post_processing.sql import check_sql

Commands = Mapping[str, Command]
"""The validators that the operator of the server named."""
NO_COMMANDS: Commands = MappingProxyType({})
_OF_TYPE: Mapping[FormatType, frozenset[str]] = {
    "json_schema": frozenset({"schema", "json_schema"}),
    "custom": frozenset({"name"}),
}
"""Type → the fields that it has."""


def check_of(given: ResponseFormat | None, *, commands: Commands = NO_COMMANDS) -> Check | None:
    """Return the check that a request asks for; None where it asks for none.

    Raises:
        UsageError: when the format is incomplete, or its schema cannot be used.
    """
    if given is None:
        return None
    _refuse_fields(given)
    match given.type:
        case "text":
            return None
        case "json":
            return check_value
        case "json_object":
            return check_object
        case "json_schema":
            return read_schema(_schema(given), where=_place(given)).check
        case "python":
            return _check_python
        case "sql":
            return check_sql
        case "custom":
            return partial(_command(given, commands).check, given.name or "")


def _refuse_fields(given: ResponseFormat) -> None:
    """Refuse a field that has no meaning for the type."""
    known = _OF_TYPE.get(given.type, frozenset())
    for name in ("schema", "json_schema", "name"):
        if getattr(given, name) is not None and name not in known:
            raise UsageError(
                f"response_format.{name} has no meaning beside the type {given.type}",
                hint="leave it out",
            )


def _schema(given: ResponseFormat) -> JsonObject:
    named = given.json_schema.schema if given.json_schema else None
    found = [schema for schema in (given.schema, named) if schema is not None]
    if len(found) != 1:
        raise UsageError(
            f"response_format: {len(found)} schemas are given, one is needed",
            hint="give it as response_format.schema, or as response_format.json_schema.schema",
        )
    return found[0]


def _place(given: ResponseFormat) -> str:
    inner = "schema" if given.schema is not None else "json_schema.schema"
    return f"response_format.{inner}"


def _check_python(text: str) -> Checked:
    return checked(text, "python")


def _command(given: ResponseFormat, commands: Commands) -> Command:
    if given.name is None:
        raise UsageError(
            "response_format.name is missing: which validator?", hint=_choices(commands)
        )
    if given.name not in commands:
        raise UsageError(
            f"response_format.name: there is no validator {given.name!r}", hint=_choices(commands)
        )
    return commands[given.name]


def _choices(commands: Commands) -> str:
    if not commands:
        return "`expertctl serve --validator NAME=PROGRAM` names them, and none was named"
    return f"there is {', '.join(sorted(commands))}"
