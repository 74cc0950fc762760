"""JSON documents that may be large: read once, checked by their schema, then made into values."""

from typing import TypeVar

import msgspec

from expertctl.errors import InvalidPackageError
from expertctl.schema.shape import shape
from expertctl.schema.strict_json import JsonObject, load_object
from expertctl.schema.validation import problems_of

MAX_BYTES = 16 << 20
_Kind = TypeVar("_Kind")


def load_document(data: bytes, *, what: str) -> JsonObject:
    """Read an object of at most 16 MiB.

    Raises:
        InvalidPackageError: when it is none, or too large.
    """
    return load_object(data, what=what, max_bytes=MAX_BYTES)


def checked(document: JsonObject, kind: type[_Kind], *, what: str, schema: str) -> _Kind:
    """Make a value of an object that a schema describes.

    Raises:
        InvalidPackageError: when it is malformed.
    """
    if problems := problems_of(document, schema):
        raise InvalidPackageError(what, problems)
    return shaped(document, kind, what=what)


def shaped(document: object, kind: type[_Kind], *, what: str) -> _Kind:
    """Make a value of a document; a schema takes 4.0 for a whole number, a value does not.

    Raises:
        InvalidPackageError: when it does not fit ``kind``.
    """
    try:
        return shape(document, kind)
    except msgspec.ValidationError as error:
        raise InvalidPackageError(what, [str(error)]) from error
