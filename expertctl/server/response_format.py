"""The ``response_format`` of requests: the instruction to the model, and the check of an answer.

Formats are those of the native API and of the OpenAI API. An answer is never changed, and no part
of it is executed. A check that cannot be decided within bounds neither passes nor fails, and says
why.

SQL is parsed, never run. No dialect is given, so an answer passes if one dialect parses all of it.
Only statements count: the parser reads any words as an expression, even ``hello world``. A
statement that the parser keeps as raw text neither passes nor fails. Prose around SQL is accepted.

Text cannot be forced into a form here, so a model that is not told the form of JSON seldom writes
it. The last message of the user gets one more paragraph with an example made from the schema (small
models only repeat the schema itself). Two turns before the conversation show the assistant
answering in that form, with other values each time, so that the model neither leaves the form nor
copies the values; they follow the system messages, so that conversations with the same schema begin
with the same text, whose KV cache later requests reuse, and are left out where the chat template or
the context has no place for them (`insert_samples`). Nothing is added where the messages name the
properties already, where tools are offered, which the model could not call any more, or where no
example can be made within bounds.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from expertctl.engine.text.prompt import ConversationMessage
from expertctl.errors import UsageError
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.json_schema import check_json_object, check_json_value, compile_schema
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


INSTRUCTION_WARNING = (
    "examples of the requested JSON were added to the prompt; `expertctl serve "
    "--no-json-instruction` disables this"
)
"""The warning of an answer to which this happened."""
INSTRUCTION_TEXT = "Reply with one line of JSON in this form, with your own values:"
MAX_INSTRUCTION_CHARACTERS = 2000
MAX_SAMPLE_CHARACTERS = 500
"""A longer paragraph or answer is not repeated in sample turns, so that the prompt stays short."""
MAX_EXAMPLE_VALUES = 200
"""How many values an example may have; a schema can stand for an endless one."""
_MAX_DEPTH = 12
_DEFAULT_ITEMS = 2
_CHOICES = ("anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True)
class _ExampleValues:
    """The values of one example where the schema leaves them open."""

    request: str
    """What the user asks for where the assistant answers with the example."""
    text: str
    """A format string; it takes the name of the property."""
    number: int
    boolean: bool
    choice: int
    """The index of the value taken where a schema lists several."""


_FORM = _ExampleValues("", "<{}>", 12, boolean=False, choice=0)
_SAMPLES = (
    _ExampleValues("Give an example.", "a {}", 7, boolean=True, choice=-1),
    _ExampleValues("Give another example.", "another {}", 3, boolean=False, choice=0),
)


@dataclass(frozen=True, slots=True)
class JsonInstruction:
    """What a model is told of the form of its answer."""

    paragraph: str
    """The end of the last message of the user."""
    samples: tuple[ConversationMessage, ...]
    """Turns before the conversation, of the user and the assistant in alternation."""


@dataclass(frozen=True, slots=True)
class InstructedConversation:
    """A conversation that may say the form of the answer, and sample turns to show before it."""

    messages: tuple[ConversationMessage, ...]
    samples: tuple[ConversationMessage, ...] = ()


def build_json_instruction(schema: JsonObject) -> JsonInstruction | None:
    """Return the instruction for a schema; None if no example of an object or list can be made."""
    form = _format_example(schema, _FORM)
    if form is None:
        return None
    paragraph = f"{INSTRUCTION_TEXT}\n{form}"
    return JsonInstruction(paragraph, tuple(_build_samples(schema, paragraph)))


def _build_samples(schema: JsonObject, paragraph: str) -> Iterator[ConversationMessage]:
    for values in _SAMPLES if len(paragraph) <= MAX_SAMPLE_CHARACTERS else ():
        answer = _format_example(schema, values)
        if answer is not None and len(answer) <= MAX_SAMPLE_CHARACTERS:
            yield ConversationMessage("user", f"{values.request}\n\n{paragraph}")
            yield ConversationMessage("assistant", answer)


def _format_example(schema: JsonObject, values: _ExampleValues) -> str | None:
    """Return an example as one line of JSON; None if it is too large, or no object or list."""
    try:
        example = _ExampleBuilder(schema, values).build_value(schema, "value", 0)
    except _TooLargeError:
        return None
    text = json.dumps(example, ensure_ascii=False)
    is_container = isinstance(example, dict | list) and bool(example)
    return text if is_container and len(text) <= MAX_INSTRUCTION_CHARACTERS else None


def add_json_instruction(
    messages: Sequence[ConversationMessage], schema: JsonObject
) -> InstructedConversation:
    """Return a conversation that says the form, if none of its messages does yet."""
    last = next((i for i in reversed(range(len(messages))) if messages[i].role == "user"), None)
    if last is None or mentions_properties((message.content for message in messages), schema):
        return InstructedConversation(tuple(messages))
    instruction = build_json_instruction(schema)
    if instruction is None:
        return InstructedConversation(tuple(messages))
    asked = messages[last]
    instructed = replace(asked, content=f"{asked.content}\n\n{instruction.paragraph}")
    return InstructedConversation(
        (*messages[:last], instructed, *messages[last + 1 :]), instruction.samples
    )


def mentions_properties(texts: Iterable[str], schema: JsonObject) -> bool:
    """Tell whether texts hold the name of every property in quotes, as JSON has it."""
    properties = schema.get("properties")
    names = list(properties) if isinstance(properties, dict) else []
    text = "\n".join(texts)
    return bool(names) and all(f'"{name}"' in text for name in names)


class _TooLargeError(Exception):
    """An example would have too many values."""


@dataclass(slots=True)
class _ExampleBuilder:
    """Makes a value that has the form of a schema; the schema may be malformed."""

    root: JsonObject
    values: _ExampleValues
    value_count: int = 0

    def build_value(self, schema: JsonValue, name: str, depth: int) -> JsonValue:
        """Return an example; ``name`` is the property that it stands for."""
        self.value_count += 1
        if self.value_count > MAX_EXAMPLE_VALUES or depth > _MAX_DEPTH:
            raise _TooLargeError
        if not isinstance(schema, dict):
            return self.values.text.format(name)
        if (given := self._list_given_values(schema)) is not None:
            return given[self.values.choice]
        inner = self._find_inner_schema(schema)
        if inner is not None:
            return self.build_value(inner, name, depth + 1)
        match _find_type(schema):
            case "object":
                return self._build_object(schema, depth)
            case "array":
                return self._build_array(schema, name, depth)
            case kind:
                return self._build_scalar(kind, schema, name)

    def _find_inner_schema(self, schema: JsonObject) -> JsonValue:
        """Return the schema that one refers to or has as its first choice other than null."""
        if isinstance(place := schema.get("$ref"), str):
            return self._resolve_reference(place)
        for key in _CHOICES if "properties" not in schema else ():
            if isinstance(choices := schema.get(key), list):
                return next((one for one in choices if one != {"type": "null"}), None)
        return None

    def _resolve_reference(self, reference: str) -> JsonValue:
        found: JsonValue = self.root
        for step in reference.removeprefix("#").split("/")[1:]:
            found = found.get(step) if isinstance(found, dict) else None
        return found if found is not None else True

    def _build_object(self, schema: JsonObject, depth: int) -> JsonValue:
        properties = schema.get("properties")
        fields = properties if isinstance(properties, dict) else {}
        return {name: self.build_value(one, name, depth + 1) for name, one in fields.items()}

    def _build_array(self, schema: JsonObject, name: str, depth: int) -> JsonValue:
        first = schema.get("prefixItems")
        if isinstance(first, list):
            return [self.build_value(one, name, depth + 1) for one in first]
        low = _read_bound(schema, "minItems", 0)
        high = _read_bound(schema, "maxItems", MAX_EXAMPLE_VALUES)
        count = min(max(_DEFAULT_ITEMS, low), high, MAX_EXAMPLE_VALUES)
        items = schema.get("items")
        return [self.build_value(items, f"{name} {n + 1}", depth + 1) for n in range(int(count))]

    def _list_given_values(self, schema: JsonObject) -> list[JsonValue] | None:
        """Return the values that the schema lists, null only if alone; None if it lists none."""
        if "const" in schema:
            return [schema["const"]]
        for key in ("enum", "examples"):
            if isinstance(values := schema.get(key), list) and values:
                return [one for one in values if one is not None] or [None]
        return None

    def _build_scalar(self, kind: JsonValue, schema: JsonObject, name: str) -> JsonValue:
        match kind:
            case "integer" | "number":
                default = self.values.number + (0 if kind == "integer" else 0.5)
                least = max(default, _read_bound(schema, "minimum", default))
                return min(least, _read_bound(schema, "maximum", least))
            case "boolean":
                return self.values.boolean
            case "null":
                return None
            case _:
                return self.values.text.format(name)


def _find_type(schema: JsonObject) -> JsonValue:
    kind = schema.get("type")
    if isinstance(kind, list):
        return next((one for one in kind if one != "null"), "null")
    return "object" if kind is None and "properties" in schema else kind


def _read_bound(schema: Mapping[str, JsonValue], key: str, default: float) -> float:
    bound = schema.get(key)
    return bound if isinstance(bound, int | float) and not isinstance(bound, bool) else default
