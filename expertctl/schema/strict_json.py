"""Strict parsing of untrusted JSON: bounded, and interpreted the same by every strict parser.

Refused: a BOM, anything but UTF-8, duplicate keys, lone surrogates, NaN and infinities, integers
beyond ±(2⁵³-1) (RFC 7493, I-JSON), nesting deeper than ``MAX_DEPTH``.
"""

import gc
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import rfc8785

from expertctl.errors import InvalidPackageError

MAX_DEPTH = 32
_MAX_INTEGER = 2**53 - 1
_NESTED = (list, dict)
_DIGITS = bytes(48 if 48 <= byte < 58 else byte for byte in range(256))
_LONG_DIGITS = b"0" * 16
"""Shorter integers are within bounds; a hook for each would cost as much as the parsing."""

_LARGE_DOCUMENT = 64 << 10
"""The garbage collector is paused while a longer document is parsed."""

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
JsonObject = dict[str, JsonValue]


class _StrictJsonError(ValueError):
    """A problem of the document."""


def loads(data: bytes, *, what: str, max_bytes: int) -> JsonValue:
    """Parse a JSON document.

    Raises:
        InvalidPackageError: for anything that two parsers could interpret differently.
    """
    if len(data) > max_bytes:
        raise InvalidPackageError(what, [f"too many bytes of JSON, at most {max_bytes} allowed"])
    try:
        if len(data) <= _LARGE_DOCUMENT:
            return _parse(data)
        with _pause_collection():
            return _parse(data)
    except UnicodeDecodeError as error:
        raise InvalidPackageError(what, [f"not UTF-8 at byte {error.start}"]) from error
    except (ValueError, RecursionError) as error:
        raise InvalidPackageError(what, [f"not strict JSON: {error}"]) from error


def load_object(data: bytes, *, what: str, max_bytes: int) -> JsonObject:
    """Parse a JSON document that must be an object.

    Raises:
        InvalidPackageError: as `loads`, and when it is not an object.
    """
    document = loads(data, what=what, max_bytes=max_bytes)
    if not isinstance(document, dict):
        raise InvalidPackageError(what, ["the document is not a JSON object"])
    return document


def read_bounded(path: Path, *, max_bytes: int) -> bytes:
    """Return at most ``max_bytes`` + 1 bytes of a file, enough for parsers to detect an excess."""
    with path.open("rb") as stream:
        return stream.read(max_bytes + 1)


def encode_canonical(document: object) -> bytes:
    """Return the RFC 8785 bytes of a document."""
    return rfc8785.dumps(document)  # type: ignore[arg-type]  # its alias is recursive over Any


def _parse(data: bytes) -> JsonValue:
    text = data.decode("utf-8")
    document: JsonValue = json.loads(
        text,
        object_pairs_hook=_reject_duplicates,
        parse_constant=_reject_constant,
        parse_int=_parse_integer if _LONG_DIGITS in data.translate(_DIGITS) else None,
        parse_float=_parse_finite,
    )
    _check_depth(document)
    if "\\u" in text:  # nothing else can make a surrogate of valid UTF-8
        _check_texts(document)
    return document


@contextmanager
def _pause_collection() -> Iterator[None]:
    """Pause the garbage collector: parsing makes no garbage.

    Each collection traverses everything parsed so far and blocks the process: for a million empty
    lists that took half a second, the parsing itself a tenth of it.
    """
    if not gc.isenabled():  # paused by another thread, or switched off before
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()


def _reject_duplicates(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    result = dict(pairs)
    if len(result) != len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise _StrictJsonError(f"duplicate key {name[:80]!r}")
    return result


def _reject_constant(name: str) -> NoReturn:
    raise _StrictJsonError(f"{name} is not a JSON number")


def _parse_finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _StrictJsonError(f"number {digits[:20]} is too large")
    return value


def _parse_integer(digits: str) -> int:
    value = int(digits) if len(digits) <= 17 else _MAX_INTEGER + 1
    if not -_MAX_INTEGER <= value <= _MAX_INTEGER:
        raise _StrictJsonError(f"integer {digits[:20]}… is beyond 2^53-1")
    return value


def _check_depth(document: JsonValue) -> None:
    """Check the depth level by level, which is cheap for a table of many tensors."""
    level: list[JsonValue] = [document]
    for _ in range(MAX_DEPTH + 2):
        level = [
            child for value in level if value.__class__ in _NESTED for child in get_children(value)
        ]
        if not level:
            return
    raise _StrictJsonError(f"nested deeper than {MAX_DEPTH}")


def _check_texts(value: JsonValue) -> None:
    for text in (value, *value) if isinstance(value, dict) else (value,):
        if isinstance(text, str):
            _check_text(text)
    for child in get_children(value):
        _check_texts(child)


def get_children(value: JsonValue) -> Collection[JsonValue]:
    """Return the values inside an object or an array; none for any other value."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _StrictJsonError("a string holds a lone surrogate") from error
