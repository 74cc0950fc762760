"""Reading of JSON documents that may be large: checked by their schema, then made into values.

Of a small document all problems are told at once. Gathering them takes kilobytes and microseconds
for each, so a hostile file of some megabytes would take all memory: of a large one the first is
told.
"""

import json
from functools import cache
from typing import TypeVar

import jsonschema_rs
import msgspec

from expertctl.errors import InvalidPackageError
from expertctl.schema.shape import shape
from expertctl.schema.strict_json import JsonObject, load_object
from expertctl.schema.validation import LONGEST, problems_of, schema_path

MAX_BYTES = 16 << 20
SMALL = 64 << 10
"""Bytes of a document in which there is room for few problems."""
_Kind = TypeVar("_Kind")


def read_document(data: bytes, kind: type[_Kind], *, what: str, schema: str) -> _Kind:
    """Read an object of at most 16 MiB that a schema describes.

    Raises:
        InvalidPackageError: when it is malformed or too large.
    """
    document = load_object(data, what=what, max_bytes=MAX_BYTES)
    small = len(data) <= SMALL
    if problems := problems_of(document, schema) if small else _first_problem(document, schema):
        raise InvalidPackageError(what, problems)
    return shaped(document, kind, what=what)


def shaped(document: object, kind: type[_Kind], *, what: str) -> _Kind:
    """Make a value of what a schema has seen; it takes 4.0 for a whole number, a value does not.

    Raises:
        InvalidPackageError: when it is none.
    """
    try:
        return shape(document, kind)
    except msgspec.ValidationError as error:
        raise InvalidPackageError(what, [str(error)]) from error


def _first_problem(document: JsonObject, schema: str) -> list[str]:
    try:
        _validator(schema).validate(document)
    except jsonschema_rs.ValidationError as error:
        where = "/".join(str(part) for part in error.instance_path) or "document"
        return [f"{where[:LONGEST]}: {error.message[-LONGEST:]}"]
    return []


@cache
def _validator(name: str) -> jsonschema_rs.Draft202012Validator:
    schema = json.loads(schema_path(name).read_text(encoding="utf-8"))
    return jsonschema_rs.Draft202012Validator(schema)
