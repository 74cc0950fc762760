"""The ``response_format`` of requests, and the check of an answer against it.

Formats are those of the native API and of the OpenAI API. An answer is never changed, and no part
of it is executed. A check that cannot be decided within bounds neither passes nor fails, and says
why.

SQL is parsed, never run. No dialect is given, so an answer passes if one dialect parses all of it.
Only statements count: the parser reads any words as an expression, even ``hello world``. A
statement that the parser keeps as raw text neither passes nor fails. Prose around SQL is accepted.
"""

import logging
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

import sqlglot
from msgspec import Meta, Struct
from sqlglot import expressions
from sqlglot.errors import ParseError, SqlglotError

from expertctl.engine.serving.request import CheckFunction
from expertctl.engine.text.answer_format import (
    FormatCheck,
    check_answer_format,
    find_language_blocks,
    find_sql,
    find_unnamed_blocks,
    worst_check,
)
from expertctl.errors import UsageError
from expertctl.schema.strict_json import JsonObject
from expertctl.server.json_schema import (
    check_json_object,
    check_json_value,
    compile_schema,
)
from expertctl.server.validator import ValidatorCommand

FormatType = Literal["text", "json", "json_object", "json_schema", "python", "sql", "custom"]
_Name = Annotated[str, Meta(min_length=1, max_length=64)]


class NamedSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON Schema in OpenAI's form; ``strict`` changes nothing, checks always are."""

    name: _Name
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """The required form of an answer.

    The type ``json_schema`` takes either ``schema`` or ``json_schema``; the type ``custom`` takes
    ``name``, the name of a validator of the server.
    """

    type: FormatType
    schema: dict[str, Any] | None = None
    json_schema: NamedSchema | None = None
    name: _Name | None = None

    @property
    def prompt_schema(self) -> JsonObject | None:
        """The schema that the prompt may describe; None without one."""
        if self.type != "json_schema":
            return None
        return self.schema or (self.json_schema.schema if self.json_schema else None)

    @property
    def is_json(self) -> bool:
        """Whether the answer must be JSON."""
        return self.type in {"json", "json_object", "json_schema"}


MAX_CHARACTERS = 20_000
"""Longer answers are not checked: the parser is slow."""
_DIALECTS = ("", "postgres", "mysql", "tsql")
"""The default, which accepts most, and dialects with other quoting rules."""
_FENCE_TAGS = frozenset({"sql", "mysql", "postgresql", "postgres", "sqlite", "tsql"})
_STATEMENTS = (
    expressions.Query,
    expressions.DDL,
    expressions.DML,
    expressions.Alter,
    expressions.Analyze,
    expressions.Comment,
    expressions.Commit,
    expressions.Copy,
    expressions.Describe,
    expressions.Drop,
    expressions.Grant,
    expressions.Merge,
    expressions.Pragma,
    expressions.Rollback,
    expressions.Set,
    expressions.Show,
    expressions.Transaction,
    expressions.TruncateTable,
    expressions.Use,
    expressions.Values,
)
_NOT_SQL_MESSAGE = "the answer is not SQL"

logging.getLogger("sqlglot").setLevel(logging.ERROR)  # its warnings contain the answer


def check_sql(text: str) -> FormatCheck:
    """Check that an answer, or each SQL code block in it, consists of SQL statements."""
    if not text.strip():
        return FormatCheck(False, "the answer is empty")
    if len(text) > MAX_CHARACTERS:
        return FormatCheck(None, f"the answer is not checked: over {MAX_CHARACTERS} characters")
    named = find_language_blocks(text, _FENCE_TAGS)
    if named:
        return worst_check(map(_check_dialects, named))
    within = find_sql(text)
    first = _check_dialects(text)
    others = map(_check_dialects, filter(None, (*find_unnamed_blocks(text), within)))
    return first if first.passed else next((one for one in others if one.passed), first)


def _check_dialects(text: str) -> FormatCheck:
    """Return a pass if any dialect passes, else the result of the first dialect."""
    found = [_check_dialect(text, dialect) for dialect in _DIALECTS]
    return next((one for one in found if one.passed), None) or found[0]


