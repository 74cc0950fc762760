"""The words of ``/api/v1``: the kinds of text and number that bodies and answers are made of.

Types that come in refuse keys that they do not know. Times are RFC 3339 in UTC, sizes are bytes.
The same types check requests and make the OpenAPI document.

One operation of ``/api/v1``: a typed function, and how a request becomes its arguments.

A handler takes the `Context` first; its other parameters, ``path``, ``query`` and ``body``, are
read from the request as their annotated types. The OpenAPI document is made only from these types
and that of the answer, so the document and the API cannot disagree.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Annotated, Literal, TypeVar, get_type_hints

import msgspec
from anyio import to_thread
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from expertctl.errors import InvalidPackageError, MediaTypeError, UsageError
from expertctl.registry.index_document import format_time
from expertctl.schema.strict_json import JsonObject, load_object
from expertctl.schema.validation import convert_document
from registry_server.access.authentication import get_identity
from registry_server.access.rights import Identity
from registry_server.registry import Registry

MAX_PAGE = 100
MAX_BYTES = 2**53 - 1
_WORD = r"[a-z0-9]+(-[a-z0-9]+)*"
_REST = r"[a-z0-9]+([._/-]+[a-z0-9]+)*"
_NUMBER = r"(0|[1-9][0-9]{0,8})"
_IDENTIFIER = r"(0|[1-9][0-9]{0,8}|[0-9]*[a-zA-Z-][0-9a-zA-Z-]*)"

Name = Annotated[str, Meta(pattern=f"^{_WORD}$", max_length=64, examples=["acme"])]
VersionText = Annotated[
    str,
    Meta(
        pattern=rf"^{_NUMBER}\.{_NUMBER}\.{_NUMBER}(-{_IDENTIFIER}(\.{_IDENTIFIER})*)?$",
        max_length=128,
        examples=["1.2.0"],
    ),
]
KeyId = Annotated[str, Meta(pattern="^sha256:[0-9a-f]{64}$")]
TokenId = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
ScopeText = Annotated[
    str,
    Meta(
        pattern=rf"^(admin|(read|push|delete|yank|manage)(:{_WORD}(/{_REST})?)?)$",
        max_length=200,
        examples=["read", "push:acme/sql"],
    ),
]
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Line = Annotated[str, Meta(min_length=1, max_length=100, description="One printable line.")]
Reason = Annotated[str, Meta(min_length=1, max_length=500, description="One printable line.")]
Limit = Annotated[int, Meta(ge=1, le=MAX_PAGE, description="How many at most.")]
Cursor = Annotated[
    str, Meta(max_length=100, description="What `next` of the page before said; empty at first.")
]
Offset = Annotated[
    str,
    Meta(pattern="^([1-9][0-9]{0,14})?$", description="What `next` said; empty at first."),
]
Quota = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Read = Literal["public", "token"]
Kind = Literal["expert", "oci"]
Role = Literal["owner", "publisher"]


class ApiInput(Struct, frozen=True, forbid_unknown_fields=True):
    """Something that a client sends."""


class ApiOutput(Struct, frozen=True):
    """Something that the server answers."""


class ListQuery(ApiInput, frozen=True):
    """Which part of a list is wanted."""

    limit: Limit = MAX_PAGE
    cursor: Cursor = ""


class AuditQuery(ApiInput, frozen=True):
    """Which part of a log is wanted."""

    limit: Limit = MAX_PAGE
    cursor: Offset = ""


class ErrorDetail(ApiOutput, frozen=True):
    """What went wrong: a stable word, a sentence, and the way out where there is one."""

    code: str
    message: str
    hint: str


class ErrorBody(ApiOutput, frozen=True):
    """The answer to a request that failed."""

    error: ErrorDetail


def format_timestamp(seconds: float) -> str:
    """Return a time as text."""
    return format_time(datetime.fromtimestamp(seconds, UTC))


def format_optional_time(seconds: float | None) -> str | None:
    """Return a time as text, None when there is none."""
    return None if seconds is None else format_timestamp(seconds)


Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Handler = Callable[..., Struct | None]
JSON = "application/json"
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_StructT = TypeVar("_StructT", bound=Struct)


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What every handler may use."""

    registry: Registry
    identity: Identity


@dataclass(frozen=True)
class ApiOperation:
    """A method and a path of the API, what answers them, and who may ask.

    ``anonymous``: a request without a token is answered too, though perhaps with less. ``errors``
    are the statuses beside those that every operation can have.
    """

    method: Method
    path: str
    handler: Handler
    tag: str
    status: int = 200
    errors: tuple[int, ...] = ()
    anonymous: bool = False

    @property
    def name(self) -> str:
        """The name of the handler."""
        return self.handler.__name__

    @property
    def summary(self) -> str:
        """The first line about the handler."""
        return (self.handler.__doc__ or "").partition("\n")[0]

    @cached_property
    def input_types(self) -> Mapping[str, type[Struct]]:
        """The types of ``path``, ``query`` and ``body``, where the handler takes them."""
        hints = get_type_hints(self.handler)
        return {name: hints[name] for name in ("path", "query", "body") if name in hints}

    @cached_property
    def response_type(self) -> type[Struct] | None:
        """The type of the answer, None for an empty one."""
        kind = get_type_hints(self.handler)["return"]
        return None if kind is type(None) else kind

    async def respond(self, request: Request, registry: Registry) -> Response:
        """Answer one request; the handler runs in a thread, it may wait for the disk."""
        context = ApiContext(registry, get_identity(request))
        values = {name: await self._read_input(name, request) for name in self.input_types}
        answer = await to_thread.run_sync(lambda: self.handler(context, **values))
        content = b"" if answer is None else msgspec.json.encode(answer)
        media_type = None if answer is None else JSON
        return Response(content, self.status, _HEADERS, media_type=media_type)

    async def _read_input(self, name: str, request: Request) -> Struct:
        kind = self.input_types[name]
        if name == "body":
            return await _read_body(request, kind)
        fields = dict(request.path_params) if name == "path" else _read_query(request)
        return _convert(fields, kind, f"the {name}", strict=False)


async def _read_body(request: Request, struct_type: type[_StructT]) -> _StructT:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != JSON:
        raise MediaTypeError(f"the body must be {JSON}")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk  # bounded for every route by operation.limits
    try:
        fields = load_object(bytes(data), what="the body", max_bytes=len(data))
    except InvalidPackageError as error:
        raise UsageError(error.message) from error
    return _convert(_normalise_integers(fields), struct_type, "the body", strict=True)


def _normalise_integers(fields: JsonObject) -> JsonObject:
    """To JSON Schema ``5.0`` is an integer like ``5``; no field of ours is a fraction."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in fields.items()
    }


def _read_query(request: Request) -> dict[str, str]:
    pairs = request.query_params.multi_items()
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise UsageError("a query parameter is given twice")
    return fields


def _convert(
    fields: Mapping[str, object], struct_type: type[_StructT], what: str, *, strict: bool
) -> _StructT:
    try:
        return convert_document(fields, struct_type, strict=strict)
    except msgspec.ValidationError as error:
        raise UsageError(f"{what} is not as it must be: {error}") from error
