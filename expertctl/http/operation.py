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
"""

import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from anyio import to_thread
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from expertctl.errors import UsageError
from expertctl.http.request_body import JSON_MEDIA_TYPE
from expertctl.schema.strict_json import JsonObject
from expertctl.schema.validation import convert_document

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