def _check_dialect(text: str, dialect: str) -> FormatCheck:
    try:
        statements = [one for one in sqlglot.parse(text, read=dialect) if one is not None]
    except SqlglotError as error:
        return FormatCheck(False, f"{_NOT_SQL_MESSAGE}: {_describe_error(error)}")
    except RecursionError:
        return FormatCheck(None, "the answer is not checked: its SQL is nested too deep")
    if any(isinstance(one, expressions.Command) for one in statements):
        return FormatCheck(
            None, "the answer is not checked: it has a statement that cannot be parsed"
        )
    if not statements or not all(isinstance(one, _STATEMENTS) for one in statements):
        return FormatCheck(False, f"{_NOT_SQL_MESSAGE}: it is not a statement")
    return FormatCheck(True)


def _describe_error(error: SqlglotError) -> str:
    """Return the problem and its place, without the coloured excerpt of the parser."""
    first = error.errors[0] if isinstance(error, ParseError) and error.errors else {}
    if not first:
        return "it cannot be split into tokens"
    fact = str(first["description"]).partition(" but got <")[0]
    return f"{fact[:200]}, line {first['line']}, column {first['col']}"


Validators = Mapping[str, ValidatorCommand]
"""The operator's validators, by name."""
NO_VALIDATORS: Validators = MappingProxyType({})
_FIELDS_BY_TYPE: Mapping[FormatType, frozenset[str]] = {
    "json_schema": frozenset({"schema", "json_schema"}),
    "custom": frozenset({"name"}),
}
"""Type → the fields it takes."""


def build_check(
    response_format: ResponseFormat | None, *, commands: Validators = NO_VALIDATORS
) -> CheckFunction | None:
    """Return the check for a response format; None if nothing is to be checked.

    Raises:
        UsageError: when the format is incomplete, or its schema cannot be used.
    """
    if response_format is None:
        return None
    _reject_unused_fields(response_format)
    match response_format.type:
        case "text":
            return None
        case "json":
            return check_json_value
        case "json_object":
            return check_json_object
        case "json_schema":
            return compile_schema(
                _select_schema(response_format), where=_schema_path(response_format)
            ).check
        case "python":
            return _check_python
        case "sql":
            return check_sql
        case "custom":
            return partial(
                _find_validator(response_format, commands).check, response_format.name or ""
            )


def _reject_unused_fields(given: ResponseFormat) -> None:
    """Refuse fields that the type does not take."""
    known = _FIELDS_BY_TYPE.get(given.type, frozenset())
    for name in ("schema", "json_schema", "name"):
        if getattr(given, name) is not None and name not in known:
            raise UsageError(
                f"response_format.{name} does not belong to the type {given.type}",
                hint="leave it out",
            )


def _select_schema(given: ResponseFormat) -> JsonObject:
    named = given.json_schema.schema if given.json_schema else None
    found = [schema for schema in (given.schema, named) if schema is not None]
    if len(found) != 1:
        raise UsageError(
            f"response_format: {len(found)} schemas are given, one is needed",
            hint="set either response_format.schema or response_format.json_schema.schema",
        )
    return found[0]


def _schema_path(given: ResponseFormat) -> str:
    inner = "schema" if given.schema is not None else "json_schema.schema"
    return f"response_format.{inner}"


def _check_python(text: str) -> FormatCheck:
    return check_answer_format(text, "python")


def _find_validator(given: ResponseFormat, commands: Validators) -> ValidatorCommand:
    if given.name is None:
        raise UsageError(
            "response_format.name is missing: it names the validator",
            hint=_list_validators(commands),
        )
    if given.name not in commands:
        raise UsageError(
            f"response_format.name: there is no validator {given.name!r}",
            hint=_list_validators(commands),
        )
    return commands[given.name]


def _list_validators(commands: Validators) -> str:
    if not commands:
        return "there are none; add one with `expertctl serve --validator NAME=PROGRAM`"
    return f"available: {', '.join(sorted(commands))}"
