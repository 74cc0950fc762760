"""The ``response_format`` of requests: our own words, and those of the OpenAI API.

Answers that must be SQL: each statement is parsed, none is run.

No dialect is given, so it is enough if one dialect reads the whole answer. Only statements count:
the parser reads any words as an expression, even ``hello world``. A statement that the parser keeps
as raw text, without parsing it, neither passes nor fails. Prose around SQL is no fault.

From the ``response_format`` of a request to the check of its answer.

An answer is never changed, and no part of it is run. A check that cannot be decided within bounds
neither passes nor fails, and says why.
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
from expertctl.server.post_processing.json_schema import (
    check_json_object,
    check_json_value,
    compile_schema,
)
from expertctl.server.post_processing.validator import ValidatorCommand

FormatType = Literal["text", "json", "json_object", "json_schema", "python", "sql", "custom"]
_Name = Annotated[str, Meta(min_length=1, max_length=64)]


class NamedSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON Schema as the OpenAI API has it; ``strict`` changes nothing: it always is."""

    name: _Name
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """The form that an answer is to have.

    ``schema`` belongs to ``json_schema``, as does ``json_schema``, of which one is given; ``name``
    belongs to ``custom`` and is one that the server knows.
    """

    type: FormatType
    schema: dict[str, Any] | None = None
    json_schema: NamedSchema | None = None
    name: _Name | None = None

    @property
    def prompt_schema(self) -> JsonObject | None:
        """The schema that a model may be shown; None without one."""
        if self.type != "json_schema":
            return None
        return self.schema or (self.json_schema.schema if self.json_schema else None)

    @property
    def is_json(self) -> bool:
        """Whether the answer is to be JSON."""
        return self.type in {"json", "json_object", "json_schema"}


MAX_CHARACTERS = 20_000
"""A longer answer is not checked: the parser is slow."""
_DIALECTS = ("", "postgres", "mysql", "tsql")
"""The default, which reads most, and dialects with quoting rules of their own."""
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

logging.getLogger("sqlglot").setLevel(logging.ERROR)  # its warnings contain the text


def check_sql(text: str) -> FormatCheck:
    """Check that an answer, or each of its SQL code blocks, consists of SQL statements."""
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
    """Return a pass if any dialect passes, else the verdict of the first dialect."""
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
        return FormatCheck(None, "the answer is not checked: it has a statement that is not read")
    if not statements or not all(isinstance(one, _STATEMENTS) for one in statements):
        return FormatCheck(False, f"{_NOT_SQL_MESSAGE}: it is no statement")
    return FormatCheck(True)


def _describe_error(error: SqlglotError) -> str:
    """Return what is wrong and where, without the excerpt that the parser adds in colours."""
    first = error.errors[0] if isinstance(error, ParseError) and error.errors else {}
    if not first:
        return "it cannot be split into words"
    fact = str(first["description"]).partition(" but got <")[0]
    return f"{fact[:200]}, line {first['line']}, column {first['col']}"


Validators = Mapping[str, ValidatorCommand]
"""The validators that the operator of the server named."""
NO_VALIDATORS: Validators = MappingProxyType({})
_FIELDS_BY_TYPE: Mapping[FormatType, frozenset[str]] = {
    "json_schema": frozenset({"schema", "json_schema"}),
    "custom": frozenset({"name"}),
}
"""Type → the fields that it has."""


def build_check(
    response_format: ResponseFormat | None, *, commands: Validators = NO_VALIDATORS
) -> CheckFunction | None:
    """Return the check that a request asks for; None where it asks for none.

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
    """Refuse a field that has no meaning for the type."""
    known = _FIELDS_BY_TYPE.get(given.type, frozenset())
    for name in ("schema", "json_schema", "name"):
        if getattr(given, name) is not None and name not in known:
            raise UsageError(
                f"response_format.{name} has no meaning beside the type {given.type}",
                hint="leave it out",
            )


def _select_schema(given: ResponseFormat) -> JsonObject:
    named = given.json_schema.schema if given.json_schema else None
    found = [schema for schema in (given.schema, named) if schema is not None]
    if len(found) != 1:
        raise UsageError(
            f"response_format: {len(found)} schemas are given, one is needed",
            hint="give it as response_format.schema, or as response_format.json_schema.schema",
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
            "response_format.name is missing: which validator?", hint=_list_validators(commands)
        )
    if given.name not in commands:
        raise UsageError(
            f"response_format.name: there is no validator {given.name!r}",
            hint=_list_validators(commands),
        )
    return commands[given.name]


def _list_validators(commands: Validators) -> str:
    if not commands:
        return "`expertctl serve --validator NAME=PROGRAM` names them, and none was named"
    return f"there is {', '.join(sorted(commands))}"
