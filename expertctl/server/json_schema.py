"""Answers that must be JSON, or fit a JSON Schema sent with the request.

Anything around the JSON fails the check, since clients parse the whole answer; one Markdown fence
and text after the JSON are removed before (`expertctl.server.output_parser.JsonExtractor`).

The schema is untrusted: its size and depth are bounded, nothing it refers to is fetched, its
patterns run in linear time, and the number of visits is computed before it is applied. In a chain
of n schemas that each apply the next one twice, a value is visited 2ⁿ times. So a schema is first
read as a graph: edges lead from each part to the parts it applies to the same value, and to those
it applies one level further down. Only references within the schema are followed.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isinf
from operator import mul
from typing import NoReturn
from urllib.parse import unquote

import jsonschema_rs

from expertctl.engine.text.answer_format import MAX_CHARACTERS, FormatCheck
from expertctl.errors import UsageError
from expertctl.schema.strict_json import JsonObject, JsonValue, get_children
from expertctl.schema.validation import MAX_PROBLEM_LENGTH, shorten_middle

_MAX_INTEGER_DIGITS = 4000
"""Maximum digits of an exact integer; a longer one is read as the nearest float."""


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """The JSON value of an answer."""

    value: JsonValue


def check_json_value(text: str) -> FormatCheck:
    """Check that an answer is one JSON value."""
    found = parse_json_answer(text)
    return found if isinstance(found, FormatCheck) else FormatCheck(True)


def check_json_object(text: str) -> FormatCheck:
    """Check that an answer is one JSON object."""
    found = parse_json_answer(text)
    if isinstance(found, FormatCheck):
        return found
    if isinstance(found.value, dict):
        return FormatCheck(True)
    return FormatCheck(False, "the answer is JSON, but not an object")


def parse_json_answer(text: str) -> JsonAnswer | FormatCheck:
    """Return the JSON value of an answer, or the failed check."""
    if len(text) > MAX_CHARACTERS:
        return FormatCheck(None, f"the answer is not checked: over {MAX_CHARACTERS} characters")
    if not text.strip():
        return FormatCheck(False, "the answer is empty")
    try:
        return JsonAnswer(
            json.loads(text, parse_int=_parse_integer, parse_constant=_refuse_constant)
        )
    except ValueError as error:
        return FormatCheck(False, f"the answer is not JSON: {error}")
    except RecursionError:
        return FormatCheck(
            False, "the answer is not JSON that can be parsed: it is nested too deep"
        )


def _parse_integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_INTEGER_DIGITS else float(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


MAX_PARTS = 5_000
MAX_COUNT = 10**12
"""Counts saturate here, far above `MAX_VISITS`."""

_SAME_VALUE = ("not", "if", "then", "else")
_SAME_VALUE_LISTS = ("allOf", "anyOf", "oneOf")
_SAME_VALUE_NAMED = ("dependentSchemas", "dependencies")
_BELOW = ("additionalProperties", "items", "additionalItems", "contains", "propertyNames")
_BELOW_LISTS = ("prefixItems", "items")
_REJECTED_KEYWORDS = (
    "$anchor",
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
    "$vocabulary",
    "unevaluatedItems",
    "unevaluatedProperties",
)
"""Unsupported keywords: they need another way to count visits or resolve references."""


@dataclass(frozen=True, slots=True)
class _Subschema:
    """A subschema; ``here`` and ``below`` are indices of others."""

    weight: int
    here: tuple[int, ...]
    below: tuple[tuple[int, ...], ...]
    """Groups, of which at most one part each is applied to the same value."""


class SchemaCost:
    """The graph of a schema's parts."""

    def __init__(self, parts: Sequence[_Subschema], order: Sequence[int]) -> None:
        """Store the parts, root first; ``order`` lists each part after those it applies here."""
        self._parts = parts
        self._order = order

    def count_visits(self, levels: int) -> list[int]:
        """Return the maximum number of visits of a value, for each depth."""
        counts, found = [0] * len(self._parts), list[int]()
        for level in range(levels):
            counts = self._count_level(counts, at_top=level == 0)
            found.append(counts[0])
        return found

    def _count_level(self, above: Sequence[int], *, at_top: bool) -> list[int]:
        counts = [0] * len(self._parts)
        for number in self._order:
            part = self._parts[number]
            own = part.weight if at_top else 0
            here = sum(counts[other] for other in part.here)
            below = sum(max(above[other] for other in group) for group in part.below)
            counts[number] = min(MAX_COUNT, own + here + below)
        return counts


