"""Documents of JSON as dataclasses and structs, made from any thread.

msgspec 0.22 prepares a class when it is first used, and lets other threads see it half prepared:
two first uses at once end the process with a segmentation fault, as installs of several packages
did. So one thread prepares each class before any thread uses it.
"""

import threading
from typing import TypeVar

import msgspec

_Kind = TypeVar("_Kind")
_ready: set[object] = set()
_preparing = threading.Lock()


def shape(document: object, kind: type[_Kind], *, strict: bool = True) -> _Kind:
    """Turn what a parser returned into a value of a kind.

    Raises:
        msgspec.ValidationError: when it does not have that shape.
    """
    _prepare(kind)
    return msgspec.convert(document, kind, strict=strict)


def shape_json(data: bytes | str, kind: type[_Kind]) -> _Kind:
    """Turn JSON text into a value of a kind.

    Raises:
        msgspec.DecodeError: when it is no JSON, or does not have that shape.
    """
    _prepare(kind)
    return msgspec.json.decode(data, type=kind)


def _prepare(kind: object) -> None:
    if kind in _ready:
        return
    with _preparing:
        msgspec.json.Decoder(kind)
        _ready.add(kind)
