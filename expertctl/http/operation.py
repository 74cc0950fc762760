"""Operations of an HTTP API: a route, its types, its answers and its errors in one declaration.

The annotations of a handler say how a request becomes its arguments and what it answers; the
OpenAPI document is built from the same annotations (`expertctl.http.openapi`), so the two agree.
A handler takes a context first, then any of these parameters, by name:

- ``path`` and ``query``: a struct whose fields are the parameters in the path or in the query;
- ``body``: a struct, or a `ParsedBody` of one, whose unknown fields the server may ignore;
- ``request``: the request itself;
- ``arrival``: the time when the request arrived, before its body was read.

It returns a struct, None for an empty answer, a `Reply` for a document with headers, or a
`Response` of a class with a media type: text, or a stream of events. A coroutine function runs in
the event loop; any other function runs in a thread, so it may block.

Bodies of requests are strict JSON; their size and the pace of their upload are checked earlier, by
`expertctl.http.limits`. The most specific class of an error decides its status. Each server adds
the statuses of the classes that mean something else there.
"""

import asyncio
import inspect
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from types import NoneType, UnionType
from typing import Any, Generic, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

import msgspec
from anyio import CapacityLimiter, to_thread
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from expertctl.errors import (
    DiskFullError,
    ExpertError,
    ForbiddenError,
    InvalidPackageError,
    MediaTypeError,
    MisdirectedError,
    NotFoundError,
    RateLimitError,
    SlowBodyError,
    StoreError,
    TooLargeError,
    UnauthenticatedError,
    UsageError,
)
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.schema.validation import convert_document

RETRY_SECONDS = 5
"""The ``Retry-After`` of a 503, for which no better estimate exists."""
SHARED_STATUSES: Mapping[type[ExpertError], int] = {
    UsageError: 400,
    UnauthenticatedError: 401,
    ForbiddenError: 403,
    NotFoundError: 404,
    SlowBodyError: 408,
    TooLargeError: 413,
    MediaTypeError: 415,
    MisdirectedError: 421,
    RateLimitError: 429,
    StoreError: 503,
    DiskFullError: 507,
}


class FieldError(UsageError):
    """A field of a request is invalid; ``field`` is its path, such as ``messages[0].role``."""

    def __init__(self, message: str, *, field: str, hint: str = "") -> None:
        """Store the message and the field's path, which is empty for the body itself."""
        super().__init__(message, hint=hint)
        self.field = field

    @classmethod
    def at(cls, field: str, fact: str, *, hint: str = "") -> Self:
        """Return an error whose message is the field and a fact about it."""
        return cls(f"{field}: {fact}", field=field, hint=hint)


def find_status(error: ExpertError, own: Mapping[type[ExpertError], int]) -> int:
    """Return the HTTP status of an error: by ``own``, else by `SHARED_STATUSES`, else 500."""
    statuses = {**SHARED_STATUSES, **own}
    found = (statuses.get(cls) for cls in type(error).__mro__)
    return next((status for status in found if status is not None), 500)


def find_retry_after(error: ExpertError, status: int) -> int | None:
    """Return the seconds after which a retry may succeed; None if retrying is pointless."""
    if isinstance(error, RateLimitError):
        return error.retry_after
    return RETRY_SECONDS if status == 503 else None


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


Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Handler = Callable[..., Any]
StructType = type[Struct]
NO_STORE: Mapping[str, str] = {"Cache-Control": "no-store"}
_INPUTS = ("path", "query", "body", "request", "arrival")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class ParsedBody(Generic[_Value]):
    """A parsed body, and the paths of its ignored fields."""

    value: _Value
    ignored_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply(Generic[_Value]):
    """A document to answer with, and further headers."""

    document: _Value
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int | None = None
    """Replaces the status of the operation."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The arrival time of a request, by both clocks."""

    wall_time: float = field(default_factory=time.time)
    tick: float = field(default_factory=time.perf_counter)

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds since the arrival."""
        return (time.perf_counter() - self.tick) * 1e3


@dataclass(frozen=True)
class Operation:
    """A method and a path of an API, the handler that answers them, and their description."""

    method: Method
    path: str
    handler: Handler
    tag: str
    status: int = 200
    errors: tuple[int, ...] = ()
    """Statuses beyond those that every request may get."""
    _: KW_ONLY
    is_public: bool = False
    """Whether it answers without a key or token."""
    authorise: Callable[[Request], None] | None = None
    """Refuses callers without the right, before the body is read."""
    parameters: tuple[JsonObject, ...] = ()
    """OpenAPI parameters that the handler reads from the request itself."""
    referenced_types: tuple[StructType, ...] = ()
    """Types that other types refer to only by name."""
    same_form_statuses: tuple[int, ...] = ()
    """Error statuses whose body has the type of the successful answer."""
    example: JsonObject | None = None
    """A body that works on any server."""

    @property
    def name(self) -> str:
        """The name of the handler."""
        return self.handler.__name__

    @property
    def summary(self) -> str:
        """The first line of the handler's docstring."""
        return (self.handler.__doc__ or "").partition("\n")[0]

    @property
    def path_template(self) -> str:
        """The path as OpenAPI writes it: without the converters of the router."""
        return self.path.replace(":path}", "}")

    @property
    def body_type(self) -> StructType | None:
        """The type of the body; None if it takes none."""
        kind: StructType | None = self.input_types.get("body")
        return get_args(kind)[0] if self.allows_unknown_fields else kind

    @property
    def allows_unknown_fields(self) -> bool:
        """Whether unknown fields of the body may be ignored."""
        return get_origin(self.input_types.get("body")) is ParsedBody

    @cached_property
    def input_types(self) -> Mapping[str, Any]:
        """The parameters of the handler after the context, with their types."""
        return {name: kind for name, kind in self._annotations.items() if name in _INPUTS}

    @cached_property
    def response_types(self) -> Mapping[str, tuple[object, ...]]:
        """The types of the answer, by media type; empty if the answer is."""
        found: dict[str, tuple[object, ...]] = {}
        for option in _iter_options(self._annotations["return"]):
            media_type, kinds = _describe_answer(option)
            found[media_type] = (*found.get(media_type, ()), *kinds)
        found.pop("", None)
        return found

    @cached_property
    def _annotations(self) -> Mapping[str, Any]:
        return get_type_hints(self.handler, include_extras=True)