def build_schema_cost(schema: JsonObject, *, where: str) -> SchemaCost:
    """Build the graph of a schema.

    Raises:
        UsageError: when a reference leaves the schema or recurses without end.
    """
    reading = _SchemaGraphBuilder(schema, where)
    parts = reading.build_parts()
    return SchemaCost(parts, _order_parts(parts, reading.places))


class _SchemaGraphBuilder:
    """Numbers the parts as they are found, starting with the root."""

    def __init__(self, schema: JsonObject, where: str) -> None:
        self._schema = schema
        self._where = where
        self._numbers = dict[int, int]()
        self._found = list[JsonObject]()
        self.places = list[str]()

    def build_parts(self) -> list[_Subschema]:
        parts = list[_Subschema]()
        self._number_schema(self._schema, self._where)
        while len(parts) < len(self._found):
            number = len(parts)
            parts.append(self._build_part(self._found[number], self.places[number]))
        return parts

    def _build_part(self, schema: JsonObject, place: str) -> _Subschema:
        self._reject_keywords(schema, place)
        here = tuple(
            self._number_schema(child, at)
            for at, child in self._iter_same_value_schemas(schema, place)
        )
        below = tuple(
            tuple(self._number_schema(child, at) for at, child in group)
            for group in _iter_child_groups(schema, place)
            if group
        )
        return _Subschema(_measure_visit_cost(schema), here, below)

    def _number_schema(self, schema: JsonObject, place: str) -> int:
        known = self._numbers.get(id(schema))
        if known is not None:
            return known
        if len(self._found) == MAX_PARTS:
            raise UsageError(
                f"{self._where} has over {MAX_PARTS} parts", hint="use a smaller schema"
            )
        self._numbers[id(schema)] = len(self._found)
        self._found.append(schema)
        self.places.append(place)
        return len(self._found) - 1

    def _reject_keywords(self, schema: JsonObject, place: str) -> None:
        names = (
            *_REJECTED_KEYWORDS,
            *(("$id", "id", "$schema") if schema is not self._schema else ()),
        )
        for name in names:
            if isinstance(schema.get(name), str | dict | bool):
                raise UsageError(
                    f"{place}/{name}: {name} is not supported", hint="write the schema without it"
                )

    def _iter_same_value_schemas(
        self, schema: JsonObject, place: str
    ) -> Iterator[tuple[str, JsonObject]]:
        """Yield the schemas that are applied to the same value."""
        yield from _iter_keyword_schemas(schema, place, _SAME_VALUE)
        for name in _SAME_VALUE_LISTS:
            yield from _iter_listed_schemas(schema, place, name)
        for name in _SAME_VALUE_NAMED:
            yield from _iter_named_schemas(schema, place, name)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target = self._resolve_reference(reference, f"{place}/$ref")
            if isinstance(target, dict):
                yield f"{self._where}{reference[1:]}", target

    def _resolve_reference(self, reference: str, place: str) -> JsonValue:
        """Return the referenced schema."""
        if reference != "#" and not reference.startswith("#/"):
            raise UsageError(
                f"{place}: {reference[:200]!r} is outside this schema, and nothing is fetched",
                hint="put it below $defs and refer to it as #/$defs/NAME",
            )
        target: JsonValue = self._schema
        for word in unquote(reference[1:]).split("/")[1:]:
            target = _find_child(target, word.replace("~1", "/").replace("~0", "~"))
        if not isinstance(target, dict | bool):
            raise UsageError(
                f"{place}: there is no schema at {reference[:200]!r}", hint="correct the reference"
            )
        return target


