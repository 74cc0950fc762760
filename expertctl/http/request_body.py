"""Request bodies of both servers as typed values: strict JSON, or an error that names the field.

The size of a body and the pace of its upload are checked earlier, by `expertctl.http.limits`.
"""

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import msgspec
from anyio import CapacityLimiter, to_thread
from starlette.requests import ClientDisconnect, Request

from expertctl.errors import InvalidPackageError, MediaTypeError, UsageError
from expertctl.http.errors import FieldError
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.schema.validation import convert_document

JSON_MEDIA_TYPE = "application/json"
OPENAPI_PATH = "/openapi.json"
"""Where a server describes itself, unless it says otherwise."""
LARGE_BODY_BYTES = 64 << 10
"""Longer bodies are parsed in a thread, one at a time, to keep the event loop free."""
_Kind = TypeVar("_Kind")
_Result = TypeVar("_Result")
_LIMITERS: WeakKeyDictionary[object, CapacityLimiter] = WeakKeyDictionary()
_FLOAT = "got `float`"
_ERROR_PATH = re.compile(r" - at `(?:key in )?\$?(.*)`$", re.DOTALL)


async def read_body(
    request: Request, kind: type[_Kind], *, openapi_path: str = OPENAPI_PATH
) -> _Kind:
    """Read and parse the body of a request as a value of ``kind``.

    Raises:
        MediaTypeError: when its media type is not JSON.
        UsageError: when it is incomplete or not a strict JSON object; the hint names
            ``openapi_path``.
        FieldError: when it does not match the type; names the field.
    """
    return await read_and_parse(request, partial(parse_body, kind=kind, openapi_path=openapi_path))


async def read_and_parse(request: Request, parse: Callable[[bytes], _Result]) -> _Result:
    """Read the JSON body of a request and parse it, in a thread if it is large.

    Raises like `read_body`, and what ``parse`` raises.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != JSON_MEDIA_TYPE:
        raise MediaTypeError(
            f"the body must be {JSON_MEDIA_TYPE}", hint=f"send `Content-Type: {JSON_MEDIA_TYPE}`"
        )
    try:
        data = await request.body()
    except ClientDisconnect as error:
        raise UsageError("the request body is incomplete") from error
    if len(data) <= LARGE_BODY_BYTES:
        return parse(data)
    return await run_in_turn(partial(parse, data))


async def run_in_turn(work: Callable[[], _Result]) -> _Result:
    """Run blocking work in a thread, one call at a time."""
    return await to_thread.run_sync(work, limiter=_large_body_limiter())


def parse_body(data: bytes, kind: type[_Kind], *, openapi_path: str = OPENAPI_PATH) -> _Kind:
    """Parse a JSON object as a value of ``kind``; raises like `read_body`."""
    return convert_body(load_body(data, openapi_path=openapi_path), kind, openapi_path=openapi_path)


def load_body(data: bytes, *, openapi_path: str = OPENAPI_PATH) -> JsonObject:
    """Parse a strict JSON object.

    Raises:
        UsageError: when it is something else.
    """
    try:
        return load_object(data, what="the body", max_bytes=len(data))
    except InvalidPackageError as error:
        hint = f"send one JSON object; {_describe_schema_source(openapi_path)}"
        raise UsageError(error.message, hint=hint) from error


def convert_body(
    fields: JsonObject, kind: type[_Kind], *, openapi_path: str = OPENAPI_PATH
) -> _Kind:
    """Convert a JSON object to a value of ``kind``.

    In JSON Schema ``5.0`` is an integer; so if a float is refused, whole floats are converted to
    integers before a second attempt.

    Raises:
        FieldError: when it does not match the type; names the field.
    """
    try:
        return convert_document(fields, kind)
    except msgspec.ValidationError as error:
        refused = _make_field_error(error, openapi_path)
        if _FLOAT not in str(error):
            raise refused from error
    try:
        return convert_document(_whole_floats_to_integers(fields), kind)
    except msgspec.ValidationError as error:
        raise refused from error


def _make_field_error(error: msgspec.ValidationError, openapi_path: str) -> FieldError:
    place = _ERROR_PATH.search(str(error))
    fact = str(error)[: place.start()] if place else str(error)
    field = place[1].removeprefix(".") if place else ""
    where = f"`{field}` of the body" if field else "the body"
    hint = _describe_schema_source(openapi_path)
    return FieldError(f"{where}: {fact}", field=field, hint=hint)


def _describe_schema_source(openapi_path: str) -> str:
    return f"GET {openapi_path} describes every field"


def _whole_floats_to_integers(value: JsonValue) -> JsonValue:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_whole_floats_to_integers(item) for item in value]
        case dict():
            return {key: _whole_floats_to_integers(item) for key, item in value.items()}
        case _:
            return value


def _large_body_limiter() -> CapacityLimiter:
    """Return the limiter of this event loop: one large body at a time."""
    loop = asyncio.get_running_loop()
    return _LIMITERS.setdefault(loop, CapacityLimiter(1))
