"""The body of a request as a value: JSON read strictly, every field checked.

The size of the body and its pace are checked earlier: see `expertctl.server.guard`.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from anyio import CapacityLimiter, to_thread
from starlette.requests import ClientDisconnect, Request

from expertctl.errors import InvalidPackageError, MediaTypeError, UsageError
from expertctl.schema.shape import shape
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.server.field_error import FieldError
from expertctl.server.unknown_fields import remove_unknown_fields

JSON = "application/json"
LARGE = 64 << 10
"""Longer bodies are parsed in a thread, one at a time, so as not to block the event loop."""
_Kind = TypeVar("_Kind")
_Result = TypeVar("_Result")
_LIMITERS: WeakKeyDictionary[object, CapacityLimiter] = WeakKeyDictionary()
_FLOAT = "got `float`"
_DESCRIBED = "GET /openapi.json says what each field may be"
_PLACE = re.compile(r" - at `(?:key in )?\$?(.*)`$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Body(Generic[_Kind]):
    """A body that was read, and the names of its fields that were ignored."""

    value: _Kind
    ignored: tuple[str, ...] = ()


async def read_body(request: Request, kind: type[_Kind]) -> _Kind:
    """Return the body of a request as a value of a kind.

    Raises:
        MediaTypeError: when its media type is not JSON.
        UsageError: when it is not a strict JSON object, or is incomplete.
        FieldError: when it does not have the shape; it names the field.
    """
    return await _read(request, lambda data: parse_body(data, kind))


async def read_lenient_body(
    request: Request,
    kind: type[_Kind],
    *,
    strict: bool = False,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> Body[_Kind]:
    """Return the body of a request whose unknown fields are ignored, unless it is ``strict``.

    ``refused`` are unknown fields that are not ignored, and why, besides those of every call.

    Raises as `read_body` does, and `FieldError` for an unknown field that cannot be ignored.
    """
    if strict:
        return Body(await read_body(request, kind))
    return await _read(request, lambda data: parse_lenient_body(data, kind, refused=refused))


async def _read(request: Request, parse: Callable[[bytes], _Result]) -> _Result:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != JSON:
        raise MediaTypeError(f"the body must be {JSON}", hint=f"send `Content-Type: {JSON}`")
    try:
        data = await request.body()
    except ClientDisconnect as error:
        raise UsageError("the body of the request did not come whole") from error
    if len(data) <= LARGE:
        return parse(data)
    return await in_turn(partial(parse, data))


async def in_turn(work: Callable[[], _Result]) -> _Result:
    """Do work that would block the event loop in a thread, one call at a time."""
    return await to_thread.run_sync(work, limiter=_large())


def parse_body(data: bytes, kind: type[_Kind]) -> _Kind:
    """Read a JSON object as a value of a kind; raises as `read_body` does."""
    return _shaped(_object(data), kind)


def parse_lenient_body(
    data: bytes, kind: type[_Kind], *, refused: Mapping[str, str] = MappingProxyType({})
) -> Body[_Kind]:
    """Read a JSON object without its unknown fields; raises as `read_lenient_body` does."""
    fields = _object(data)
    ignored = remove_unknown_fields(fields, kind, refused=refused)
    return Body(_shaped(fields, kind), ignored)


def _object(data: bytes) -> JsonObject:
    try:
        return load_object(data, what="the body", max_bytes=len(data))
    except InvalidPackageError as error:
        raise UsageError(error.message, hint=f"send one JSON object; {_DESCRIBED}") from error


def _shaped(fields: JsonObject, kind: type[_Kind]) -> _Kind:
    try:
        return shape(fields, kind)
    except msgspec.ValidationError as error:
        if _FLOAT not in str(error):
            raise _misshapen(error) from error
        return _with_whole_numbers(fields, kind, error)


def _with_whole_numbers(
    fields: JsonValue, kind: type[_Kind], first: msgspec.ValidationError
) -> _Kind:
    """Read again with whole floats as integers: in JSON Schema ``5.0`` is an integer."""
    try:
        return shape(_whole(fields), kind)
    except msgspec.ValidationError:
        raise _misshapen(first) from first


def _misshapen(error: msgspec.ValidationError) -> FieldError:
    place = _PLACE.search(str(error))
    fact = str(error)[: place.start()] if place else str(error)
    field = place[1].removeprefix(".") if place else ""
    where = f"`{field}` of the body" if field else "the body"
    return FieldError(f"{where}: {fact}", field=field, hint=_DESCRIBED)


def _whole(value: JsonValue) -> JsonValue:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_whole(item) for item in value]
        case dict():
            return {key: _whole(item) for key, item in value.items()}
        case _:
            return value


def _large() -> CapacityLimiter:
    """Return the limiter that lets one large body of this event loop be read at a time."""
    loop = asyncio.get_running_loop()
    return _LIMITERS.setdefault(loop, CapacityLimiter(1))