def _iter_child_groups(schema: JsonObject, place: str) -> Iterator[list[tuple[str, JsonObject]]]:
    """Yield the schemas applied one level down, in groups of which one applies."""
    yield list(_iter_named_schemas(schema, place, "properties"))
    for child in _iter_named_schemas(schema, place, "patternProperties"):
        yield [child]
    for child in _iter_keyword_schemas(schema, place, _BELOW):
        yield [child]
    for name in _BELOW_LISTS:
        yield list(_iter_listed_schemas(schema, place, name))


def _iter_keyword_schemas(
    schema: JsonObject, place: str, names: Sequence[str]
) -> Iterator[tuple[str, JsonObject]]:
    for name in names:
        child = schema.get(name)
        if isinstance(child, dict):
            yield f"{place}/{name}", child


def _iter_listed_schemas(
    schema: JsonObject, place: str, name: str
) -> Iterator[tuple[str, JsonObject]]:
    children = schema.get(name)
    for number, child in enumerate(children if isinstance(children, list) else ()):
        if isinstance(child, dict):
            yield f"{place}/{name}/{number}", child


def _iter_named_schemas(
    schema: JsonObject, place: str, name: str
) -> Iterator[tuple[str, JsonObject]]:
    children = schema.get(name)
    for word, child in (children if isinstance(children, dict) else {}).items():
        if isinstance(child, dict):
            yield f"{place}/{name}/{word[:80]}", child


def _find_child(value: JsonValue, word: str) -> JsonValue:
    if isinstance(value, dict):
        return value.get(word)
    if isinstance(value, list) and word.isascii() and word.isdigit() and int(word) < len(value):
        return value[int(word)]
    return None


def _measure_visit_cost(schema: Mapping[str, JsonValue]) -> int:
    """Return the cost of one visit; that of an ``enum`` is its length."""
    return 1 + sum(len(v) if isinstance(v, list | dict) else 1 for v in schema.values())


def _order_parts(parts: Sequence[_Subschema], places: Sequence[str]) -> list[int]:
    """Return a topological order: each part after those it applies to the same value."""
    waiting = [len(part.here) for part in parts]
    users: list[list[int]] = [[] for _ in parts]
    for number, part in enumerate(parts):
        for other in part.here:
            users[other].append(number)
    order = [number for number, count in enumerate(waiting) if count == 0]
    for number in order:  # grows during the loop
        for user in users[number]:
            waiting[user] -= 1
            if waiting[user] == 0:
                order.append(user)
    if len(order) < len(parts):
        place = places[next(n for n, count in enumerate(waiting) if count)]
        raise UsageError(
            f"{place} refers to itself endlessly", hint="recurse through a property or item"
        )
    return order


MAX_VALUES = 50_000
MAX_DEPTH = 64
MAX_VISITS = 5_000_000
"""Maximum visits of a check; an answer that needs more is not checked."""
_MAX_PATTERN_BYTES = 1 << 18
MAX_PATTERNS, MAX_PATTERN_CHARACTERS = 100, 10_000
"""Maximum patterns of a schema, and maximum characters of all of them."""
_HINT = "correct the schema; patterns support neither look-around nor back-references"
_NEWEST = "https://json-schema.org/draft/2020-12/schema"
_DIALECTS: Mapping[str, type[jsonschema_rs.Validator]] = {
    _NEWEST: jsonschema_rs.Draft202012Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema_rs.Draft201909Validator,
    "http://json-schema.org/draft-07/schema": jsonschema_rs.Draft7Validator,
}


