"""JSON Schemas (draft 2020-12), shipped in the wheel; checking reports all problems at once."""

import json
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import jsonschema_rs

from expertctl.schema.strict_json import JsonValue

_PACKAGE = Path(__file__).parent.parent
MAX_PROBLEMS = 50
LONGEST = 300
"""How many characters of a place, and of its problem, are shown."""
LARGE = 20_000
"""In a document of more values than this, only the first problem is reported.

All problems are gathered before the first is given, and each takes kilobytes: those of a hostile
document of some megabytes would take all memory.
"""
_MORE = "… and more"


def schema_path(name: str) -> Path:
    """Return the file of a schema: in the installed package, else in the checkout."""
    shipped = _PACKAGE / "_schemas" / f"{name}.schema.json"
    return shipped if shipped.exists() else _PACKAGE.parent / "schemas" / f"{name}.schema.json"


def problems_of(document: JsonValue, schema: str) -> list[str]:
    """Return what is wrong with a document, at most ``MAX_PROBLEMS`` lines; empty when valid."""
    validator = _validator(schema)
    if validator.is_valid(document):
        return []
    if _is_large(document):
        return [*_first_problem(validator, document), _MORE]
    problems: list[str] = []
    for error in validator.iter_errors(document):
        if len(problems) == MAX_PROBLEMS:
            return [*problems, _MORE]
        problems.append(_told(error))
    return problems


def _first_problem(
    validator: jsonschema_rs.Draft202012Validator, document: JsonValue
) -> Iterator[str]:
    try:
        validator.validate(document)
    except jsonschema_rs.ValidationError as error:
        yield _told(error)


def _is_large(document: JsonValue) -> bool:
    left, seen = [document], 0
    while left:
        value = left.pop()
        inside = value.values() if isinstance(value, dict) else value
        if isinstance(inside, str) or not isinstance(inside, Collection):
            continue
        seen += len(inside)
        if seen > LARGE:
            return True
        left.extend(inside)
    return False


def _told(error: jsonschema_rs.ValidationError) -> str:
    where = "/".join(str(part) for part in error.instance_path) or "document"
    return f"{where[:LONGEST]}: {_shortened(error.message)}"


def _shortened(message: str) -> str:
    """Cut the middle out: the value comes first, what is wrong with it last."""
    if len(message) <= LONGEST:
        return message
    return f"{message[: LONGEST // 2]}…{message[-LONGEST // 2 + 1 :]}"


@cache
def _validator(name: str) -> jsonschema_rs.Draft202012Validator:
    schema = json.loads(schema_path(name).read_text(encoding="utf-8"))
    return jsonschema_rs.Draft202012Validator(schema)