def _iter_options(annotation: object) -> Iterator[object]:
    if get_origin(annotation) in (Union, UnionType):
        for option in get_args(annotation):
            yield from _iter_options(option)
    else:
        yield annotation


def _describe_answer(option: object) -> tuple[str, tuple[object, ...]]:
    """Return the media type of an answer and the types of its content."""
    origin, arguments = get_origin(option) or option, get_args(option)
    if origin is NoneType:
        return "", ()
    if origin is Reply:
        return JSON_MEDIA_TYPE, tuple(_iter_options(arguments[0]))
    if isinstance(origin, type) and issubclass(origin, Response):
        kinds = tuple(kind for argument in arguments for kind in _iter_options(argument))
        return str(origin.media_type), kinds or (str,)
    return JSON_MEDIA_TYPE, (option,)


ReadBody = Callable[[Request, Operation], Awaitable[object]]
"""Reads the body of a request as the type that an operation declares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRouter:
    """Answers requests by operations."""

    make_context: Callable[[Request], object]
    """Makes the first argument of the handlers."""
    read_body: ReadBody
    headers: Mapping[str, str] = field(default_factory=lambda: NO_STORE)
    """Headers of every answer that is a document or empty."""

    def build_routes(self, operations: Sequence[Operation]) -> list[BaseRoute]:
        """Return one route for each path, in the order of the operations."""
        by_path: dict[str, dict[str, Operation]] = {}
        for operation in operations:
            by_path.setdefault(operation.path, {})[operation.method] = operation
        return [
            Route(path, self._make_endpoint(by_method), methods=list(by_method))
            for path, by_method in by_path.items()
        ]

    def _make_endpoint(
        self, by_method: Mapping[str, Operation]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            method = "GET" if request.method == "HEAD" else request.method
            return await self._respond(by_method[method], request)

        return endpoint

    async def _respond(self, operation: Operation, request: Request) -> Response:
        arrival, context = Arrival(), self.make_context(request)
        if operation.authorise is not None:
            operation.authorise(request)
        inputs: dict[str, object] = {}
        for name, kind in operation.input_types.items():
            match name:
                case "request":
                    inputs[name] = request
                case "arrival":
                    inputs[name] = arrival
                case "body":
                    inputs[name] = await self.read_body(request, operation)
                case _:
                    inputs[name] = _read_parameters(request, name, kind)
        answer = await _call_handler(operation.handler, context, inputs)
        return self._build_response(operation, answer)

    def _build_response(self, operation: Operation, answer: object) -> Response:
        match answer:
            case Response():
                return answer
            case None:
                return Response(b"", operation.status, self.headers)
            case Reply(document, headers, status):
                return _json_response(
                    document, status or operation.status, {**self.headers, **headers}
                )
            case _:
                return _json_response(answer, operation.status, self.headers)


def _json_response(document: object, status: int, headers: Mapping[str, str]) -> Response:
    content = msgspec.json.encode(document)
    return Response(content, status, headers, media_type=JSON_MEDIA_TYPE)


async def _call_handler(handler: Handler, context: object, inputs: Mapping[str, object]) -> object:
    if inspect.iscoroutinefunction(handler):
        return await handler(context, **inputs)
    return await to_thread.run_sync(lambda: handler(context, **inputs))


def _read_parameters(request: Request, place: str, kind: StructType) -> Struct:
    """Read the parameters in the path or in the query.

    Raises:
        UsageError: when one is unknown, invalid or repeated.
    """
    fields = dict(request.path_params) if place == "path" else _read_query(request)
    try:
        return convert_document(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"the {place} is invalid: {error}") from error


def _read_query(request: Request) -> dict[str, str]:
    pairs = request.query_params.multi_items()
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise UsageError("a query parameter is given twice")
    return fields
