"""One operation of ``/api/v1``: a typed function, and how a request becomes its arguments.

A handler takes the `Context` first; its other parameters, ``path``, ``query`` and ``body``, are
read from the request as their annotated types. The OpenAPI document is made only from these types
and that of the answer, so the document and the API cannot disagree.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar, get_type_hints

import msgspec
from anyio import to_thread
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from expertctl.errors import InvalidPackageError, MediaTypeError, UsageError
from expertctl.schema.shape import shape
from expertctl.schema.strict_json import JsonObject, load_object
from registry_server.access.authentication import identity_of
from registry_server.access.identity import Identity
from registry_server.registry import Registry

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Handler = Callable[..., Struct | None]
JSON = "application/json"
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_Kind = TypeVar("_Kind", bound=Struct)


@dataclass(frozen=True, slots=True)
class Context:
    """What every handler may use."""

    registry: Registry
    identity: Identity


@dataclass(frozen=True)
class Operation:
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
    def inputs(self) -> Mapping[str, type[Struct]]:
        """The types of ``path``, ``query`` and ``body``, where the handler takes them."""
        hints = get_type_hints(self.handler)
        return {name: hints[name] for name in ("path", "query", "body") if name in hints}

    @cached_property
    def answer(self) -> type[Struct] | None:
        """The type of the answer, None for an empty one."""
        kind = get_type_hints(self.handler)["return"]
        return None if kind is type(None) else kind

    async def respond(self, request: Request, registry: Registry) -> Response:
        """Answer one request; the handler runs in a thread, it may wait for the disk."""
        context = Context(registry, identity_of(request))
        values = {name: await self._read(name, request) for name in self.inputs}
        answer = await to_thread.run_sync(lambda: self.handler(context, **values))
        content = b"" if answer is None else msgspec.json.encode(answer)
        media_type = None if answer is None else JSON
        return Response(content, self.status, _HEADERS, media_type=media_type)

    async def _read(self, name: str, request: Request) -> Struct:
        kind = self.inputs[name]
        if name == "body":
            return await _body(request, kind)
        fields = dict(request.path_params) if name == "path" else _query(request)
        return _converted(fields, kind, f"the {name}", strict=False)


async def _body(request: Request, kind: type[_Kind]) -> _Kind:
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
    return _converted(_whole(fields), kind, "the body", strict=True)


def _whole(fields: JsonObject) -> JsonObject:
    """To JSON Schema ``5.0`` is an integer like ``5``; no field of ours is a fraction."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in fields.items()
    }


def _query(request: Request) -> dict[str, str]:
    pairs = request.query_params.multi_items()
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise UsageError("a query parameter is given twice")
    return fields


def _converted(
    fields: Mapping[str, object], kind: type[_Kind], what: str, *, strict: bool
) -> _Kind:
    try:
        return shape(fields, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise UsageError(f"{what} is not as it must be: {error}") from error
