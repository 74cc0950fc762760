"""JSON Schemas (draft 2020-12), shipped in the wheel; checking reports all problems at once."""

import json
from functools import cache
from pathlib import Path

import jsonschema_rs

from expertctl.schema.strict_json import JsonValue

_PACKAGE = Path(__file__).parent.parent
MAX_PROBLEMS = 50
LONGEST = 300
"""How many characters of a place, and of what is wrong there, are told."""


def schema_path(name: str) -> Path:
    """Return the file of a schema: in the installed package, else in the checkout."""
    shipped = _PACKAGE / "_schemas" / f"{name}.schema.json"
    return shipped if shipped.exists() else _PACKAGE.parent / "schemas" / f"{name}.schema.json"


def problems_of(document: JsonValue, schema: str) -> list[str]:
    """Return what is wrong with a document, at most ``MAX_PROBLEMS`` lines; empty when valid."""
    problems: list[str] = []
    for error in _validator(schema).iter_errors(document):
        if len(problems) == MAX_PROBLEMS:
            return [*problems, "… and more"]
        where = "/".join(str(part) for part in error.instance_path) or "document"
        problems.append(f"{where[:LONGEST]}: {_shortened(error.message)}")
    return problems


def _shortened(message: str) -> str:
    """Cut the middle out: the value comes first, what is wrong with it last."""
    if len(message) <= LONGEST:
        return message
    return f"{message[: LONGEST // 2]}…{message[-LONGEST // 2 + 1 :]}"


@cache
def _validator(name: str) -> jsonschema_rs.Draft202012Validator:
    schema = json.loads(schema_path(name).read_text(encoding="utf-8"))
    return jsonschema_rs.Draft202012Validator(schema)
