"""Answers that must fit a JSON Schema that came with the request.

The schema is untrusted: its size and depth are bounded, nothing that it refers to is fetched, its
patterns run in linear time, and how often it looks at a value is computed before it is applied.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import isinf
from operator import mul

import jsonschema_rs

from expertctl.engine.answer_form import Checked
from expertctl.errors import UsageError
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.post_processing.json_answer import read_answer
from expertctl.server.post_processing.schema_cost import SchemaCost, read_cost

MAX_VALUES = 50_000
MAX_DEPTH = 64
MAX_LOOKS = 5_000_000
"""An answer whose check would take more looks at its values is not checked."""
_PATTERN_BYTES = 1 << 18
MAX_PATTERNS, MAX_PATTERN_CHARACTERS = 100, 10_000
"""Most patterns of a schema, and most characters of all of them together."""
_MOST_SHOWN = 300
_HINT = "correct the schema; patterns have neither look-around nor references back"
_NEWEST = "https://json-schema.org/draft/2020-12/schema"
_DIALECTS: Mapping[str, type[jsonschema_rs.Validator]] = {
    _NEWEST: jsonschema_rs.Draft202012Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema_rs.Draft201909Validator,
    "http://json-schema.org/draft-07/schema": jsonschema_rs.Draft7Validator,
}


@dataclass(frozen=True, slots=True)
class AnswerSchema:
    """A schema that was read, and what it costs."""

    validator: jsonschema_rs.Validator
    cost: SchemaCost

    def check(self, text: str) -> Checked:
        """Check that an answer is JSON that fits the schema."""
        found = read_answer(text)
        return found if isinstance(found, Checked) else self.check_value(found.value)

    def check_value(self, value: JsonValue, *, what: str = "the answer") -> Checked:
        """Check that a value fits the schema; ``what`` names the value in messages."""
        unchecked = f"{what} is not checked"
        values = list(islice(_levels(value), MAX_DEPTH + 1))
        if len(values) > MAX_DEPTH:
            return Checked(None, f"{unchecked}: nested deeper than {MAX_DEPTH}")
        if sum(map(mul, values, self.cost.looks(len(values)))) > MAX_LOOKS:
            return Checked(None, f"{unchecked}: its schema would take too long")
        if _has_infinity(value):
            return Checked(None, f"{unchecked}: a number in it is too large")
        try:
            return self._fitting(value, what)
        except ValueError as unreadable:  # such as a lone surrogate
            return Checked(None, f"{unchecked}: {unreadable}"[:_MOST_SHOWN])

    def _fitting(self, value: JsonValue, what: str) -> Checked:
        error = next(iter(self.validator.iter_errors(value)), None)
        if error is None:
            return Checked(True)
        place = "/".join(map(str, error.instance_path)) or "the whole"
        problem = f"{what} does not fit its schema: {place[:100]}: {error.message}"
        return Checked(False, _shortened(problem))


def read_schema(schema: JsonObject, *, where: str) -> AnswerSchema:
    """Read a schema that came with a request.

    Raises:
        UsageError: when it is too large, refers to other places, or is no schema; names the place.
    """
    check_bounds(schema, where=where)
    dialect = _dialect(schema, where)
    cost = read_cost(schema, where=where)
    try:
        validator = dialect(
            schema,
            offline=True,
            pattern_options=jsonschema_rs.RegexOptions(size_limit=_PATTERN_BYTES),
        )
    except jsonschema_rs.ValidationError as error:
        place = "/".join([where, *map(str, error.instance_path)])
        raise UsageError(f"{_shortened(place)}: {_shortened(error.message)}", hint=_HINT) from error
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise UsageError(f"{where}: {_shortened(str(error))}", hint=_HINT) from error
    return AnswerSchema(validator, cost)


def check_bounds(schemas: JsonValue, *, where: str) -> None:
    """Bound one schema, or all schemas of a list together, before any is compiled.

    Raises:
        UsageError: when there are too many values or patterns.
    """
    _check_size(schemas, where)
    _check_patterns(schemas, where)


def _check_size(schema: JsonValue, where: str) -> None:
    values = 0
    for depth, count in enumerate(_levels(schema)):
        values += count
        if values > MAX_VALUES or depth > MAX_DEPTH:
            raise UsageError(
                f"{where} has over {MAX_VALUES} values, or is nested deeper than {MAX_DEPTH}",
                hint="use a smaller schema",
            )


def _check_patterns(schema: JsonValue, where: str) -> None:
    patterns = [
        pattern
        for level in _by_level(schema)
        for value in level
        if isinstance(value, dict)
        for pattern in _patterns_of(value)
    ]
    if len(patterns) > MAX_PATTERNS or sum(map(len, patterns)) > MAX_PATTERN_CHARACTERS:
        raise UsageError(
            f"{where} has over {MAX_PATTERNS} patterns, or over {MAX_PATTERN_CHARACTERS} "
            "characters of them",
            hint="use a smaller schema",
        )


def _patterns_of(schema: JsonObject) -> Iterator[str]:
    named = schema.get("patternProperties")
    yield from named if isinstance(named, dict) else ()
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        yield pattern


def _dialect(schema: JsonObject, where: str) -> type[jsonschema_rs.Validator]:
    named = schema.get("$schema", _NEWEST)
    found = _DIALECTS.get(named.removesuffix("#")) if isinstance(named, str) else None
    if found is None:
        raise UsageError(f"{where}/$schema is none that is known", hint=f"use {_NEWEST}")
    return found


def _levels(value: JsonValue) -> Iterator[int]:
    """Return how many values there are at each level."""
    return map(len, _by_level(value))


def _has_infinity(value: JsonValue) -> bool:
    """Tell whether a number is infinite, too large to be compared."""
    values = (one for level in _by_level(value) for one in level)
    return any(isinstance(one, float) and isinf(one) for one in values)


def _by_level(value: JsonValue) -> Iterator[list[JsonValue]]:
    level = [value]
    while level:
        yield level
        level = [child for one in level for child in _children(one)]


def _children(value: JsonValue) -> Iterable[JsonValue]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _shortened(text: str) -> str:
    """Cut out the middle of a long text: the problem is named at its end."""
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[: _MOST_SHOWN // 2]}…{text[-_MOST_SHOWN // 2 + 1 :]}"