@dataclass(frozen=True, slots=True)
class AnswerSchema:
    """A compiled schema, and its cost."""

    validator: jsonschema_rs.Validator
    cost: SchemaCost

    def check(self, text: str) -> FormatCheck:
        """Check that an answer is JSON that fits the schema."""
        found = parse_json_answer(text)
        return found if isinstance(found, FormatCheck) else self.check_value(found.value)

    def check_value(self, value: JsonValue, *, what: str = "the answer") -> FormatCheck:
        """Check that a value fits the schema; ``what`` names the value in messages."""
        unchecked = f"{what} is not checked"
        values = list(islice(_count_levels(value), MAX_DEPTH + 1))
        if len(values) > MAX_DEPTH:
            return FormatCheck(None, f"{unchecked}: nested deeper than {MAX_DEPTH}")
        if sum(map(mul, values, self.cost.count_visits(len(values)))) > MAX_VISITS:
            return FormatCheck(None, f"{unchecked}: its schema would take too long")
        if _has_infinity(value):
            return FormatCheck(None, f"{unchecked}: a number in it is too large")
        try:
            return self._validate(value, what)
        except ValueError as unreadable:  # such as a lone surrogate
            return FormatCheck(None, f"{unchecked}: {unreadable}"[:MAX_PROBLEM_LENGTH])

    def _validate(self, value: JsonValue, what: str) -> FormatCheck:
        error = next(iter(self.validator.iter_errors(value)), None)
        if error is None:
            return FormatCheck(True)
        place = "/".join(map(str, error.instance_path)) or "the whole"
        problem = f"{what} does not fit its schema: {place[:100]}: {error.message}"
        return FormatCheck(False, shorten_middle(problem))


def compile_schema(schema: JsonObject, *, where: str) -> AnswerSchema:
    """Compile a schema from a request; ``where`` names its field in messages.

    Raises:
        UsageError: when it is too large, has outside references or is invalid; names the place.
    """
    check_schema_bounds(schema, where=where)
    dialect = _find_dialect(schema, where)
    cost = build_schema_cost(schema, where=where)
    try:
        validator = dialect(
            schema,
            offline=True,
            pattern_options=jsonschema_rs.RegexOptions(size_limit=_MAX_PATTERN_BYTES),
        )
    except jsonschema_rs.ValidationError as error:
        place = "/".join([where, *map(str, error.instance_path)])
        problem = f"{shorten_middle(place)}: {shorten_middle(error.message)}"
        raise UsageError(problem, hint=_HINT) from error
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise UsageError(f"{where}: {shorten_middle(str(error))}", hint=_HINT) from error
    return AnswerSchema(validator, cost)


def check_schema_bounds(schemas: JsonValue, *, where: str) -> None:
    """Check the size of a schema, or of a list of schemas together, before compiling.

    Raises:
        UsageError: when there are too many values or patterns.
    """
    _check_size(schemas, where)
    _check_patterns(schemas, where)


def _check_size(schema: JsonValue, where: str) -> None:
    values = 0
    for depth, count in enumerate(_count_levels(schema)):
        values += count
        if values > MAX_VALUES or depth > MAX_DEPTH:
            raise UsageError(
                f"{where} has over {MAX_VALUES} values, or is nested deeper than {MAX_DEPTH}",
                hint="use a smaller schema",
            )


def _check_patterns(schema: JsonValue, where: str) -> None:
    patterns = [
        pattern
        for level in _iter_levels(schema)
        for value in level
        if isinstance(value, dict)
        for pattern in _find_patterns(value)
    ]
    if len(patterns) > MAX_PATTERNS or sum(map(len, patterns)) > MAX_PATTERN_CHARACTERS:
        raise UsageError(
            f"{where} has over {MAX_PATTERNS} patterns, or over {MAX_PATTERN_CHARACTERS} "
            "characters of them",
            hint="use a smaller schema",
        )


def _find_patterns(schema: JsonObject) -> Iterator[str]:
    named = schema.get("patternProperties")
    yield from named if isinstance(named, dict) else ()
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        yield pattern


def _find_dialect(schema: JsonObject, where: str) -> type[jsonschema_rs.Validator]:
    named = schema.get("$schema", _NEWEST)
    found = _DIALECTS.get(named.removesuffix("#")) if isinstance(named, str) else None
    if found is None:
        raise UsageError(f"{where}/$schema is not a supported dialect", hint=f"use {_NEWEST}")
    return found


def _count_levels(value: JsonValue) -> Iterator[int]:
    """Yield the number of values at each depth."""
    return map(len, _iter_levels(value))


def _has_infinity(value: JsonValue) -> bool:
    """Tell whether a number is infinite: too large for a float."""
    values = (one for level in _iter_levels(value) for one in level)
    return any(isinstance(one, float) and isinf(one) for one in values)


def _iter_levels(value: JsonValue) -> Iterator[list[JsonValue]]:
    level = [value]
    while level:
        yield level
        level = [child for one in level for child in get_children(one)]
